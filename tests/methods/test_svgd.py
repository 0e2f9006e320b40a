"""SVGD: the paper's direction written out, accumulation, mixed precision, a known posterior."""

import copy

import pytest
import torch
from test_rde import (
    DISTANCES,
    Conjugate,
    flat_gradients,
    flat_loss_gradients,
    flat_weights,
    largest_weight_in_training,
    networks,
    plain,
    relative_error,
)
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core import gradients as strategies
from dissensus.core.batch import Batch
from dissensus.methods import SVGD
from dissensus.numerics import rbf_kernels as kernels
from dissensus.numerics import score_estimates
from dissensus.numerics.annealing import Annealing

STRATEGIES = {
    "vectorised": strategies.vectorised_gradients,
    "loop": strategies.looped_gradients,
    "loop, graphs kept": strategies.looped_keeping_graphs,
}


def kernel_of(z: Tensor) -> Tensor:
    squared = kernels.squared_distances(z)
    return kernels.rbf(squared, kernels.median_bandwidth(squared))


def test_the_update_on_weights_is_that_of_the_paper():
    """−φ/N with ∇ log π = −N ∇ mean loss."""
    nets, (x, y) = networks(), tiny.points()
    posterior = SVGD(nets, data_size=50)
    losses = posterior.backward(x, y)
    expected = -score_estimates.svgd(flat_weights(nets).detach(), -50 * flat_loss_gradients(nets, x, y)) / 50
    torch.testing.assert_close(flat_gradients(posterior), expected, rtol=0, atol=1e-10)
    nll = torch.stack([nn.functional.cross_entropy(net(x), y) for net in nets]).detach()
    torch.testing.assert_close(losses, nll, rtol=0, atol=1e-12)


def test_the_update_on_functions_is_that_of_the_paper():
    """φ at the outputs, pulled back to each member's weights."""
    nets, (x, y) = networks(), tiny.points()
    posterior = SVGD(nets, data_size=50, space="function")
    posterior.backward(x, y)
    outputs = torch.stack([net(x) for net in nets]).detach()
    slopes = torch.stack([torch.func.grad(lambda f: nn.functional.cross_entropy(f, y))(each) for each in outputs])
    force = -score_estimates.svgd(outputs.flatten(1), -50 * slopes.flatten(1)) / 50
    rows = []
    for net, v in zip(nets, force, strict=True):
        output = net(x)
        found = torch.autograd.grad(output, list(net.parameters()), v.reshape(output.shape))
        rows.append(torch.cat([g.flatten() for g in found]))
    torch.testing.assert_close(flat_gradients(posterior), torch.stack(rows), rtol=0, atol=1e-10)


# Graphs are kept for coupled members only; on weights there is nothing to wait for.
WAYS = [(a, b) for a in ("weight", "function") for b in STRATEGIES if (a, b) != ("weight", "loop, graphs kept")]


@pytest.mark.parametrize(("space", "strategy"), WAYS)
def test_every_way_of_running_members_gives_the_gradients_of_loss(space, strategy):
    nets, (x, y) = networks(3, lambda: tiny.mlp().double()), tiny.points()
    posterior = SVGD(nets, data_size=50, space=space)
    other = copy.deepcopy(posterior)
    found = STRATEGIES[strategy](posterior, Batch(x, y))
    gradients = posterior.mix(found.gradients) if posterior.interaction == "mix" else found.gradients
    other.loss(x, y).backward()
    for name, parameter in other.particles.own_parameters().items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_the_prior_is_part_of_the_target(space):
    """On weights it is mixed as the loss is; on functions it acts on a member's own weights by the kernel's row."""
    nets, (x, y) = networks(), tiny.points()
    posterior = SVGD(nets, data_size=50, space=space, weight_prior_std=0.5)
    posterior.backward(x, y)
    without = SVGD(nets, data_size=50, space=space)
    without.backward(x, y)
    w = flat_weights(nets).detach()
    prior = w / (50 * 0.25)
    kernel = kernel_of(w if space == "weight" else torch.stack([net(x).detach() for net in nets]).flatten(1))
    expected = kernel @ prior / 4 if space == "weight" else kernel.mean(1, keepdim=True) * prior
    torch.testing.assert_close(flat_gradients(posterior) - flat_gradients(without), expected, rtol=0, atol=1e-10)


def test_accumulated_batches_equal_one_batch_on_weights():
    """Mixing is affine in the gradients: the mean over four quarters of a batch is the whole batch's."""
    nets = networks(4)
    x, y = tiny.points(24)
    whole, quarters = SVGD(nets, data_size=24), SVGD(nets, data_size=24)
    for posterior, loader, accumulate in (
        (whole, [(x, y)], 1),
        (quarters, list(zip(x.split(6), y.split(6), strict=True)), 4),
    ):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5, momentum=0.9)
        ds.fit(posterior, loader, epochs=10, optimizer=optimizer, accumulate=accumulate, progress=False)
    assert int(whole.steps) == int(quarters.steps) == 10
    assert tiny.largest_difference(tiny.state(whole), tiny.state(quarters)) < 1e-10


