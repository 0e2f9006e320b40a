"""Kernels of embedded ensembles: golden vectors, limits, and theorems 1 and 2 at finite width."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus import Modulation, theory
from refusals import refuses
from thinning import thinned

ONE, SIGN = Modulation.constant(1.0), Modulation.sign()
TWO = torch.tensor([[2, 0], [0.5, 1.5]], dtype=torch.float64).sqrt()  # x·x/2 = 1, x·x'/2 = .5
FIELDS = ("gp_same", "gp_cross", "common_same", "common_cross", "individual")

GOLDEN = [
    ({"depth": 1, "u": Modulation.normal(0.6, 0.8), "v": ONE}, (1.217996, 0.438478, 0.942331, 0.339239, 2.435991)),
    ({"depth": 2, "u": SIGN, "v": ONE}, (1.367811, 0, 1.351480, 0, 4.461347)),
    ({"depth": 2, "u": Modulation.normal(0.6, 0.8), "v": ONE}, (1.367811, 0.313640, 1.351480, 0.226475, 4.461347)),
    ({"depth": 2, "u": Modulation.normal(1, 0.5), "v": Modulation.normal(1, 0.5)},
     (3.339383, 1.706261, 3.299511, 1.452495, 8.713569)),
    ({"depth": 3, "u": Modulation.normal(0.6, 0.8), "v": SIGN, "bias_variance": 0.1},
     (1.760183, 0.266720, 3.681231, 0.153862, 7.306270)),
    ({"depth": 3, "u": Modulation.bernoulli(0.8), "v": ONE, "trained": "none"}, (0.755843, 0.488241, 0.889776, 0.481739, 0)),
    ({"depth": 2, "u": Modulation.normal(0.7, math.sqrt(0.51)), "v": Modulation.normal(1, 0.5), "activation": "erf",
          "weight_variance": 1.5, "bias_variance": 0.1},
     (0.297064, 0.073619, 1.504089, 0.452803, 0.808857)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), GOLDEN)
def test_kernels_are_the_vectors_derived_by_hand(given, expected):
    kernels = theory.embedded_kernels(TWO[:1], TWO[1:], **({"activation": "relu", "weight_variance": 2.0} | given))
    for field, value in zip(FIELDS, expected, strict=True):
        assert getattr(kernels, field).item() == pytest.approx(value, abs=6e-7), field


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "erf", "gelu", "tanh", "identity"])
def test_without_modulations_members_are_one_network(activation):
    x = torch.randn(2, 3, dtype=torch.float64)
    given = {"depth": 3, "u": ONE, "v": ONE, "weight_variance": 1.7, "bias_variance": 0.2}
    kernels = theory.embedded_kernels(x, activation=activation, **given)
    assert torch.allclose(kernels.gp_same, kernels.gp_cross, atol=1e-12)
    assert torch.allclose(kernels.common_same, kernels.common_cross, atol=1e-12)


def test_the_plain_relu_value_is_the_textbook_recursion():
    kernels = theory.embedded_kernels(TWO[:1], TWO[1:], depth=2, activation="relu", u=ONE, v=ONE, weight_variance=2.0)
    theta, sigma = 0.5, 1.0  # Σ(x, x) = 1; Θ¹ with gradients' factor 1
    for _ in range(2):
        angle = math.acos(sigma / 2.0)
        value = 2.0 / (2 * math.pi) * (math.sin(angle) + (math.pi - angle) * math.cos(angle))
        slope = (math.pi - angle) / (2 * math.pi)
        theta, sigma = value + 2.0 * slope * theta, 2.0 * value

    assert kernels.common_same.item() == pytest.approx(theta, abs=1e-12)
    assert kernels.common_same.item() == pytest.approx(1.351480, abs=6e-7)


SMOOTH = {"erf": torch.erf, "gelu": F.gelu, "identity": lambda z: 1.0 * z}
LAWS = [SIGN, ONE, Modulation.normal(0.5, 0.6), Modulation.bernoulli(0.6)]


@pytest.mark.parametrize(("name", "v"), thinned(list(SMOOTH), LAWS, every=4))
def test_expansion_and_closed_form_agree(name, v):
    x, u = torch.randn(2, 4, dtype=torch.float64), Modulation.normal(0.4, 0.9)
    given = partial(theory.embedded_kernels, x, depth=2, u=u, v=v, weight_variance=1.3, bias_variance=0.1)
    closed, general = given(activation=name), given(activation=theory.Smooth(SMOOTH[name]))
    for field in FIELDS:
        assert torch.allclose(getattr(closed, field), getattr(general, field), atol=1e-8), field


def test_kinked_activations_agree_with_samples():
    """Leaky ReLU within and between members, all expectations of one layer, against 4·10⁵ draws."""
    generator, n = torch.Generator().manual_seed(0), 400_000
    slope, v = 0.3, Modulation.normal(0.4, 0.8)
    covariance = torch.tensor([[1.3, 0.5], [0.5, 0.9]], dtype=torch.float64)
    g = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    z, z_ = (g @ torch.linalg.cholesky(covariance).T).T
    one, two = v.sample((2, n), generator, dtype=torch.float64)
    phi, dphi = partial(F.leaky_relu, negative_slope=slope), lambda z: torch.where(z > 0, 1.0, slope)
    law = theory.activation_of(nn.LeakyReLU(slope))
    a, b, c = (covariance[i, j].view(1, 1) for i, j in ((0, 0), (1, 1), (0, 1)))
    within, between = law.within_member(a, b, c, v), law.between_members(a, b, c, v)
    for expected, draws in (
        (within.value, phi(one * z) * phi(one * z_)),
        (within.slope, one**2 * dphi(one * z) * dphi(one * z_)),
        (within.product, z * z_ * dphi(one * z) * dphi(one * z_)),
        (between.value, phi(one * z) * phi(two * z_)),
        (between.slope, one * two * dphi(one * z) * dphi(two * z_)),
    ):
        assert expected.item() == pytest.approx(float(draws.mean()), abs=4 * float(draws.std()) / n**0.5)


def test_zero_mean_of_the_last_u_alone_makes_members_independent():
    x = torch.randn(5, 3, dtype=torch.float64)
    given = partial(theory.embedded_kernels, x, depth=2, v=ONE, weight_variance=2.0, bias_variance=0.1)
    last, first = (given(u=u, activation="relu") for u in ([ONE, SIGN], [SIGN, ONE]))
    assert not last.gp_cross.any()
    assert not last.common_cross.any()
    assert (first.gp_cross > 0).all()


def test_a_positive_mean_ties_members_under_the_theorems_conditions_and_not_outside_them():
    u = Modulation.normal(0.5, 0.5)
    x = torch.randn(6, 3, dtype=torch.float64)
    given = partial(theory.embedded_kernels, activation="relu", u=u, v=ONE, weight_variance=2.0)
    positive = x @ x.T > 0
    for depth in (1, 2, 3):
        kernels = given(x, depth=depth)
        assert (kernels.common_cross[positive] > 0).all()
        assert (kernels.gp_cross > (0 if depth > 1 else -1e-12)).all()
    # Outside: opposite inputs at one hidden layer have covariance 0; at x·x' < 0 the tangent kernel may be negative.
    assert given(x[:1], -x[:1], depth=1).gp_cross.item() == pytest.approx(0, abs=1e-12)
    obtuse = torch.tensor([[1.0, 0.0], [-0.9, 0.3]], dtype=torch.float64)
    assert given(obtuse[:1], obtuse[1:], depth=1).common_cross.item() < 0
    # erf is odd, so not of the theorem's class: with symmetric v members are independent though U₁ = 1.
    odd = theory.embedded_kernels(x, depth=2, activation="erf", u=ONE, v=SIGN, weight_variance=1.5)
    assert float(odd.gp_cross.abs().max()) < 1e-12
    assert float(odd.common_cross.abs().max()) < 1e-12


@pytest.mark.slow
def test_untrained_modulations_add_nothing():
    x = torch.randn(4, 3, dtype=torch.float64)
    v = Modulation.normal(1, 0.3)
    given = partial(theory.embedded_kernels, x, depth=3, activation="erf", u=SIGN, v=v, weight_variance=1.2)
    both, only_u, only_v, none = (given(trained=which).individual for which in ("both", "u", "v", "none"))
    assert torch.allclose(both, only_u + only_v)
    assert not none.any()


def test_bad_input_is_refused():
    x = torch.randn(4, 3)
    nan, infinite = torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), torch.tensor([[1.0, -math.inf], [1.0, 0.0]])
    given = partial(theory.embedded_kernels, depth=2, activation="relu", u=ONE, v=ONE, weight_variance=1.0)
    refuses(lambda: given(x, activation="swish"), r"expected an activation of relu, leaky_relu, .*, got 'swish'")
    refuses(lambda: given(x, x[:, :2]), r"expected examples of one shape, got \(3,\) and \(2,\)")
    refuses(lambda: given(x, u=[ONE] * 3), "expected one Modulation or 2 for u, got")
    refuses(lambda: given(x, weight_variance=-1.0), "expected weight_variance of at least 0, got -1")
    refuses(lambda: given(x, activation=theory.Smooth(torch.relu)), "expected a smooth activation")
    refuses(lambda: given(nan), "got NaN or infinity in row 1")
    refuses(lambda: given(infinite), "got NaN or infinity in row 0")
    refuses(lambda: given(x, depth=0), "expected depth of at least 1")
    refuses(lambda: given(x, trained="all"), "expected trained of both, u, v, none, got 'all'")


X = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def drawn(seed=0, **given):
    defaults = {"width": 12, "depth": 2, "members": 3, "u": Modulation.normal(0.6, 0.8), "v": Modulation.normal(1, 0.5),
                "weight_variance": 2.0, "bias_variance": 0.1}  # fmt: skip
    return theory.EmbeddedNetwork.draw(5, **(defaults | given), generator=torch.Generator().manual_seed(seed))


def test_blocks_of_two_sets_are_those_of_their_union():
    network, x2 = drawn(outputs=2), torch.randn(2, 5, dtype=torch.float64)
    both, whole = network.blocks(X, x2), network.blocks(torch.cat([X, x2]))
    assert both.common.shape == (3, 3, 3, 2, 2, 2)
    assert torch.allclose(both.common, whole.common[:, :, :3, 3:], atol=1e-10)
    assert torch.allclose(both.individual, whole.individual[:, :3, 3:], atol=1e-10)


def test_all_members_at_once_are_the_members_one_by_one():
    network = drawn(outputs=2)
    together = network(X)
    for m in range(3):
        own = {name: tensor[m] for name, tensor in network.own.items()}
        assert torch.allclose(together[m], network.member({**network.shared, **own}, X), atol=1e-12)


def test_the_whole_kernel_is_that_of_one_step_of_descent():
    """Θ·residual is what a small step with rates γ/M for shared and 1 for own tensors changes outputs by."""
    network, gamma, eta = drawn(activation="erf"), 3.0, 1e-6
    y = torch.randn(3, 1, dtype=torch.float64)
    tensors = {**network.shared, **network.own}
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    f = network.outputs({k: leaves[k] for k in network.shared}, {k: leaves[k] for k in network.own}, X)
    gradients = dict(zip(leaves, torch.autograd.grad(((f - y) ** 2).sum() / 2, list(leaves.values())), strict=True))
    rate = {name: gamma / 3 if name in network.shared else 1.0 for name in tensors}
    moved = {name: t - eta * rate[name] * gradients[name] for name, t in tensors.items()}
    after = network.outputs({k: moved[k] for k in network.shared}, {k: moved[k] for k in network.own}, X)
    predicted = -eta * network.blocks(X).total(gamma) @ (f - y).flatten()
    assert torch.allclose((after - f).flatten(), predicted, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize(
    ("u", "v", "activation"),
    [(SIGN, ONE, "relu"), (Modulation.normal(0.7, 0.71), Modulation.normal(1, 0.5), "erf"),
     pytest.param(Modulation.normal(0.6, 0.8), SIGN, "relu", marks=pytest.mark.slow),
     pytest.param(Modulation.bernoulli(0.8), ONE, "relu", marks=pytest.mark.slow)],
)  # fmt: skip
def test_means_over_random_networks_are_the_analytic_kernels(u, v, activation):
    """30 networks of width 256: four standard errors and the bias of order 1/N, some percent here."""
    given = {"depth": 2, "activation": activation, "u": u, "v": v, "weight_variance": 2.0, "bias_variance": 0.1}
    expected = theory.embedded_kernels(X[:2], **given)
    found = {name: [] for name in FIELDS}
    for seed in range(30):
        network = drawn(seed, width=256, members=2, outputs=1, **given)
        f, blocks = network(X[:2])[..., 0], network.blocks(X[:2])
        for name, value in (
            ("gp_same", f[0][:, None] * f[0]),
            ("gp_cross", f[0][:, None] * f[1]),
            ("common_same", blocks.same[..., 0, 0]),
            ("common_cross", blocks.common[0, 1, ..., 0, 0]),
            ("individual", blocks.individual[0, ..., 0, 0]),
        ):
            found[name].append(value)
    for name, values in found.items():
        each, wanted = torch.stack(values), getattr(expected, name)
        allowed = 4 * each.std(0) / 30**0.5 + 0.02 * float(wanted.abs().max())
        assert ((each.mean(0) - wanted).abs() < allowed).all(), name


@pytest.mark.slow
def test_kernels_become_deterministic_as_one_over_the_width():
    """Theorem 2: the variance of every block falls as 1/N; slope of its logarithm over four widths."""
    widths, seeds = (32, 64, 128, 256), 40
    variances = []
    for width in widths:
        each = [drawn(seed, width=width, members=2, u=SIGN, v=ONE).blocks(X) for seed in range(seeds)]
        blocks = torch.stack([b.common[0, :2, ..., 0, 0] for b in each])  # (seeds, 2, B, B)
        variances.append(blocks.var(0).mean((1, 2)))
    logs, x = torch.stack(variances).log(), torch.tensor(widths, dtype=torch.float64).log()
    slopes = ((x - x.mean())[:, None] * logs).sum(0) / ((x - x.mean()) ** 2).sum()
    # A variance from 40 draws is off by √(2/40) = .22; the slope over log 8 by about .15.
    assert ((slopes + 1).abs() < 0.5).all()


@pytest.mark.slow
def test_outputs_at_initialisation_are_gaussian_and_independent_when_u_has_mean_zero():
    """Theorem 1: kurtosis 3 and no correlation between members, nor between their squares, in the wide limit."""
    n = 150
    f = torch.stack([drawn(seed, width=200, members=2, u=SIGN, v=ONE)(X[:1]).flatten() for seed in range(n)])
    z = f / f.std(0)
    assert float(f.mean(0).abs().max()) < 4 * float(f.std()) / n**0.5
    assert float((z**4).mean()) == pytest.approx(3, abs=4 * (96 / (2 * n)) ** 0.5)  # Var z⁴ = 96
    assert abs(float((z[:, 0] * z[:, 1]).mean())) < 4 / n**0.5
    assert abs(float(((z[:, 0] ** 2 - 1) * (z[:, 1] ** 2 - 1)).mean())) < 4 * 2 / n**0.5
    v = Modulation.normal(1, 0.5)
    tied = torch.stack([drawn(s, width=200, members=2, u=ONE, v=v)(X[:1]).flatten() for s in range(50)])
    assert float(torch.corrcoef(tied.T)[0, 1]) > 0.5


def test_a_shared_output_bias_would_tie_members_by_exactly_one():
    network = drawn(u=SIGN, v=ONE)

    def biased(params, x):
        return network.member(params, x) + params["output_bias"]

    without = theory.ensemble_blocks(network.member, network.shared, network.own, X)
    shared = {**network.shared, "output_bias": torch.zeros(1, dtype=torch.float64)}
    with_it = theory.ensemble_blocks(biased, shared, network.own, X)
    assert torch.allclose(with_it.common, without.common + 1, atol=1e-12)


def test_too_little_memory_is_refused_with_the_size_and_axes_are_checked():
    network = drawn()
    shorter = {**network.own, "u1": network.own["u1"][:2]}
    given = partial(theory.ensemble_blocks, network.member, network.shared)
    little = r"expected gradients of all members and their kernel within 0.977 KiB, got"
    refuses(lambda: given(network.own, X, memory=1000), little)
    refuses(lambda: given(shorter, X), r"one member axis first, got lengths \[2, 3\]")


@pytest.mark.parametrize("kind", ["batch_ensemble", "talk", "dropout_ensemble"])
def test_the_blocks_of_a_posterior_predict_its_training_step(kind):
    """f after a small SGD step, of a network with convolutions, batch norm and a frozen layer: −η/B Θ(γ) (f − y)."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.Conv1d(4, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)
    ).double()
    network[3].requires_grad_(False)
    network[1].running_mean.normal_()
    given = {"members": 3, "likelihood": ds.Regression(noise=1.0), "regime": 1.7}
    if kind == "dropout_ensemble":
        posterior = ds.DropoutEnsemble(network, rate=0.3, **given)
    else:
        form = "talk" if kind == "talk" else "wen"
        posterior = ds.BatchEnsemble(network, modulation=Modulation.normal(0.6, 0.5), form=form, **given)
    posterior.eval()
    x, y, eta = torch.randn(4, 1, 5).double(), torch.randn(4, 2).double(), 1e-6
    f = posterior(x).detach()
    posterior.backward(x, y)
    blocks = theory.posterior_blocks(posterior, x)
    assert blocks.common.shape == (3, 3, 4, 4, 2, 2)
    with torch.no_grad():
        for parameter in posterior.parameters():
            if parameter.grad is not None:
                parameter -= eta * parameter.grad
    predicted = -eta / 4 * blocks.total(posterior.gamma) @ (f - y).flatten()
    torch.testing.assert_close((posterior(x) - f).flatten(), predicted, rtol=1e-3, atol=1e-10)
    other = theory.posterior_blocks(posterior, x[:2], x[2:])
    again = theory.posterior_blocks(posterior, x)
    torch.testing.assert_close(other.common, again.common[:, :, :2, 2:])


