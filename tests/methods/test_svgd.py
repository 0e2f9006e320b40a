"""SVGD: the paper's direction written out, accumulation, mixed precision, a known posterior."""

import copy

import pytest
import test_rde
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.methods import SVGD
from dissensus.numerics import rbf_kernels as kernels
from dissensus.numerics.annealing import Annealing
from refusals import refuses


def kernel_of(z: Tensor) -> Tensor:
    squared = kernels.squared_distances(z)
    return kernels.rbf(squared, kernels.median_bandwidth(squared))


def test_the_update_on_weights_is_that_of_the_paper():
    """−φ/N with ∇ log π = −N ∇ mean loss."""
    nets, (x, y) = test_rde.networks(), tiny.points()
    posterior = SVGD(nets, data_size=50)
    losses = posterior.backward(x, y)
    slopes = test_rde.flat_loss_gradients(nets, x, y)
    expected = -tiny.svgd_direction(test_rde.flat_weights(nets).detach(), -50 * slopes) / 50
    torch.testing.assert_close(test_rde.flat_gradients(posterior), expected, rtol=0, atol=1e-10)
    nll = torch.stack([nn.functional.cross_entropy(net(x), y) for net in nets]).detach()
    torch.testing.assert_close(losses, nll, rtol=0, atol=1e-12)


def test_the_update_on_functions_is_that_of_the_paper():
    """φ at the outputs, pulled back to each member's weights."""
    nets, (x, y) = test_rde.networks(), tiny.points()
    posterior = SVGD(nets, data_size=50, space="function")
    posterior.backward(x, y)
    outputs = torch.stack([net(x) for net in nets]).detach()
    slopes = torch.stack([torch.func.grad(lambda f: nn.functional.cross_entropy(f, y))(each) for each in outputs])
    force = -tiny.svgd_direction(outputs.flatten(1), -50 * slopes.flatten(1)) / 50
    expected = test_rde.pulled_back(nets, [net(x) for net in nets], force)
    torch.testing.assert_close(test_rde.flat_gradients(posterior), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_the_prior_is_part_of_the_target(space):
    """On weights it is mixed as the loss is; on functions it acts on a member's own weights by the kernel's row."""
    nets, (x, y) = test_rde.networks(), tiny.points()
    posterior = SVGD(nets, data_size=50, space=space, weight_prior_std=0.5)
    posterior.backward(x, y)
    without = SVGD(nets, data_size=50, space=space)
    without.backward(x, y)
    w = test_rde.flat_weights(nets).detach()
    prior = w / (50 * 0.25)
    kernel = kernel_of(w if space == "weight" else torch.stack([net(x).detach() for net in nets]).flatten(1))
    expected = kernel @ prior / 4 if space == "weight" else kernel.mean(1, keepdim=True) * prior
    moved = test_rde.flat_gradients(posterior) - test_rde.flat_gradients(without)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-10)


def test_accumulated_batches_equal_one_batch_in_mixed_precision():
    """Each quarter's weight gradients are rounded to bf16's 8 bits before they are added, the whole batch's once.

    One step from the same weights: what it moves agrees to two units of bf16, and is not that of float32.
    """
    nets, (x, y) = [test_rde.plain() for _ in range(4)], tiny.points(24)
    x, start, moved = x.float(), test_rde.flat_weights(nets).detach(), {}
    quarters, whole = list(zip(x.split(6), y.split(6), strict=True)), [(x, y)]
    for name, loader, precision in (
        ("whole", whole, "bf16"),
        ("quarters", quarters, "bf16"),
        ("exact", whole, "float32"),
    ):
        posterior = SVGD(nets, data_size=24)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)
        how = {"optimizer": optimizer, "accumulate": len(loader), "precision": precision}
        ds.fit(posterior, loader, epochs=1, **how, progress=False)
        assert int(posterior.steps) == 1
        own = posterior.particles.own_parameters().values()
        moved[name] = torch.cat([tensor.detach().reshape(4, -1) for tensor in own], dim=1) - start
    error = float((moved["whole"] - moved["quarters"]).norm() / moved["whole"].norm())
    assert error < 2 * 2**-8
    assert 1e-6 < float((moved["whole"] - moved["exact"]).norm() / moved["exact"].norm()) < 4 * 2**-8