def test_accumulated_batches_equal_one_batch_in_mixed_precision():
    """Each quarter's weight gradients are rounded to bf16's 8 bits before they are added, the whole batch's once.

    One step from the same weights: what it moves agrees to two units of bf16, and is not that of float32.
    """
    nets, (x, y) = [plain() for _ in range(4)], tiny.points(24)
    x, start, moved = x.float(), flat_weights(nets).detach(), {}
    quarters = list(zip(x.split(6), y.split(6), strict=True))
    for name, loader, precision in (
        ("whole", [(x, y)], "bf16"),
        ("quarters", quarters, "bf16"),
        ("exact", [(x, y)], "float32"),
    ):
        posterior = SVGD(nets, data_size=24)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)
        ds.fit(
            posterior,
            loader,
            epochs=1,
            optimizer=optimizer,
            accumulate=len(loader),
            precision=precision,
            progress=False,
        )
        assert int(posterior.steps) == 1
        own = posterior.particles.own_parameters().values()
        moved[name] = torch.cat([tensor.detach().reshape(4, -1) for tensor in own], dim=1) - start
    error = float((moved["whole"] - moved["quarters"]).norm() / moved["whole"].norm())
    assert error < 2 * 2**-8
    assert 1e-6 < float((moved["whole"] - moved["exact"]).norm() / moved["exact"].norm()) < 4 * 2**-8


