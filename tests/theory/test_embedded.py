"""Kernels of embedded ensembles: golden vectors, limits known from theory, quadrature against closed forms."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dissensus import Modulation, theory
from refusals import refuses
from thinning import thinned

ONE, SIGN = Modulation.constant(1.0), Modulation.sign()
TWO = torch.tensor(
    [[math.sqrt(2), 0.0], [math.sqrt(0.5), math.sqrt(1.5)]], dtype=torch.float64
)  # x·x/2 = 1, x·x'/2 = .5
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
    x = torch.randn(4, 3, dtype=torch.float64)
    kernels = theory.embedded_kernels(
        x, depth=3, activation=activation, u=ONE, v=ONE, weight_variance=1.7, bias_variance=0.2
    )
    assert torch.allclose(kernels.gp_same, kernels.gp_cross, atol=1e-12)
    assert torch.allclose(kernels.common_same, kernels.common_cross, atol=1e-12)


def test_the_plain_relu_value_is_the_textbook_recursion():
    kernels = theory.embedded_kernels(TWO[:1], TWO[1:], depth=2, activation="relu", u=ONE, v=ONE, weight_variance=2.0)
    k, theta = 1.0, 0.5  # Σ(x, x) = 1; Θ¹ with gradients' factor 1
    c = 0.5 * 2.0 / 2.0
    sigma = 2.0 * c
    for _ in range(2):
        angle = math.acos(sigma / 2.0)
        value = 2.0 / (2 * math.pi) * (math.sin(angle) + (math.pi - angle) * math.cos(angle))
        slope = (math.pi - angle) / (2 * math.pi)
        theta, sigma = value + 2.0 * slope * theta, 2.0 * value
    assert k == 1.0
    assert kernels.common_same.item() == pytest.approx(theta, abs=1e-12)
    assert kernels.common_same.item() == pytest.approx(1.351480, abs=6e-7)


SMOOTH = {"erf": torch.erf, "gelu": F.gelu, "identity": lambda z: 1.0 * z}
LAWS = [SIGN, ONE, Modulation.normal(0.5, 0.6), Modulation.bernoulli(0.6)]


@pytest.mark.parametrize(("name", "v"), thinned(list(SMOOTH), LAWS, every=4))
def test_expansion_and_closed_form_agree(name, v):
    function = SMOOTH[name]
    x = torch.randn(3, 4, dtype=torch.float64)
    given = partial(
        theory.embedded_kernels, x, depth=2, u=Modulation.normal(0.4, 0.9), v=v, weight_variance=1.3, bias_variance=0.1
    )
    closed, general = given(activation=name), given(activation=theory.Smooth(function))
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
    given = partial(
        theory.embedded_kernels, x, depth=2, activation="relu", v=ONE, weight_variance=2.0, bias_variance=0.1
    )
    last, first = given(u=[ONE, SIGN]), given(u=[SIGN, ONE])
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
    opposite = given(x[:1], -x[:1], depth=1)
    assert opposite.gp_cross.item() == pytest.approx(0, abs=1e-12)
    obtuse = torch.tensor([[1.0, 0.0], [-0.9, 0.3]], dtype=torch.float64)
    assert given(obtuse[:1], obtuse[1:], depth=1).common_cross.item() < 0
    # erf is odd, so not of the theorem's class: with symmetric v members are independent though U₁ = 1.
    odd = theory.embedded_kernels(x, depth=2, activation="erf", u=ONE, v=SIGN, weight_variance=1.5)
    assert float(odd.gp_cross.abs().max()) < 1e-12
    assert float(odd.common_cross.abs().max()) < 1e-12


@pytest.mark.slow
def test_untrained_modulations_add_nothing():
    x = torch.randn(4, 3, dtype=torch.float64)
    given = partial(
        theory.embedded_kernels, x, depth=3, activation="erf", u=SIGN, v=Modulation.normal(1, 0.3), weight_variance=1.2
    )
    both, only_u, only_v, none = (given(trained=which).individual for which in ("both", "u", "v", "none"))
    assert torch.allclose(both, only_u + only_v)
    assert not none.any()


def test_bad_input_is_refused():
    x = torch.randn(4, 3)
    given = partial(theory.embedded_kernels, depth=2, u=ONE, v=ONE, weight_variance=1.0)
    refuses(lambda: given(x, activation="swish"), r"expected an activation of relu, leaky_relu, .*, got 'swish'")
    with pytest.raises(ValueError, match=r"expected examples of one shape, got \(3,\) and \(2,\)"):
        given(x, torch.randn(4, 2), activation="relu")
    refuses(lambda: given(x, activation="relu", u=[ONE] * 3), "expected one Modulation or 2 for u, got")
    refuses(lambda: given(x, activation="relu", weight_variance=-1.0), "expected weight_variance of at least 0, got -1")
    refuses(lambda: given(x, activation=theory.Smooth(torch.relu)), "expected a smooth activation")
    with pytest.raises(ValueError, match="got NaN or infinity in row 1"):
        given(torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), activation="relu")
    with pytest.raises(ValueError, match="got NaN or infinity in row 0"):
        given(torch.tensor([[1.0, -math.inf], [1.0, 0.0]]), activation="relu")
    refuses(lambda: given(x, activation="relu", depth=0), "expected depth of at least 1")
    refuses(lambda: given(x, activation="relu", trained="all"), "expected trained of both, u, v, none, got 'all'")
