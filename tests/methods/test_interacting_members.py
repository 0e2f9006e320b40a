"""Methods whose members act on each other: what holds of all, how strong the force is, and LIT's penalty."""

import copy
import math

import pytest
import torch
from test_rde import builders, flat_gradients, networks, plain
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core import gradients, gradients as strategies
from dissensus.core.batch import Batch
from dissensus.methods import LIT, SVGD, FeatureRDE, FoRDE, FunctionRDE, WeightRDE
from dissensus.methods.forde import squared_cosines
from dissensus.methods.parts.repulsion import Strength
from dissensus.numerics.lengthscales import pca_lengthscales
from dissensus.numerics.rbf_kernels import BANDWIDTHS
from dissensus.training.validation import validation_nll
from refusals import refuses
from thinning import often

STRATEGIES = {
    "vectorised": strategies.vectorised_gradients,
    "loop": strategies.looped_gradients,
    "loop, graphs kept": strategies.looped_keeping_graphs,
}
REPULSIVE = {
    **builders(),
    "svgd, weight": lambda nets: SVGD(nets, data_size=50, space="weight"),
    "svgd, function": lambda nets: SVGD(nets, data_size=50, space="function"),
}


def forde_with_lengthscales(nets: list[nn.Module], bandwidth: str) -> FoRDE:
    spread = torch.tensor([3.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    scales = pca_lengthscales(tiny.points()[0] * spread, 0.9)
    return FoRDE(nets, repulsion=1.0, bandwidth=bandwidth, lengthscales=scales)


METHODS = {
    **REPULSIVE,
    **{f"forde, {b}": lambda nets, b=b: FoRDE(nets, repulsion=1.0, bandwidth=b) for b in BANDWIDTHS},
    **{f"forde, {b}, pca": lambda nets, b=b: forde_with_lengthscales(nets, b) for b in BANDWIDTHS},
    "lit": lambda nets: LIT(nets, strength=0.7),
}
OWN_DRAWS = "function, prior"  # members draw networks of their own from the prior
NEAR = [f"forde, {b}{pca}" for pca in ("", ", pca") for b in BANDWIDTHS][1:-1]  # kernels have tests of their own
ALL = often([name for name in METHODS if name not in (*NEAR, OWN_DRAWS)], NEAR)
# Graphs are kept for coupled members only; in weight space there is nothing to wait for.
WAYS = [
    (m, s)
    for m in (*REPULSIVE, "forde, reference")
    for s in STRATEGIES
    if not ("weight" in m and s == "loop, graphs kept")
]


def normed(count: int) -> list[nn.Module]:
    return networks(count, tiny.mlp)


@pytest.mark.parametrize(("method", "strategy"), WAYS)
def test_every_way_of_running_members_gives_the_gradients_of_loss(method, strategy):
    posterior, (x, y) = METHODS[method](normed(3)), tiny.points()
    other = copy.deepcopy(posterior)
    if method == OWN_DRAWS:
        # vmap draws all members' prior networks at once, the loop one after the other: other draws of the same prior
        other.particles.how = "vectorised" if strategy == "vectorised" else "loop"
    torch.manual_seed(3)
    found = STRATEGIES[strategy](posterior, Batch(x, y))
    gradients = posterior.mix(found.gradients) if posterior.interaction == "mix" else found.gradients
    torch.manual_seed(3)
    other.loss(x, y).backward()
    parameters = {**other.particles.own_parameters(), **other.particles.shared_parameters()}
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-10, msg=name)
    for name, buffer in other.particles.own_buffers().items():  # batch statistics move once
        torch.testing.assert_close(found.buffers[name], buffer, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("method", ALL)
def test_the_order_of_members_does_not_matter(method):
    nets, (x, y) = normed(4), tiny.points()
    order = [2, 0, 3, 1] if method != "feature" else [0, 3, 1, 2]  # the first one gives the head
    straight, shuffled = METHODS[method](nets), METHODS[method]([nets[i] for i in order])
    losses = straight.backward(x, y)
    torch.testing.assert_close(shuffled.backward(x, y), losses[order], rtol=0, atol=1e-12)
    for name, tensor in straight.particles.own_parameters().items():
        other = shuffled.particles.own_parameters()[name].grad
        torch.testing.assert_close(other, tensor.grad[order], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("method", ALL)
def test_float32_agrees_with_float64(method):
    # no batch norm: behind it the gradient of a bias is zero but for rounding
    nets = networks(4, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Identity(), nn.Linear(6, 3)))
    double, (x, y) = METHODS[method](nets), tiny.points()
    single = copy.deepcopy(double).float()
    double.backward(x, y)
    single.backward(x.float(), y)
    found = dict(single.named_parameters())
    for name, parameter in double.named_parameters():
        scale = float(parameter.grad.abs().max())
        near = {"rtol": 1e-4, "atol": 1e-4 * scale + 1e-7}
        torch.testing.assert_close(found[name].grad.double(), parameter.grad, **near, msg=name)


@pytest.mark.parametrize("method", ALL)
def test_one_member_is_exactly_a_map_network(method):
    net, (x, y) = tiny.mlp().double(), tiny.points()
    alone, single = METHODS[method]([net]), ds.MAP(copy.deepcopy(net))
    for posterior in (alone, single):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        ds.fit(posterior, [(x, y)], epochs=2, optimizer=optimizer, progress=False)
    assert torch.equal(alone.predict(x).mean, single.predict(x).mean)
    assert alone.interaction is None


def nearly_equal(distance: float, make=plain) -> list[nn.Module]:
    first = make().double()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(distance * torch.randn_like(parameter))
    return [first, second]


@pytest.mark.parametrize("method", ["weight", "function", "feature", "svgd, weight", "svgd, function"])
def test_near_equal_members_separate_and_do_not_explode(method):
    """Two members 1e-3 apart, trained on the same data, end further apart than without repulsion."""
    nets, (x, y) = nearly_equal(1e-3, tiny.mlp), tiny.points()

    def distance_after(posterior) -> float:
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        ds.fit(posterior, [(x, y)] * 10, epochs=1, optimizer=optimizer, progress=False)
        members = posterior.predict(x).log_probs
        assert bool(members.isfinite().all())
        return float((members[0] - members[1]).norm())

    assert distance_after(METHODS[method](nets)) > 3 * distance_after(ds.DeepEnsemble(nets))


@pytest.mark.parametrize("method", ["weight", "function", "feature", "svgd, weight", "svgd, function"])
@pytest.mark.parametrize("distance", [1e-6, 1e-9])
def test_the_bandwidth_floor_bounds_the_force_between_near_equal_members(method, distance):
    """Without it the force is 1/distance: a million at 1e-6."""
    first, (x, y) = tiny.mlp().double(), tiny.points()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight[0, 0] += distance
    posterior = METHODS[method]([first, second])
    posterior.backward(x, y)
    # |z_1 − z_2| / floor at most, over N or B, and no more than the loss's own gradients by orders of magnitude
    assert max(float(p.grad.abs().max()) for p in posterior.parameters()) < 100


def largest_weight_in_training(build, distance: float) -> float:
    """The largest absolute weight in 30 steps of SGD with momentum, two members starting this far apart in each weight."""
    torch.manual_seed(0)
    posterior, (x, y), largest = build(nearly_equal(distance)), tiny.points(), 0.0
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        largest = max(largest, *(float(parameter.detach().abs().max()) for parameter in posterior.parameters()))
    return largest


# name -> (method, limit). Weights grow to 2.0, 3.4, 16, 1.4, 3.2 and 8.5 with the floor, 1.7 without repulsion; to 24, 119,
# 376, 21, 97 and 200 with a thousandth of it. LIT's penalty is bounded, and so is its slope: it needs no floor.
BOUNDED = {
    "weight": (METHODS["weight"], 6),
    "function": (METHODS["function"], 10),
    "feature": (lambda nets: FeatureRDE(nets, layer="1", head="2"), 30),
    "svgd, weight": (METHODS["svgd, weight"], 6),
    "svgd, function": (METHODS["svgd, function"], 10),
    "forde": (FoRDE, 20),
    "forde, pca": (lambda nets: FoRDE(nets, lengthscales=pca_lengthscales(tiny.points()[0])), 20),
    "lit": (lambda nets: LIT(nets, strength=1.0), 5),
}
QUICK = ["weight", "svgd, weight", "forde, pca"]


@pytest.mark.parametrize("name", often(QUICK, [name for name in BOUNDED if name not in QUICK]))
def test_training_from_near_equal_members_stays_bounded(name):
    build, limit = BOUNDED[name]
    largest = [largest_weight_in_training(build, distance) for distance in (1e-7, 1e-4)]
    assert max(largest) < limit, largest


def test_the_three_kinds():
    assert Strength("1/N", 400)() == 1 / 400
    assert Strength(0.3, None)() == 0.3
    assert Strength("1/B", None, 50)(7) == 1 / 50
    assert Strength("1/B", None)(7) == 1 / 7


def test_a_batch_is_the_largest_seen_in_training_times_those_gathered():
    strength = Strength("1/B", None)
    for size in (12, 5):
        strength.note_batch_size(size, training=True)
    strength.note_batch_size(100, training=False)  # an evaluation is no training batch
    assert strength() == 1 / 12
    assert strength(gathered=4) == 1 / 48
    assert Strength("1/B", None, 48)(gathered=4) == 1 / 48  # told, it is the whole step's


def test_a_weight_of_two_is_two_examples_and_a_weight_of_zero_none():
    strength = Strength("1/B", None)
    strength.note_batch_size(4, training=True)
    assert float(strength(4, torch.tensor([2.0, 2.0, 2.0, 2.0]))) == 1 / 8
    assert float(strength(4, torch.tensor([1.0, 1.0, 0.0, 0.0]))) == 1 / 4  # a partial batch
    assert float(strength(4, torch.zeros(4))) == 0
    for told in (Strength("1/B", None, 4), Strength(0.25, None), Strength("1/N", 4)):
        assert float(told(4, torch.full((4,), 1e-3))) == 1 / 4
        assert float(told(4, torch.zeros(4))) == 0


def test_a_batch_without_weight_moves_nobody():
    nets, (x, y) = [tiny.mlp().double() for _ in range(3)], tiny.points()
    posterior = FoRDE(nets)
    posterior.backward(x, y, torch.zeros(len(y), dtype=torch.float64))
    assert all(float(parameter.grad.abs().max()) == 0 for parameter in posterior.parameters())


REPELLED = {
    "weight_rde": lambda nets: WeightRDE(nets, data_size=12, repulsion="1/B"),
    "function_rde": lambda nets: FunctionRDE(nets, data_size=12, repulsion="1/B"),
    "feature_rde": lambda nets: FeatureRDE(nets, layer="2", head="3"),
    "forde": lambda nets: FoRDE(nets, every=2),
}


@pytest.mark.parametrize("method", REPELLED)
def test_evaluation_is_not_taken_for_a_batch_of_training(method):
    posterior, (x, y) = REPELLED[method]([tiny.mlp().double() for _ in range(3)]), tiny.points()
    posterior.backward(x[:5], y[:5])
    posterior.steps += 1
    ds.member_distances(posterior, x, y)
    ds.temperature_scale(posterior, [(x, y)])
    validation_nll(posterior, [(x, y)])
    posterior.check_batch(Batch(x, y))
    assert (posterior.strength.last, posterior.strength.largest) == (5, 5)
    acting = posterior.interaction
    assert acting is not None  # as the step before left it
    posterior.eval().loss(x, y)
    assert (posterior.strength.last, posterior.strength.largest) == (12, 5)
    assert posterior.interaction == (None if method == "forde" else acting)


@pytest.mark.parametrize("method", [WeightRDE, FunctionRDE])
def test_a_loaded_posterior_in_eval_mode_repels_by_its_batch(method, tmp_path):
    nets, (x, y) = [tiny.mlp().double() for _ in range(3)], tiny.points()
    for net in nets:
        net.eval()  # no batch statistics: both modes compute the same
    training = method(copy.deepcopy(nets), data_size=500, repulsion="1/B")
    ds.save(training, tmp_path / "saved")
    loaded = ds.load(tmp_path / "saved", tiny.mlp().double())
    assert not loaded.training
    for posterior in (training.eval(), loaded):
        posterior.backward(x, y)
    for one, other in zip(training.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    told = method(copy.deepcopy(nets), data_size=500, repulsion=1 / len(y)).eval()
    told.backward(x, y)
    for one, other in zip(told.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("repulsion", [None, True, -1.0, math.inf, math.nan, "1/M"])
def test_what_is_no_strength_is_an_error(repulsion):
    with pytest.raises((TypeError, ValueError), match=r"expected repulsion (as a number|of at least 0|of 1/B, 1/N)"):
        Strength(repulsion, 10)


def test_other_bad_input_is_an_error():
    refuses(lambda: Strength("1/N", None), r"expected data_size with repulsion \"1/N\", got none")
    refuses(lambda: Strength("1/B", None, 0), "expected batch_size of at least 1, got 0")
    refuses(lambda: Strength("1/B", None, 2.5), r"expected batch_size as a whole number, got 2\.5", TypeError)


def test_weights_in_half_precision_are_summed_in_full():
    strength = Strength("1/B", None)
    strength.note_batch_size(4096, training=True)
    assert float(strength(4096, torch.full((4096,), 20.0).half())) == pytest.approx(1 / (20 * 4096), rel=1e-6)


def input_gradients(nets: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """(M, B, D) of the true-class logit, with a graph to the weights."""
    x = x.clone().requires_grad_()
    totals = [net(x).gather(1, y[:, None]).sum() for net in nets]
    return torch.stack([torch.autograd.grad(total, x, create_graph=True)[0] for total in totals])


def penalty(g: Tensor) -> Tensor:
    """() Σ_{i<j} mean_b cos²(g_ib, g_jb)."""
    total = torch.zeros((), dtype=g.dtype)
    for i in range(len(g)):
        for j in range(i):
            total = total + nn.functional.cosine_similarity(g[i], g[j], dim=1).square().mean()
    return total


@pytest.mark.parametrize(
    "strategy",
    [gradients.vectorised_gradients, gradients.looped_gradients, gradients.looped_keeping_graphs],
    ids=lambda s: s.__name__,
)
def test_gradients_are_those_of_loss_and_penalty(strategy):
    nets, (x, y) = networks(), tiny.points()
    found = strategy(LIT(nets, strength=0.7), Batch(x, y))
    total = 0.7 * penalty(input_gradients(nets, x, y)) + sum(nn.functional.cross_entropy(net(x), y) for net in nets)
    parameters = [parameter for net in nets for parameter in net.parameters()]
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    expected = torch.cat([g.flatten() for g in expected]).reshape(4, -1)
    got = torch.cat([g.reshape(4, -1) for g in found.gradients.values()], dim=1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_each_pair_counts_once_for_each_of_its_members():
    g = torch.randn(3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(squared_cosines(g).sum(), 2 * penalty(g), rtol=0, atol=1e-12)
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    repeated = squared_cosines(g[:, [0, 1, 1, 2, 3]])
    torch.testing.assert_close(squared_cosines(g, weight), repeated, rtol=0, atol=1e-12)


def test_training_makes_gradients_orthogonal():
    nets, (x, y) = networks(3), tiny.points(30)
    cosines = {}
    for strength in (0.0, 3.0):
        posterior = LIT(copy.deepcopy(nets), strength=strength)
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.04)
        ds.fit(posterior, [(x, y)] * 20, epochs=1, optimizer=optimizer, progress=False)
        g = input_gradients([posterior.member(i) for i in range(3)], x, y)
        cosines[strength] = float(penalty(g).detach())
    assert cosines[3.0] < 0.3 * cosines[0.0]


def test_without_strength_it_is_a_deep_ensemble_and_alone_it_is_map():
    nets, (x, y) = networks(3), tiny.points()
    posterior, ensemble = LIT(nets, strength=0.0), ds.DeepEnsemble(nets)
    posterior.backward(x, y)
    ensemble.backward(x, y)
    torch.testing.assert_close(flat_gradients(posterior), flat_gradients(ensemble), rtol=0, atol=1e-12)
    alone, single = LIT(nets[:1], strength=1.0), ds.MAP(copy.deepcopy(nets[0]))
    alone.backward(x, y)
    single.backward(x, y)
    expected = torch.cat([p.grad.flatten() for p in single.parameters()])
    assert torch.equal(flat_gradients(alone)[0], expected)


def test_rows_with_void_labels_are_as_if_they_were_not_there():
    nets, (x, y), (noise, _) = networks(), tiny.points(), tiny.points(seed=5)
    likelihood = ds.Classification(ignore_index=7)
    half, alone = (LIT(nets, strength=0.7, likelihood=likelihood) for _ in range(2))
    half.backward(torch.cat([x, noise]), torch.cat([y, torch.full_like(y, 7)]))
    alone.backward(x, y)
    torch.testing.assert_close(flat_gradients(half), flat_gradients(alone), rtol=0, atol=1e-10)


def test_bad_input_is_a_clear_error():
    nets = networks(2)
    refuses(lambda: LIT(nets, strength=-1), "expected strength of at least 0, got -1")
    refuses(lambda: LIT(nets, strength=1, gradient="loss"), "expected gradient of logit, log_prob")
    refuses(lambda: LIT([], strength=1), "expected at least one module, got none")
    with pytest.raises(TypeError, match=r"expected examples as a whole number, got 2\.5; pass an int"):
        LIT(nets, strength=1, examples=2.5)
    one = LIT([nn.Linear(1, 3), nn.Linear(1, 3)], strength=1)
    with pytest.raises(ValueError, match="expected inputs of at least two floating-point features, got only one"):
        one.backward(torch.randn(5, 1), torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("members", [2, 5, 16])
def test_the_pairs_of_a_member_add_up(members):
    """Of M − 1 others that all point one way each pushes in full: the exact factor that its page names."""
    generator = torch.Generator().manual_seed(0)
    mine, other = torch.randn(2, 1, 5, 3, dtype=torch.float64, generator=generator)

    def force(count: int) -> Tensor:
        g = torch.cat([mine, other.expand(count, -1, -1)])
        return LIT(networks(2), strength=0.3).couple({"gradients": g})["gradients"][0]

    torch.testing.assert_close(force(members - 1), (members - 1) * force(1), rtol=1e-12, atol=1e-15)
