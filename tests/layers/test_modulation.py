"""Modulations: moments against samples and closed forms, and gradients through modulated layers."""

import json
import math

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.engine.strategies import functional_gradients
from dissensus.layers.conversion import convert_layer
from dissensus.layers.factored import Kernel
from dissensus.layers.nodes import set_temporarily
from dissensus.methods.mean_field_vi import PerturbedLayer, WeightSpread, perturbed_copy
from refusals import refuses

LAWS = [
    ds.Modulation.constant(1.3), ds.Modulation.sign(), ds.Modulation.sign(0.8), ds.Modulation.normal(0.6, 0.8),
    ds.Modulation.normal(0.7, 0.0), ds.Modulation.bernoulli(0.8), ds.Modulation.bernoulli(0.8, scale=1.25),
    ds.Modulation.between(0.3),
]  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_moments_are_those_of_samples(law):
    n = 200_000
    drawn = law.sample((n,), torch.Generator().manual_seed(1), dtype=torch.float64)
    for expected, values in (
        (law.mean, drawn),
        (law.second_moment, drawn**2),
        (law.halves[0], drawn.clamp(min=0)),
        (law.halves[1], (-drawn).clamp(min=0)),
    ):
        assert float(values.mean()) == pytest.approx(expected, abs=4 * float(values.std()) / n**0.5 + 1e-12)


def test_moments_are_the_closed_forms():
    assert ds.Modulation.sign(0.8).collectivity == pytest.approx((2 * 0.8 - 1) ** 2)
    assert ds.Modulation.normal(1, 0.5).collectivity == pytest.approx(0.8)
    assert ds.Modulation.bernoulli(0.7).collectivity == pytest.approx(0.7)
    assert ds.Modulation.bernoulli(0.7, scale=1 / 0.7).collectivity == pytest.approx(0.7)  # whatever the scale
    assert ds.Modulation.between(0.3).collectivity == pytest.approx(0.09)
    assert ds.Modulation.between(0.3).second_moment == pytest.approx(1)
    assert ds.Modulation.normal(0, 1).halves == pytest.approx((1 / math.sqrt(2 * math.pi),) * 2)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_law_survives_json(law):
    assert ds.Modulation.from_config(json.loads(json.dumps(law.config()))) == law


def test_the_same_generator_gives_the_same_factors_and_leaves_the_global_one_alone():
    before = torch.random.get_rng_state()
    for law in LAWS:
        one, two = (law.sample((3, 4), torch.Generator().manual_seed(5)) for _ in range(2))
        assert torch.equal(one, two)
        assert one.shape == (3, 4)
        assert one.dtype == torch.float32
    assert torch.equal(torch.random.get_rng_state(), before)


def test_wrong_laws_are_refused():
    with pytest.raises(ValueError, match=r"expected p of at least 0 and of at most 1, got 1\.5; it is a probability"):
        ds.Modulation.sign(1.5)
    refuses(lambda: ds.Modulation.normal(0, -1), "expected std of at least 0, got -1")
    refuses(lambda: ds.Modulation.bernoulli(-0.1), r"expected keep of at least 0 and of at most 1, got -0\.1")
    refuses(lambda: ds.Modulation.constant(math.nan), "expected value as a finite number, got nan")
    with pytest.raises(ValueError, match="expected p of at least -1 and of at most 1, got 2; p² is the collectivity"):
        ds.Modulation.between(2)
    with pytest.raises(ValueError, match="expected law of constant, sign, normal, bernoulli, got 'cauchy'"):
        ds.Modulation.from_config({"law": "cauchy"})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'std'"):
        ds.Modulation.from_config({"law": "normal", "mean": 1.0})
    refuses(lambda: ds.Modulation.normal(0, 1).atoms(), "expected a discrete modulation", TypeError)


@pytest.mark.parametrize("make", [lambda: ds.Modulation.constant(0), lambda: ds.Modulation.bernoulli(0.0),
                                  lambda: ds.Modulation.bernoulli(0.5, 0.0), lambda: ds.Modulation.normal(0, 0)])  # fmt: skip
def test_factors_that_let_nothing_pass_are_refused(make):
    refuses(lambda: make(), "expected factors that are not all 0, got")


WIDE = ds.Modulation.normal(0.3, 1.0)


def batch():
    return Batch(torch.randn(7, 6, dtype=torch.float64), torch.randint(3, (7,)))


