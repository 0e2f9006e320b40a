"""FoRDE: the paper's loss written out with plain modules, its options, and what it is for."""

import copy
import math
from functools import partial

import pytest
import torch
from test_interacting_members import input_gradients
from test_rde import flat_gradients, networks, plain
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core import gradients as strategies
from dissensus.core.batch import Batch
from dissensus.methods import LIT, FoRDE
from dissensus.numerics.lengthscales import Lengthscales, pca_lengthscales
from forde_density import input_gradient_log_density
from refusals import refuses
from thinning import thinned

STRATEGIES = [strategies.vectorised_gradients, strategies.looped_gradients, strategies.looped_keeping_graphs]


def expected_gradients(
    nets: list[nn.Module], x: Tensor, y: Tensor, strength: float, repel_on=None, **keywords
) -> Tensor:
    """(M, P) of Σ_i [mean nll_i + strength · r_i], by plain autograd through plain modules."""
    g = input_gradients(nets, x if repel_on is None else x[:repel_on], y if repel_on is None else y[:repel_on])
    total = strength * input_gradient_log_density(g.flatten(2), **keywords).sum()
    total = total + sum(nn.functional.cross_entropy(net(x), y) for net in nets)
    parameters = [parameter for net in nets for parameter in net.parameters()]
    found = torch.autograd.grad(total, parameters)
    return torch.cat([each.flatten() for each in found]).reshape(len(nets), -1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.__name__)
def test_gradients_are_those_of_the_papers_loss(strategy):
    nets, (x, y) = networks(), tiny.points()
    found = strategy(FoRDE(nets), Batch(x, y))
    got = torch.cat([g.reshape(4, -1) for g in found.gradients.values()], dim=1)
    torch.testing.assert_close(got, expected_gradients(nets, x, y, 1 / 12), rtol=0, atol=1e-10)
    nll = torch.stack([nn.functional.cross_entropy(net(x), y) for net in nets]).detach()
    torch.testing.assert_close(found.losses, nll, rtol=0, atol=1e-12)


class Token:
    """Something that a graph holds; how many there are, and the most at any time."""

    now = most = 0

    def __init__(self):
        Token.now += 1
        Token.most = max(Token.most, Token.now)

    def __del__(self):
        Token.now -= 1


class Marked(torch.autograd.Function):
    """The identity, with a token in every graph that it is part of."""

    @staticmethod
    def forward(ctx, x):
        ctx.token = Token()
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope


def test_in_the_loop_one_members_graph_is_alive_at_a_time():
    """Also for coupled members: what they are compared in is found first, and no graph of it is kept."""

    def make():
        layers = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3)}
        return tiny.Network(lambda self, x: self.last(torch.tanh(Marked.apply(self.first(x)))), **layers)

    posterior, (x, y) = FoRDE(networks(5, make)), tiny.points()
    for strategy, expected in ((strategies.looped_gradients, 1), (strategies.looped_keeping_graphs, 5)):
        Token.most = 0
        strategy(posterior, Batch(x, y))
        assert (Token.now, Token.most) == (0, expected)


def test_options_reach_the_kernel():
    nets, (x, y) = networks(), tiny.points()
    scales = pca_lengthscales(x * torch.tensor([3.0, 1.0, 0.5, 0.1], dtype=torch.float64), 0.7)
    cases = [
        ({"bandwidth": "sample"}, 1 / 12, {"bandwidth": "sample"}),
        ({"bandwidth": "algorithm"}, 1 / 12, {"bandwidth": "algorithm"}),
        ({"lengthscales": scales}, 1 / 12, {"lengthscales": scales}),
        ({"repulsion": 0.3}, 0.3, {}),
        ({"repulsion": "1/N", "data_size": 60}, 1 / 60, {}),
        ({"batch_size": 48}, 1 / 48, {}),
        ({"examples": 5}, 1 / 12, {"repel_on": 5}),
        ({"examples": 50}, 1 / 12, {}),
    ]
    for keywords, strength, kernel in cases:
        posterior = FoRDE(nets, **keywords)
        posterior.backward(x, y)
        expected = expected_gradients(nets, x, y, strength, **kernel)
        torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-10, msg=str(keywords))


def test_log_probability_gradients_do_not_see_a_common_shift_of_logits():
    """A quadratic added to all logits leaves softmax and loss as they are; only the raw logit's gradient changes."""

    nets, (x, y) = networks(), tiny.points()
    moved = [tiny.Network(lambda self, x: self.net(x) + 3 * x.square().sum(1, keepdim=True), net=net) for net in nets]
    for gradient, same in (("log_prob", True), ("logit", False)):
        straight, shifted = FoRDE(nets, gradient=gradient), FoRDE(moved, gradient=gradient)
        straight.backward(x, y)
        shifted.backward(x, y)
        close = torch.allclose(flat_gradients(straight), flat_gradients(shifted), rtol=0, atol=1e-10)
        assert close == same, gradient