@pytest.mark.parametrize("space", ["weight", "function"])
def test_mixed_precision_changes_no_more_than_its_rounding(space):
    """bf16 has 8 bits: gradients agree to a few of its units; the kernel is not evaluated in it."""
    nets, (x, y) = [plain() for _ in range(4)], tiny.points(24)
    exact, mixed = (SVGD(nets, data_size=24, space=space) for _ in range(2))
    exact.backward(x.float(), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed.backward(x.float(), y)
    a, b = flat_gradients(exact), flat_gradients(mixed)
    assert b.dtype == torch.float32
    assert float((a - b).norm() / a.norm()) < 4 * 2**-8
    if space == "weight":  # what does not pass the network is the same to the last bit but rounding of sums
        zeros = {name: torch.zeros_like(p) for name, p in exact.particles.own_parameters().items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = exact.mix(zeros)
        for name, tensor in exact.mix(zeros).items():
            assert torch.equal(tensor, inside[name])


@pytest.mark.parametrize("space", ["weight", pytest.param("function", marks=pytest.mark.slow)])
def test_a_conjugate_posterior_is_sampled(space):
    model = Conjugate()
    posterior = SVGD(
        model.networks(100),
        data_size=20,
        space=space,
        likelihood=ds.Regression(noise=model.noise),
        weight_prior_std=model.prior if space == "weight" else None,
    )
    w = model.settle(posterior, steps=400, lr=0.6 if space == "weight" else 1.0)
    mean = model.mean if space == "weight" else model.flat_mean
    covariance = model.covariance if space == "weight" else model.flat_covariance
    torch.testing.assert_close(w.mean(0), mean[:, 0], rtol=0, atol=0.02)
    assert relative_error(torch.cov(w.T, correction=0), covariance) < 0.15


@pytest.mark.parametrize("space", ["weight", "function"])
def test_one_member_is_exactly_a_map_network(space):
    net, (x, y) = tiny.mlp().double(), tiny.points()
    alone, single = SVGD([net], data_size=12, space=space), ds.MAP(copy.deepcopy(net))
    for posterior in (alone, single):
        ds.fit(posterior, [(x, y)], epochs=5, optimizer=torch.optim.SGD(posterior.parameters(), lr=0.1), progress=False)
    assert torch.equal(alone.predict(x).mean, single.predict(x).mean)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_the_order_of_members_does_not_matter(space):
    nets, (x, y), order = networks(4), tiny.points(), [2, 0, 3, 1]
    straight, shuffled = (SVGD(n, data_size=50, space=space) for n in (nets, [nets[i] for i in order]))
    straight.backward(x, y)
    shuffled.backward(x, y)
    torch.testing.assert_close(flat_gradients(shuffled), flat_gradients(straight)[order], rtol=0, atol=1e-10)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_float32_agrees_with_float64(space):
    nets, (x, y) = networks(4), tiny.points()
    double = SVGD(nets, data_size=50, space=space)
    single = copy.deepcopy(double).float()
    double.backward(x, y)
    single.backward(x.float(), y)
    expected = flat_gradients(double)
    scale = float(expected.abs().max())
    torch.testing.assert_close(flat_gradients(single).double(), expected, rtol=1e-4, atol=1e-4 * scale)


def nearly_equal(distance: float) -> list[nn.Module]:
    first = plain().double()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(distance * torch.randn_like(parameter))
    return [first, second]


@pytest.mark.parametrize("space", ["weight", "function"])
def test_near_equal_members_separate(space):
    """Two members 1e-3 apart, trained on the same data, end further apart than without repulsion."""
    nets, (x, y) = nearly_equal(1e-3), tiny.points()
    distances = []
    for posterior in (SVGD(nets, data_size=12, space=space), ds.DeepEnsemble(nets)):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        ds.fit(posterior, [(x, y)] * 50, epochs=1, optimizer=optimizer, progress=False)
        members = posterior.predict(x).members
        distances.append(float((members[0] - members[1]).norm()))
    assert distances[0] > 10 * distances[1]


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("distance", [1e-6, 1e-9])
def test_the_bandwidth_floor_bounds_the_force_between_near_equal_members(space, distance):
    """Without it the force is 1/distance: a million at 1e-6. The same limit as for the repulsive ensembles."""
    nets, (x, y) = nearly_equal(distance), tiny.points()
    posterior = SVGD(nets, data_size=50, space=space)
    posterior.backward(x, y)
    assert float(flat_gradients(posterior).abs().max()) < 100


@pytest.mark.parametrize("space", ["weight", "function"])
def test_annealing_scales_the_driving_force_alone(space):
    nets, (x, y) = networks(), tiny.points()

    def gradients(annealing: Annealing | None, steps: int = 0) -> Tensor:
        posterior = SVGD(nets, data_size=50, space=space, annealing=annealing)
        posterior.steps += steps
        posterior.backward(x, y)
        return flat_gradients(posterior)

    full, off = gradients(None), gradients(Annealing("linear", steps=100))
    quarter = gradients(Annealing("linear", steps=100), steps=25)
    torch.testing.assert_close(quarter, 0.25 * full + 0.75 * off, rtol=0, atol=1e-7)
    if space == "weight":
        w = flat_weights(nets).detach()
        torch.testing.assert_close(off, -score_estimates.svgd(w, torch.zeros_like(w)) / 50, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("space", "limit"), [("weight", 6), pytest.param("function", 10, marks=pytest.mark.slow)])
def test_training_from_near_equal_members_stays_bounded(space, limit):
    """Weights grow to 1.4 and 3.2 with the floor; 21 and 97 with a thousandth of it."""
    largest = [largest_weight_in_training(lambda nets: SVGD(nets, data_size=50, space=space), d) for d in DISTANCES]
    assert max(largest) < limit, largest


def test_annealing_on_functions_scales_the_weight_prior():
    """With a constant weight a the prior's gradient is a times as large; the loss that is reported is not scaled."""
    nets, (x, y) = networks(), tiny.points()
    found, losses = {}, {}
    for std in (None, 0.5):
        for a in (1.0, 0.3):
            posterior = SVGD(nets, data_size=50, space="function", weight_prior_std=std, annealing=Annealing(weight=a))
            losses[std, a] = posterior.backward(x, y)
            found[std, a] = flat_gradients(posterior)
    row = kernel_of(torch.stack([net(x).detach() for net in nets]).flatten(1)).mean(1, keepdim=True)
    prior = row * flat_weights(nets).detach() / (50 * 0.25)
    for a in (1.0, 0.3):
        torch.testing.assert_close(found[0.5, a] - found[None, a], a * prior, rtol=0, atol=1e-12)
        penalty = flat_weights(nets).detach().square().sum(1) / (2 * 50 * 0.25)
        torch.testing.assert_close(losses[0.5, a] - losses[None, a], penalty, rtol=0, atol=1e-12)


def test_bad_input_is_a_clear_error():
    nets = networks(2)
    with pytest.raises(TypeError, match=r"expected an Annealing, got 'linear'; pass Annealing\(\"linear\"\)"):
        SVGD(nets, data_size=10, annealing="linear")
    with pytest.raises(ValueError, match="expected at least one module, got none"):
        SVGD([], data_size=10)
    with pytest.raises(ValueError, match="expected space of weight, function, got 'feature'"):
        SVGD(nets, data_size=10, space="feature")
    with pytest.raises(ValueError, match="expected data_size, got none"):
        SVGD(nets, data_size=None)
    with pytest.raises(ValueError, match="got members 0 and 1 equal"):
        SVGD([nets[0], copy.deepcopy(nets[0])], data_size=10)