def test_blocks_of_members_that_share_nothing_are_refused():
    ensemble = ds.DeepEnsemble([nn.Linear(2, 1) for _ in range(2)])
    refuses(lambda: theory.posterior_blocks(ensemble, torch.randn(3, 2)), "members that share weights", TypeError)


# ------------------------------------------------------------------------------------------------------ what is refused
IN = torch.randn(5, 4)
LAW = {"depth": 2, "activation": "relu", "weight_variance": 2.0}


def small(*layers):
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: theory.optimal_members(-5, time=1.0), ValueError, "width of at least 1, got -5"),
        (lambda: theory.optimal_members(5, time=float("inf")), ValueError, "time above 0, got inf"),
        (lambda: theory.transition(-1, 10), ValueError, "members of at least 1, got -1"),
        (lambda: theory.transition(0, 0), ValueError, "members of at least 1, got 0"),
        (lambda: theory.transition(1.5, 10), TypeError, "members as a whole number, got 1.5"),
        (lambda: theory.largest_eigenvalue(100, 1000, p=2.0), ValueError, "p of at least -1 and of at most 1, got 2.0"),
        (lambda: theory.largest_eigenvalue(100, 0, p=0.2), ValueError, "width of at least 1, got 0"),
        (lambda: theory.toy_spectrum(4, 10, p=0.1, draws=0), ValueError, "draws of at least 1, got 0"),
        (lambda: theory.random_network(small(), weight_variance="2"), TypeError, "weight_variance as a number, got '2'"),
        (
            lambda: theory.random_network(small(), weight_variance=2.0, parameterization="mup"),
            ValueError,
            "parameterization of ntk, standard, got 'mup'",
        ),
        (lambda: theory.kernel(small(nn.BatchNorm1d(8)), IN, weight_variance=2.0), ValueError, "got BatchNorm1d; leave it out"),
        (lambda: theory.kernel(small(nn.LayerNorm(8)), IN, weight_variance=2.0), ValueError, "got LayerNorm; leave it out"),
        (lambda: theory.kernel(small(nn.Dropout()), IN, weight_variance=2.0), ValueError, "got Dropout; leave it out"),
        (lambda: theory.kernel(ds.nets.ResNet(20), IN, weight_variance=2.0), ValueError, "an nn.Sequential or .*, got ResNet"),
        (lambda: theory.kernel(ds.nets.MLP, IN, weight_variance=2.0), TypeError, "got the class MLP; pass an nn.Sequential of"),
        (lambda: theory.kernel(None, IN, weight_variance=2.0), TypeError, "a network, got None"),
        (lambda: theory.embedded_kernels(IN, u="sign", v=ONE, **LAW), ValueError, "2 for u, got 'sign'"),
        (lambda: theory.embedded_kernels(IN, u=ONE, v=[ONE], **LAW), ValueError, "2 for v, got"),
        (lambda: theory.EmbeddedNetwork.draw(4, width=8, members=2, u="sign", v=ONE, **LAW), ValueError, "2 for u, got 'sign'"),
        (lambda: theory.EmbeddedNetwork.draw(4, width=8, members=0, u=ONE, v=ONE, **LAW), ValueError, "members of at least 1"),
        (lambda: theory.EmbeddedNetwork.draw(4, width=[8], members=2, u=ONE, v=ONE, **LAW), ValueError, "one width or 2"),
        (
            lambda: theory.gp_predict(
                partial(theory.kernel, small(), weight_variance=2.0), IN, torch.zeros(3), IN, noise=0.1
            ),
            ValueError,
            r"got \(3,\)",
        ),
        (
            lambda: theory.ensemble_dynamics(IN, torch.zeros(5), kernels=theory.embedded_kernels, members=0, gamma=1.0),
            ValueError,
            "members of at least 1, got 0",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected_what_came_and_what_to_do(call, kind, says):
    with pytest.raises(kind, match=says) as error:
        call()
    assert str(error.value).startswith("expected ")
    assert "; " in str(error.value)


def test_numbers_of_other_libraries_are_numbers():
    import numpy as np

    assert theory.transition(np.int64(100), 1000) == theory.transition(100, 1000)
    drawn = theory.random_network(small(), weight_variance=np.float32(2.0), generator=torch.Generator().manual_seed(0))
    assert drawn(IN).shape == (5, 1)


def test_factors_of_zero_are_no_division_by_zero():
    net = ds.nets.MLP(4, 2, hidden=(8,))
    posterior = ds.BatchEnsemble(net, members=3, modulation=Modulation.sign())
    for factors in posterior.modulations.values():
        factors.data.zero_()
    assert "regime unknown" in str(theory.regime(posterior))
    assert theory.regime(posterior, IN).rate > 0