def test_partial_batches_are_scaled_by_the_nominal_batch_size():
    """After a full batch of 12, one of 5 is repelled with 1/12, not 1/5; before any, and in eval mode, with its own size."""
    nets, (x, y) = networks(), tiny.points()
    posterior = FoRDE(nets)
    posterior.backward(x, y)
    posterior.zero_grad()
    posterior.backward(x[:5], y[:5])
    expected = expected_gradients(nets, x[:5], y[:5], 1 / 12)
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-10)
    fresh = FoRDE(nets)
    fresh.backward(x[:5], y[:5])
    torch.testing.assert_close(flat_gradients(fresh), expected_gradients(nets, x[:5], y[:5], 1 / 5), rtol=0, atol=1e-10)
    with torch.no_grad():
        posterior.eval().check_batch(Batch(x.repeat(9, 1), y.repeat(9)))  # a validation batch is none of training
    assert posterior.strength.largest == 12


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_batches_gathered_to_a_step_are_scaled_by_the_rows_of_the_step(engine):
    """Four times the same eight rows give the mean loss of those eight, repelled with 1/32 and not with 1/8."""
    nets, (x, y) = networks(), tiny.points(8)
    gathered, single, named = FoRDE(nets), FoRDE(nets), FoRDE(nets, batch_size=32)
    for posterior, batches, accumulate in ((gathered, 4, 4), (single, 1, 1), (named, 1, 1)):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.0)
        how = {"optimizer": optimizer, "accumulate": accumulate, "engine": engine}
        ds.fit(posterior, [(x, y)] * batches, epochs=1, **how, progress=False)
    expected = expected_gradients(nets, x, y, 1 / 32)
    torch.testing.assert_close(flat_gradients(gathered), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(flat_gradients(named), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(flat_gradients(single), expected_gradients(nets, x, y, 1 / 8), rtol=0, atol=1e-10)
    # Trained further without gathering, a step is eight rows again.
    optimizer = torch.optim.SGD(gathered.parameters(), lr=0.0)
    ds.fit(gathered, [(x, y)], epochs=1, optimizer=optimizer, engine=engine, progress=False)
    torch.testing.assert_close(flat_gradients(gathered), flat_gradients(single), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("strategy", "weighting", "gradient"), thinned(STRATEGIES, [False, True], ["logit", "log_prob"], every=2)
)
def test_rows_with_void_labels_are_as_if_they_were_not_there(strategy, weighting, gradient):
    nets, (x, y), (noise, _) = networks(), tiny.points(), tiny.points(seed=5)
    void = torch.full_like(y, 7)
    likelihood = ds.Classification(ignore_index=7)
    weight = torch.rand(12, dtype=torch.float64) + 0.5 if weighting else None
    posterior = FoRDE(nets, batch_size=12, gradient=gradient, likelihood=likelihood)
    twice = None if weight is None else torch.stack([weight, weight], 1).flatten()
    both = Batch(torch.stack([x, noise], 1).flatten(0, 1), torch.stack([y, void], 1).flatten(), twice)
    half = strategy(posterior, both)
    alone = strategy(posterior, Batch(x, y, weight))
    assert tiny.largest_difference(half.gradients, alone.gradients) < 1e-10
    nothing = strategy(posterior, Batch(noise, void))  # a batch of them alone moves nobody
    assert max(float(g.abs().max()) for g in nothing.gradients.values()) == 0.0


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_every_k_steps_repels_at_each_kth_step_only(engine):
    nets, (x, y) = networks(), tiny.points()
    posterior = FoRDE(nets, every=3)
    assert not posterior.capturable
    assert FoRDE(nets).capturable
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.0)
    ensemble = ds.DeepEnsemble(nets)
    ensemble.backward(x, y)
    full = expected_gradients(nets, x, y, 1 / 12)
    seen = []
    for _ in range(7):
        ds.fit(posterior, [(x, y)], epochs=1, optimizer=optimizer, engine=engine, progress=False)
        found = flat_gradients(posterior)
        repelled = torch.allclose(found, full, rtol=0, atol=1e-10)
        assert repelled or torch.allclose(found, flat_gradients(ensemble), rtol=0, atol=1e-10)
        seen.append(repelled)
    assert seen == [True, False, False, True, False, False, True]


def test_the_clock_of_every_goes_on_after_loading(tmp_path):
    nets, (x, y) = networks(), tiny.points()
    posterior = FoRDE(nets, every=2)
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, plain()).train()
    loaded.before_step(Batch(x, y))
    assert loaded.interaction != "couple"


