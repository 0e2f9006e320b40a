"""What holds of every method whose members act on each other, whatever the force between them."""

import copy

import pytest
import torch
from test_rde import builders, networks, plain
from torch import nn

import dissensus as ds
import tiny
from dissensus.core import gradients as strategies
from dissensus.core.batch import Batch
from dissensus.methods import LIT, SVGD, FeatureRDE, FoRDE
from dissensus.numerics.lengthscales import pca_lengthscales
from dissensus.numerics.rbf_kernels import BANDWIDTHS
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
ALL = [name for name in METHODS if name != OWN_DRAWS]
# Graphs are kept for coupled members only; in weight space there is nothing to wait for.
WAYS = [(m, s) for m in REPULSIVE for s in STRATEGIES if not ("weight" in m and s == "loop, graphs kept")]


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
        torch.testing.assert_close(
            found[name].grad.double(), parameter.grad, rtol=1e-4, atol=1e-4 * scale + 1e-7, msg=name
        )


@pytest.mark.parametrize("method", ALL)
def test_one_member_is_exactly_a_map_network(method):
    net, (x, y) = tiny.mlp().double(), tiny.points()
    alone, single = METHODS[method]([net]), ds.MAP(copy.deepcopy(net))
    for posterior in (alone, single):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        ds.fit(posterior, [(x, y)], epochs=5, optimizer=optimizer, progress=False)
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
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.05)
        ds.fit(posterior, [(x, y)] * 20, epochs=1, optimizer=optimizer, progress=False)
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
    largest = [largest_weight_in_training(build, distance) for distance in (1e-7, 1e-5, 1e-4, 1e-3)]
    assert max(largest) < limit, largest
