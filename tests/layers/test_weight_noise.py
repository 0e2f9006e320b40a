"""Noise for each example has the law of drawn weights: outputs are linear in the weights, so J diag(σ²) Jᵀ is known."""

import pytest
import torch
from torch import nn

from dissensus.layers.conversion import convert_layer
from dissensus.layers.factored import Kernel
from dissensus.layers.nodes import set_temporarily
from dissensus.methods.mean_field_vi import PerturbedLayer, WeightSpread, perturbed_copy

DRAWS = 4_000
LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (5,)),
    "linear over positions": (lambda: nn.Linear(4, 2), (3, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2), (2, 4)),
    "conv2d, grouped and strided": (lambda: nn.Conv2d(4, 2, 2, groups=2, stride=2, padding=1), (4, 3, 2)),
    "circular conv2d": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular", bias=False), (1, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 2, 2, stride=2), (2, 3)),
}


def moments(layer, x, std):
    """(mean, covariance) of a layer's outputs (n,), flat, for one example, under independent normal weights."""
    weights = dict(layer.named_parameters())

    def outputs(tensors):
        return torch.func.functional_call(layer, tensors, (x[None],)).flatten()

    slopes = torch.func.jacrev(outputs)(weights)
    covariance = sum(
        (slope.flatten(1) * std[name].flatten() ** 2) @ slope.flatten(1).T for name, slope in slopes.items()
    )
    return outputs(weights).detach(), covariance.detach()


def drawn(make, shape, *, only=None):
    """(outputs (draws, 2, n) of two examples with noise, the layer, inputs, deviations by name)."""
    layer = make().double()
    x = torch.randn(2, *shape, dtype=torch.float64)
    std = {name: 0.2 + torch.rand_like(p).detach() for name, p in layer.named_parameters()}
    if only is not None:
        std = {name: each * (name == only) for name, each in std.items()}
    noisy = convert_layer(make().double(), PerturbedLayer)
    noisy.known_as = ""
    noisy.load_state_dict(layer.state_dict())
    given = {name: each for name, each in std.items() if only is None or name == only}

    def one(noise):
        spread = WeightSpread(
            Kernel(noisy.weight, noisy.bias),
            (given.get("weight"), given.get("bias")),
            (noise.get("weight"), noise.get("bias")),
        )
        with set_temporarily([noisy], "nodes", [spread]):
            return noisy(x).flatten(1)

    noise = {name: each * torch.randn(DRAWS, *each.shape, dtype=each.dtype) for name, each in given.items()}
    with torch.no_grad():
        return torch.func.vmap(one, randomness="different")(noise), layer, x, std


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_each_example_has_outputs_of_the_mean_and_covariance_of_drawn_weights(make, shape):
    outputs, layer, x, std = drawn(make, shape)
    for example in range(2):
        mean, covariance = moments(layer, x[example], std)
        centred = outputs[:, example] - mean
        error = (covariance.diagonal() / DRAWS).sqrt()
        assert bool((centred.mean(0).abs() <= 5 * error).all())
        found = centred.T @ centred / DRAWS
        # A Wishart's: the variance of a covariance of n draws is (C_ii C_jj + C_ij²) / n.
        error = ((covariance.diagonal()[:, None] * covariance.diagonal() + covariance**2) / DRAWS).sqrt()
        assert bool(((found - covariance).abs() <= 5 * error).all())
        assert float(covariance.diagonal().min()) > 0


@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_two_examples_have_noise_of_their_own(name):
    outputs, layer, x, std = drawn(*LAYERS[name])
    a, b = (outputs[:, i] - moments(layer, x[i], std)[0] for i in range(2))
    products = a[:, :, None] * b[:, None]  # uncorrelated; under flipout not independent
    assert bool((products.mean(0).abs() <= 5 * products.std(0) / DRAWS**0.5).all())


@pytest.mark.parametrize("only", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_a_weight_or_a_bias_may_be_without_noise(name, only):
    outputs, layer, x, std = drawn(*LAYERS[name], only=only)
    _, covariance = moments(layer, x[0], std)
    found = outputs[:, 0].var(0)
    assert bool(((found - covariance.diagonal()).abs() <= 5 * found * (2 / DRAWS) ** 0.5).all())


def test_inputs_that_are_all_zero_have_finite_gradients():
    layer = convert_layer(nn.Linear(3, 2, bias=False), PerturbedLayer)
    layer.known_as = ""
    std = torch.full((2, 3), 0.1, requires_grad=True)
    x = torch.zeros(4, 3, requires_grad=True)
    spread = WeightSpread(Kernel(layer.weight, None), (std, None), (std * torch.randn(2, 3), None))
    with set_temporarily([layer], "nodes", [spread]):
        layer(x).square().sum().backward()
    assert bool(x.grad.isfinite().all())
    assert torch.equal(std.grad, torch.zeros(2, 3))


def test_the_account_says_where_examples_have_noise_of_their_own():
    network = nn.ModuleDict(
        {"conv": nn.Conv2d(1, 2, 3), "head": nn.Linear(2, 2), "words": nn.Embedding(4, 2), "rnn": nn.GRU(2, 2)}
    )
    _, account = perturbed_copy(network)
    assert account.converted == {
        "conv": "noise for each example (flipout)",
        "head": "noise for each example (local reparametrisation, over positions flipout)",
    }
    assert account.left["words"] == "one weight draw per batch: an embedding: a lookup, no product"
    assert account.left["rnn"].startswith("one weight draw per batch: recurrent")