def test_regression_repels_by_the_gradient_of_the_mean():
    nets = networks(3, lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    x, y = torch.randn(10, 2, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    posterior = FoRDE(nets, likelihood=ds.Regression(noise=0.5))
    posterior.backward(x, y)
    leaf = x.clone().requires_grad_()
    g = torch.stack([torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)[0] for net in nets])
    total = input_gradient_log_density(g).sum() / 10 + sum(((net(x) - y) ** 2).mean() / (2 * 0.25) for net in nets)
    found = torch.autograd.grad(total, [p for net in nets for p in net.parameters()], allow_unused=True)
    found = [torch.zeros(1) if each is None else each for each in found]
    expected = torch.cat([each.flatten() for each in found]).reshape(3, -1)
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-10)


def test_mixed_precision_trains_and_evaluates_the_kernel_in_full():
    nets = [plain() for _ in range(4)]
    x, y = tiny.points(24)
    exact, mixed = FoRDE(nets), FoRDE(nets)
    exact.backward(x.float(), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed.backward(x.float(), y)
    a, b = flat_gradients(exact), flat_gradients(mixed)
    # units of bf16, more of them: directions of gradients are differences of products
    assert float((a - b).norm() / a.norm()) < 16 * 2**-8


def angle(posterior, x: Tensor, y: Tensor) -> float:
    """Mean angle between the input gradients of members 0 and 1, in radians."""
    g = input_gradients([posterior.member(0), posterior.member(1)], x, y).detach()
    return float(nn.functional.cosine_similarity(g[0], g[1], dim=1).clamp(-1, 1).arccos().mean())


def test_near_equal_members_separate():
    """Two members 1e-3 apart, trained on the same data: their input gradients turn away from each other."""
    first, (x, y) = plain().double(), tiny.points(30)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    angles = {}
    for posterior in (FoRDE([first, second]), ds.DeepEnsemble([first, second])):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1, momentum=0.9)
        history = ds.fit(posterior, [(x, y)] * 36, epochs=1, optimizer=optimizer, progress=False)
        assert math.isfinite(history[-1].loss)
        angles[posterior.name] = angle(posterior, x, y)
    assert angles["deep_ensemble"] < 0.02
    assert angles["forde"] > 0.3


@pytest.mark.parametrize("distance", [1e-6, 1e-9])
def test_the_bandwidth_floor_bounds_the_force_between_near_equal_members(distance):
    """Without the floor the force at 1e-9 is 1e9; with it, it is distance / floor and so below the loss's own."""
    first, (x, y) = plain().double(), tiny.points()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight[0, 0] += distance
    posterior = FoRDE([first, second])
    posterior.backward(x, y)
    assert float(flat_gradients(posterior).abs().max()) < (1e9 * distance if distance < 1e-8 else 1e3)


def test_heads_that_start_at_zero_are_no_error_and_soon_repel():
    """Input gradients are exactly zero at the first step: no force, no NaN; and the members train as usual."""
    nets, (x, y) = networks(3), tiny.points(30)
    for net in nets:
        nn.init.zeros_(net[2].weight)
    posterior, ensemble = FoRDE(nets), ds.DeepEnsemble(nets)
    posterior.backward(x, y)
    ensemble.backward(x, y)
    torch.testing.assert_close(flat_gradients(posterior), flat_gradients(ensemble), rtol=0, atol=1e-12)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    history = ds.fit(posterior, [(x, y)] * 6, epochs=2, optimizer=optimizer, progress=False)
    assert history[1].loss < history[0].loss
    g = input_gradients([posterior.member(i) for i in range(3)], x, y)
    assert float(g.detach().norm(dim=2).min()) > 0


def test_repulsion_makes_input_gradients_differ():
    """Trained members' kernel density r is lower than that of a deep ensemble, at about the same training loss."""
    nets, (x, y) = networks(4), tiny.points(40, seed=1)
    x = x + 1.5 * nn.functional.one_hot(y, 4)
    density, loss = {}, {}
    for posterior in (FoRDE(nets, repulsion=0.1), ds.DeepEnsemble(nets)):
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.04)
        history = ds.fit(posterior, [(x, y)] * 30, epochs=1, optimizer=optimizer, progress=False)
        g = input_gradients([posterior.member(i) for i in range(4)], x, y).detach()
        # at a bandwidth that is the same for both: mean cosine between members
        unit = nn.functional.normalize(g, dim=2)
        cosine = torch.einsum("ibd,jbd->ijb", unit, unit).mean(2)
        density[posterior.name] = float((cosine.sum() - 4) / 12)
        loss[posterior.name] = history[-1].loss
    assert density["forde"] < density["deep_ensemble"] - 0.1
    assert loss["forde"] < loss["deep_ensemble"] + 0.1