@pytest.mark.parametrize("space", ["weight", "function"])
def test_mixed_precision_changes_no_more_than_its_rounding(space):
    """bf16 has 8 bits: gradients agree to a few of its units; the kernel is not evaluated in it."""
    nets, (x, y) = [test_rde.plain() for _ in range(4)], tiny.points(24)
    exact, mixed = (SVGD(nets, data_size=24, space=space) for _ in range(2))
    exact.backward(x.float(), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed.backward(x.float(), y)
    a, b = test_rde.flat_gradients(exact), test_rde.flat_gradients(mixed)
    assert b.dtype == torch.float32
    assert float((a - b).norm() / a.norm()) < 4 * 2**-8
    if space == "weight":  # what does not pass the network is the same to the last bit but rounding of sums
        zeros = {name: torch.zeros_like(p) for name, p in exact.particles.own_parameters().items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = exact.mix(zeros)
        for name, tensor in exact.mix(zeros).items():
            assert torch.equal(tensor, inside[name])


@pytest.mark.slow
@pytest.mark.parametrize("space", ["weight", pytest.param("function", marks=pytest.mark.slow)])
def test_a_conjugate_posterior_is_sampled(space):
    model = test_rde.Conjugate()
    posterior = SVGD(
        model.networks(100), data_size=20, space=space, likelihood=ds.Regression(noise=model.noise),
        weight_prior_std=model.prior if space == "weight" else None,
    )  # fmt: skip
    w = model.settle(posterior, steps=120, lr=0.4 if space == "weight" else 0.7)
    mean = model.mean if space == "weight" else model.flat_mean
    covariance = model.covariance if space == "weight" else model.flat_covariance
    torch.testing.assert_close(w.mean(0), mean[:, 0], rtol=0, atol=0.02)
    assert test_rde.relative_error(torch.cov(w.T, correction=0), covariance) < 0.15


@pytest.mark.parametrize("space", ["weight", "function"])
def test_annealing_scales_the_driving_force_alone(space):
    nets, (x, y) = test_rde.networks(), tiny.points()

    def gradients(annealing: Annealing | None, steps: int = 0) -> Tensor:
        posterior = SVGD(nets, data_size=50, space=space, annealing=annealing)
        posterior.steps += steps
        posterior.backward(x, y)
        return test_rde.flat_gradients(posterior)

    full, off = gradients(None), gradients(Annealing("linear", steps=100))
    quarter = gradients(Annealing("linear", steps=100), steps=25)
    torch.testing.assert_close(quarter, 0.25 * full + 0.75 * off, rtol=0, atol=1e-7)
    if space == "weight":
        w = test_rde.flat_weights(nets).detach()
        torch.testing.assert_close(off, -tiny.svgd_direction(w, torch.zeros_like(w)) / 50, rtol=0, atol=1e-10)


def test_annealing_on_functions_scales_the_weight_prior():
    """With a constant weight a the prior's gradient is a times as large; the loss that is reported is not scaled."""
    nets, (x, y) = test_rde.networks(), tiny.points()
    found, losses = {}, {}
    for std in (None, 0.5):
        for a in (1.0, 0.3):
            posterior = SVGD(nets, data_size=50, space="function", weight_prior_std=std, annealing=Annealing(weight=a))
            losses[std, a] = posterior.backward(x, y)
            found[std, a] = test_rde.flat_gradients(posterior)
    row = kernel_of(torch.stack([net(x).detach() for net in nets]).flatten(1)).mean(1, keepdim=True)
    prior = row * test_rde.flat_weights(nets).detach() / (50 * 0.25)
    for a in (1.0, 0.3):
        torch.testing.assert_close(found[0.5, a] - found[None, a], a * prior, rtol=0, atol=1e-12)
        penalty = test_rde.flat_weights(nets).detach().square().sum(1) / (2 * 50 * 0.25)
        torch.testing.assert_close(losses[0.5, a] - losses[None, a], penalty, rtol=0, atol=1e-12)


def test_bad_input_is_a_clear_error():
    nets = test_rde.networks(2)
    with pytest.raises(TypeError, match=r"expected an Annealing, got 'linear'; pass Annealing\(\"linear\"\)"):
        SVGD(nets, data_size=10, annealing="linear")
    refuses(lambda: SVGD([], data_size=10), "expected at least one module, got none")
    refuses(lambda: SVGD(nets, data_size=10, space="feature"), "expected space of weight, function, got 'feature'")
    refuses(lambda: SVGD(nets, data_size=None), "expected data_size, got none")
    refuses(lambda: SVGD([nets[0], copy.deepcopy(nets[0])], data_size=10), "got members 0 and 1 equal")