def mlp():
    return ds.nets.MLP(6, 3, hidden=(5, 4, 8))


def twice():
    """One ReLU and one layer in two places, no biases."""
    relu, square = nn.ReLU(inplace=True), nn.Linear(5, 5, bias=False)
    return nn.Sequential(nn.Linear(6, 5), relu, square, relu, square, nn.Tanh(), nn.Linear(5, 4), relu, nn.Linear(4, 3))


def frozen():
    network = mlp()
    for layer in (network.layers[0], network.layers[4]):
        layer.requires_grad_(False)
    return network


def posterior(network, kind=ds.BatchEnsemble, **keywords):
    torch.manual_seed(0)
    settings = keywords if kind is ds.DropoutEnsemble else {"modulation": WIDE, **keywords}
    return kind(network().double(), members=3, **settings).train()


def assert_same(found, expected, atol=1e-12):
    assert found.gradients.keys() == expected.gradients.keys()
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=atol)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=atol)


@pytest.mark.parametrize(("network", "keywords"), [
    (mlp, {}),
    (mlp, {"form": "talk"}),
    (mlp, {"regime": "collective"}),
    (mlp, {"kind": ds.DropoutEnsemble, "rate": 0.5}),
    (mlp, {"layers": ["layers.0", "layers.2", "layers.6"]}),
    (twice, {}),
    (frozen, {}),
])  # fmt: skip
def test_gradients_are_those_of_one_member_after_the_other(network, keywords):
    made, given = posterior(network, **keywords), batch()
    found = gradients.vectorised_gradients(made, given)
    assert_same(found, gradients.looped_gradients(made, given))
    with made.particles.vmap_context():
        assert_same(found, functional_gradients(made, gradients.detached_state(made), given))


def test_second_derivatives_are_those_of_one_layer_after_the_other():
    made, given = posterior(mlp), batch()
    parameters, found = list(made.parameters()), {}
    x = given.x.requires_grad_()
    for how in ("vectorised", "loop"):
        made.particles.how = how
        slopes = torch.autograd.grad(made.loss(x, given.y), [x, *parameters], create_graph=True)
        found[how] = torch.autograd.grad(sum(each.square().sum() for each in slopes), [x, *parameters])
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_many_gradients_at_once():
    made, given = posterior(mlp), batch()
    x = given.x.requires_grad_()
    outputs = made(x)  # (3, 7, 3)
    many = torch.randn(2, *outputs.shape, dtype=outputs.dtype)
    (found,) = torch.autograd.grad(outputs, x, many, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(outputs, x, each, retain_graph=True)[0] for each in many]
    torch.testing.assert_close(found, torch.stack(alone), rtol=0, atol=1e-12)


def test_hooks_of_layers_inside_are_called():
    network, seen = mlp().double(), []
    network.layers[3].register_forward_hook(lambda layer, given, output: seen.append(output.shape))
    made = ds.BatchEnsemble(network, members=3, modulation=WIDE).train()
    gradients.vectorised_gradients(made, batch())
    assert seen == [(7, 4)]


# ----------------------------------------------------------------------------------------------------- noise on weights
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
    flat = {name: slope.flatten(1) for name, slope in slopes.items()}
    covariance = sum((slope * std[name].flatten() ** 2) @ slope.T for name, slope in flat.items())
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
    with set_temporarily(
        [layer], "nodes", [WeightSpread(Kernel(layer.weight, None), (std, None), (std * torch.randn(2, 3), None))]
    ):
        layer(x).square().sum().backward()
    assert bool(x.grad.isfinite().all())
    assert torch.equal(std.grad, torch.zeros(2, 3))


def test_the_account_says_where_examples_have_noise_of_their_own():
    layers = {"conv": nn.Conv2d(1, 2, 3), "head": nn.Linear(2, 2), "words": nn.Embedding(4, 2), "rnn": nn.GRU(2, 2)}
    network = nn.ModuleDict(layers)
    _, account = perturbed_copy(network)
    assert account.converted == {
        "conv": "noise for each example (flipout)",
        "head": "noise for each example (local reparametrisation, over positions flipout)",
    }
    assert account.left["words"] == "one weight draw per batch: an embedding: a lookup, no product"
    assert account.left["rnn"].startswith("one weight draw per batch: recurrent")