def test_attention_can_be_differentiated_twice():
    def make():
        layers = {"layer": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), "head": nn.Linear(4, 3)}
        return tiny.Network(lambda self, x: self.head(self.layer(x).mean(1)), **layers)

    x, y = torch.randn(6, 5, 4), torch.arange(6) % 3
    gradients = []
    for how in ("loop", "vectorised"):
        torch.manual_seed(0)
        posterior = FoRDE([make() for _ in range(3)], repulsion=1.0)
        posterior.particles.how = how
        posterior.backward(x, y)
        assert posterior.particles.how == how
        gradients.append(flat_gradients(posterior))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


class Once(torch.autograd.Function):
    """A tanh whose backward pass cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        (y,) = ctx.saved_tensors
        return slope * (1 - y.square())


def custom():
    layers = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3)}
    return tiny.Network(lambda self, x: self.last(Once.apply(self.first(x))), **layers)


def test_a_network_that_cannot_be_differentiated_twice_is_a_clear_error():
    x, y = tiny.points()
    posterior = FoRDE([custom(), custom()])
    stream, told = torch.get_rng_state(), "expected a network that can be differentiated twice, got one that cannot"
    refuses(lambda: posterior.backward(x.float(), y), told)
    assert torch.equal(torch.get_rng_state(), stream)
    refuses(lambda: ds.fit(posterior, [(x.float(), y)], epochs=1, progress=False), "differentiated twice")
    # Where nobody is repelled, once is enough.
    FoRDE([custom()]).backward(x.float(), y)


# Features without a graph, of a first layer and inputs.
CUTS = {
    "no_grad": torch.no_grad()(lambda first, x: first(x)),
    "detach": lambda first, x: first(x).detach(),
    "numpy": lambda first, x: torch.from_numpy(x.detach().numpy().copy()) @ first.weight.T,
}


def cut(how):
    layers = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3)}
    return tiny.Network(lambda self, x: self.last(torch.tanh(CUTS[how](self.first, x))), **layers)


@pytest.mark.parametrize("how", CUTS)
def test_a_network_that_cuts_its_graph_is_a_clear_error(how):
    """Its input gradients are zeros that no weight can move: FoRDE would silently be a deep ensemble."""
    (x, y), nets = tiny.points(), networks(2, lambda: cut(how))
    for posterior in (FoRDE(nets), LIT(nets, strength=1.0)):
        refuses(partial(posterior.backward, x, y), "expected input gradients that depend on the trained weights, got")
        with pytest.raises(ValueError, match="remove no_grad, detach and numpy from the network's forward"):
            ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    FoRDE(nets[:1]).backward(x, y)  # alone it repels nobody


def test_training_biases_alone_is_a_clear_error():
    """The bias of a linear head adds nothing to input gradients."""
    (x, y), nets = tiny.points(), networks(2)
    for net in nets:
        net[0].requires_grad_(False)
        net[2].weight.requires_grad_(False)
    refuses(lambda: FoRDE(nets).backward(x, y), "expected input gradients that depend on the trained weights")


def test_linear_networks_and_frozen_encoders_repel():
    """Their input gradients depend on the weights that train, though not on the input or not on all weights."""
    x, y = tiny.points()
    linear = networks(3, lambda: nn.Linear(4, 3))
    frozen = networks(3)
    for net in frozen:
        net[0].requires_grad_(False)
    for nets in (linear, frozen):
        posterior, ensemble = FoRDE(nets, repulsion=1.0), ds.DeepEnsemble(nets)
        posterior.backward(x, y)
        ensemble.backward(x, y)
        moved = tiny.largest_difference(tiny.gradients(posterior), tiny.gradients(ensemble))
        assert moved > 1e-3
        optimizer = torch.optim.SGD([p for p in posterior.parameters() if p.requires_grad], lr=0.1)
        history = ds.fit(posterior, [(x, y)] * 3, epochs=2, optimizer=optimizer, progress=False)
        assert math.isfinite(history[-1].loss)


def test_a_custom_function_that_can_be_is_run_in_the_loop():
    """Without `setup_context` it has no place in vmap; plain autograd knows it."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, slope):
            (x,) = ctx.saved_tensors
            return 2 * x * slope

    def squares():
        layers = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3)}
        return tiny.Network(lambda self, x: self.last(square(self.first(x))), **layers)

    square = Square.apply
    nets, (x, y) = networks(3, squares), tiny.points()
    posterior = FoRDE(nets)
    posterior.backward(x, y)
    assert posterior.particles.how == "loop"
    square = torch.square
    torch.testing.assert_close(flat_gradients(posterior), expected_gradients(nets, x, y, 1 / 12), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [None, 2])
def test_lengthscales_are_saved(tmp_path, rank):
    nets, (x, y) = networks(3), tiny.points(30)
    posterior = FoRDE(nets, lengthscales=pca_lengthscales(x, rank=rank), repulsion=0.5)
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, plain())
    for name in ("eigenvectors", "precision", "remainder"):
        assert torch.equal(getattr(loaded.lengthscales, name), getattr(posterior.lengthscales, name))
    assert loaded.config() == posterior.config()
    for each in (loaded.train(), posterior.train()):
        each.zero_grad()
        each.backward(x, y)
    assert torch.equal(flat_gradients(loaded), flat_gradients(posterior))


def test_bad_input_is_a_clear_error():
    nets, (x, y) = networks(2), tiny.points()
    refuses(lambda: FoRDE([]), "expected at least one module, got none")
    refuses(lambda: FoRDE([nets[0], copy.deepcopy(nets[0])]), "got members 0 and 1 equal")
    told = "expected Lengthscales, got Tensor; make pca_lengthscales"
    refuses(lambda: FoRDE(nets, lengthscales=torch.eye(4)), told, TypeError)
    refuses(lambda: FoRDE(nets, bandwidth="median"), "expected bandwidth of reference, sample, algorithm, got 'median'")
    refuses(lambda: FoRDE(nets, gradient="loss"), "expected gradient of logit, log_prob, got 'loss'")
    for repulsion in ("B", -1.0, math.nan):
        refuses(partial(FoRDE, nets, repulsion=repulsion), r"expected repulsion of (1/B, 1/N|at least 0)")
    refuses(lambda: FoRDE(nets, repulsion="1/N"), 'expected data_size with repulsion "1/N", got none')
    for keyword in ("every", "batch_size", "examples"):
        refuses(partial(FoRDE, nets, **{keyword: 0}), f"expected {keyword} of at least 1, got 0")
    for keyword in ("every", "examples"):
        with pytest.raises(TypeError, match=rf"expected {keyword} as a whole number, got 1\.5; pass an int"):
            FoRDE(nets, **{keyword: 1.5})
    other = FoRDE(nets, lengthscales=Lengthscales(torch.eye(3), torch.ones(3)))
    refuses(lambda: other.backward(x, y), "expected lengthscales of 4 dimensions for these inputs, got 3")


def test_inputs_without_directions_are_clear_errors():
    """One feature has a sign for a direction; integers have no gradient."""
    one = FoRDE([nn.Linear(1, 3), nn.Linear(1, 3)])
    y = torch.zeros(5, dtype=torch.int64)
    told = r"at least two floating-point features, got only one.*\[x/2, \(x/2\)²\]"
    refuses(lambda: one.backward(torch.randn(5, 1), y), told)
    words = FoRDE([nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3)) for _ in range(2)])
    told = "expected inputs of at least two floating-point features, got integers only"
    refuses(lambda: words.backward(torch.zeros(5, 2, dtype=torch.int64), y), told)
    images = FoRDE([nn.Sequential(nn.Flatten(), nn.Linear(12, 3)) for _ in range(2)])
    told = r"got integers only; pass x\.float\(\) / 255 of images"
    refuses(lambda: images.backward(torch.zeros(5, 3, 2, 2, dtype=torch.uint8), y), told)


@pytest.mark.parametrize("build", [FoRDE, lambda nets: LIT(nets, strength=1.0)])
def test_one_member_may_have_inputs_without_directions(build):
    """Nothing is compared: one feature, or word indices, give exactly the network that MAP trains."""
    y = torch.arange(6) % 3
    words = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3))
    for net, x in ((nn.Linear(1, 3), torch.randn(6, 1)), (words, torch.arange(12).reshape(6, 2) % 7)):
        alone, single = build([net]), ds.MAP(copy.deepcopy(net))
        for posterior in (alone, single):
            optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
            ds.fit(posterior, [(x, y)], epochs=5, optimizer=optimizer, progress=False)
        assert torch.equal(alone.predict(x).mean, single.predict(x).mean)
