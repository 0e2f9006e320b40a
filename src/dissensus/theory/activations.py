"""Activations under Gaussian inputs: the three expectations that make up every kernel of a wide network.

For (z, z') ~ N(0, [[a, c], [c, b]]) and modulations v, v' (equal within a member, independent between two):

    value    C = E φ(vz) φ(v'z')
    slope    D = E v v' φ'(vz) φ'(v'z')
    product  Z = E z z' φ'(vz) φ'(vz')          (within a member: the contribution of training v)

ReLU (Cho & Saul 2009), erf (Williams 1997) and a few others have closed forms. Other smooth activations are expanded in
Hermite polynomials: E φ(z) φ(z') = Σ_k α_k(a) α_k(b) ρ^k for a correlation of ρ (Mehler), so that one-dimensional integrals
replace a two-dimensional one. Everything is in float64, because kernels are factorised later.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.layers.modulation import Modulation
from dissensus.nets.blocks import Erf


def piecewise_linear_moments(a: Tensor, b: Tensor, c: Tensor, negative_slope: float) -> tuple[Tensor, Tensor]:
    """(C, D) of φ(z) = max(z, 0) + slope·min(z, 0); Z = C, since z φ'(z) = φ(z) (Cho & Saul 2009)."""
    low, high = min(float(a.min()), float(b.min())), max(float(a.max()), float(b.max()))
    usual = low >= math.sqrt(torch.finfo(c.dtype).tiny) and high <= math.sqrt(torch.finfo(c.dtype).max)
    if usual:
        scale = (a * b).sqrt_()  # of equal a and b exactly a
    else:  # without ab, which may leave the range of floats
        most = torch.maximum(a, b)
        scale = most * (torch.minimum(a, b).clamp(min=0) / most.where(most > 0, 1.0)).sqrt()
    some = None if usual else scale > 0
    angle = (c / (scale if some is None else scale.where(some, 1.0))).clamp_(-1, 1).acos_()
    # G = (π − θ)/2π, F = √(ab) sin θ/2π + G c, and of −c they are ½ − G and F − c/2
    part = (1 - negative_slope) ** 2
    value = angle.sin().mul_(scale).mul_(part / (2 * math.pi))
    slope = angle.mul_(-part / (2 * math.pi)).add_((1 + negative_slope**2) / 2)
    value.addcmul_(slope, c)
    if some is None:
        return value, slope
    # At variance 0, φ'(0) is the slope below 0, as in torch, and the two sides are independent.
    mean = (1 + negative_slope) / 2
    at_zero = torch.where(a > 0, mean, negative_slope) * torch.where(b > 0, mean, negative_slope)
    return value.where(some, 0.0), slope.where(some, at_zero.to(slope.dtype))


def erf_moments(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C, D, Z) of φ = erf (Williams 1997)."""
    product = (1 + 2 * a) * (1 + 2 * b)
    determinant = product - 4 * c**2
    value = 2 / math.pi * torch.asin((2 * c / product.sqrt()).clamp(-1, 1))
    slope = 4 / math.pi / determinant.sqrt()
    return value, slope, slope * c / determinant


def gelu_moments(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C, D, Z) of φ(z) = z Φ(z), by Stein's lemma from E ΦΦ' and E ϕϕ', Φ and ϕ the normal distribution and density."""
    determinant = (1 + a) * (1 + b) - c**2
    both = 0.25 + torch.asin((c / ((1 + a) * (1 + b)).sqrt()).clamp(-1, 1)) / (2 * math.pi)  # E Φ(z) Φ(z')
    density = 1 / (2 * math.pi * determinant.sqrt())  # E ϕ(z) ϕ(z')
    left = c * density / (1 + a)  # E zϕ(z) Φ(z')
    right = c * density / (1 + b)  # E Φ(z) z'ϕ(z')
    # Under the density tilted by ϕϕ' the covariance is S = I − (I + Σ)⁻¹.
    s_aa, s_bb, s_ab = 1 - (1 + b) / determinant, 1 - (1 + a) / determinant, c / determinant
    value = a * density * (b - c**2 / (1 + a)) + c * (both + right)
    slope = both + left + right + density * s_ab
    # φ' = Φ + zϕ: Z = E zz'ΦΦ' + E z²ϕ z'Φ' + E zΦ z'²ϕ' + E z²ϕ z'²ϕ'
    cubic_left = (2 * a * left + c * density * s_aa) / (1 + a)  # E z³ϕ(z) Φ(z')
    cubic_right = (2 * b * right + c * density * s_bb) / (1 + b)
    square_left = c * (2 * left - cubic_left) + b * density * s_aa  # E z²ϕ(z) z'Φ(z')
    square_right = c * (2 * right - cubic_right) + a * density * s_bb
    product = value + square_left + square_right + density * (s_aa * s_bb + 2 * s_ab**2)
    return value, slope, product


ORDER = 512  # nodes of an expansion of an activation
LAW_NODES = 40  # nodes of a normal modulation; even, so that none is 0
# Largest share of E φ² in the upper half of the coefficients: a kink leaves 1e-2 there, a smooth function far less beyond.
TAIL = 2e-5


def coefficients(
    function: Callable[[Tensor], Tensor], variance: Tensor, factors: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V, n) Hermite coefficients of φ(vz), v φ'(vz) and z φ'(vz), for V factors v with these probabilities."""
    nodes, basis = (each.to(variance.device) for each in hermite_basis(ORDER))
    z = variance.clamp(min=0).sqrt()[..., None, None] * nodes  # (..., 1, n)
    at = (factors[:, None] * z).detach().requires_grad_()  # (..., V, n)
    with torch.enable_grad():
        value = function(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    weighted = basis * basis[0]  # w_j h_k(x_j)
    found = tuple(each.detach() @ weighted.T for each in (value, factors[:, None] * slope, z * slope))
    for table in found:
        energy = (weights[:, None] * table.square()).sum(-2)
        half = table.shape[-1] // 2
        worst = float((energy[..., half:].sum(-1) / energy.sum(-1).clamp(min=1e-300)).max())
        if not worst < TAIL:
            got = f"a share {worst:.1e} of its expansion beyond degree {half}"
            advice = "pass smaller weight variances, or 'relu' or 'leaky_relu', which have closed forms"
            raise ValueError(f"expected a smooth activation, got {got}, above {TAIL:.0e}; {advice}")
    value, slope, product = found
    return value, slope, product


def sum_expansion(left: Tensor, right: Tensor, weights: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Σ_k ρ^k Σ_v weights_v left[..., v, k] right[..., v, k] of c's shape, ρ = c/√(ab), by Horner's rule."""
    scale = (a * b).clamp(min=0).sqrt()
    rho = torch.where(scale > 0, c / scale.where(scale > 0, torch.ones_like(scale)), torch.zeros_like(c)).clamp(-1, 1)
    total = torch.zeros_like(c)
    for k in reversed(range(left.shape[-1])):
        total = total * rho + (weights * left[..., k] * right[..., k]).sum(-1)
    return total


@lru_cache(maxsize=8)
def hermite_basis(order: int) -> tuple[Tensor, Tensor]:
    """(nodes (n,), basis (n, n)) with basis[k, j] = √w_j h_k(x_j) of N(0, 1), by Golub & Welsch (1969); never overflows."""
    off = torch.arange(1, order, dtype=torch.float64).sqrt()
    nodes, basis = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, basis * basis[0].sign()  # √w_j = basis[0, j] > 0


def law_nodes(law: Modulation) -> tuple[Tensor, Tensor]:
    """(values, weights) with Σ w f(v) = E f(v): exact for laws with atoms, Gauss-Hermite for normal ones."""
    if law.discrete:
        values, weights = zip(*law.atoms(), strict=True)
        return torch.tensor(values, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    mean, std = law.parameters
    nodes, basis = hermite_basis(LAW_NODES)
    return mean + std * nodes, basis[0] ** 2  # exact for polynomials of degree below 2·LAW_NODES


ONE = Modulation.constant(1.0)


class Expectations(NamedTuple):
    """C, D and Z of the module's docstring, each of c's shape; Z is None between members, where it is not needed."""

    value: Tensor
    slope: Tensor
    product: Tensor | None


class Activation(ABC):
    """Base class of activations with known expectations under Gaussian inputs, used by the kernels.

    For (z, z') ~ N(0, [[a, c], [c, b]]), with a, b, c that broadcast to c's shape; `v` is the law of the modulations.
    """

    function: Callable[[Tensor], Tensor]

    @abstractmethod
    def within_member(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Expectations:
        """Expectations if both factors come from one member."""

    @abstractmethod
    def between_members(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Expectations:
        """Expectations if the factors come from two members."""


class Homogeneous(Activation):
    """φ(z) = z above 0, slope·z below: ReLU (0), leaky ReLU, the identity (1)."""

    def __init__(self, negative_slope: float) -> None:
        self.negative_slope = negative_slope
        self.function = partial(F.leaky_relu, negative_slope=negative_slope)

    def within_member(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Expectations:
        value, slope = piecewise_linear_moments(a, b, c, self.negative_slope)
        if v == ONE:
            return Expectations(value, slope, value)
        # φ(vz) = |v| φ(±z), and (−z, −z') has the law of (z, z'). φ'(0) is the slope below 0, as torch has it.
        zero = sum(weight for atom, weight in v.atoms() if atom == 0) if v.discrete else 0.0
        product = (1 - zero) * value + zero * self.negative_slope**2 * c
        return Expectations(v.second_moment * value, v.second_moment * slope, product)

    def between_members(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Expectations:
        # Two members' factors have equal or opposite signs: m₊² + m₋² and 2 m₊ m₋ of E|v||v'|.
        plus, minus = v.halves
        equal, opposite = plus**2 + minus**2, 2 * plus * minus
        value, slope = piecewise_linear_moments(a, b, c, self.negative_slope)
        mirrored, mirrored_slope = piecewise_linear_moments(a, b, -c, self.negative_slope)
        return Expectations(equal * value + opposite * mirrored, equal * slope - opposite * mirrored_slope, None)


class ClosedForm(Activation):
    """Activations with closed forms of (C, D, Z) for fixed modulations, over which quadrature averages."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        moments: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
        slope_at_zero: float,
    ) -> None:
        self.function, self._moments, self._slope_at_zero = function, moments, slope_at_zero

    def within_member(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Expectations:
        nodes = zip(*(each.tolist() for each in law_nodes(v)), strict=True)
        return Expectations(*self._average_moments(a, b, c, [(factor, factor, weight) for factor, weight in nodes]))

    def between_members(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Expectations:
        nodes = list(zip(*(each.tolist() for each in law_nodes(v)), strict=True))
        pairs = [(one, two, of_one * of_two) for one, of_one in nodes for two, of_two in nodes]
        value, slope, _ = self._average_moments(a, b, c, pairs)
        return Expectations(value, slope, None)

    def _average_moments(self, a: Tensor, b: Tensor, c: Tensor, factors: Iterable[Sequence[float]]) -> list[Tensor]:
        """C, D and Z, averaged over pairs of factors with their weights."""
        total = [torch.zeros_like(c) for _ in range(3)]
        for one, two, weight in factors:
            if one * two == 0:
                total[2] += weight * self._slope_at_zero**2 * c  # φ(0) = 0 for all of these
                continue
            value, slope, product = self._moments(one**2 * a, two**2 * b, one * two * c)
            for sum_, term in zip(total, (value, one * two * slope, product / (one * two)), strict=True):
                sum_ += weight * term
        return total


class Smooth(Activation):
    """Your own smooth elementwise activation, expanded in Hermite polynomials: `Smooth(torch.sin)`.

    A function with kinks raises an error when it is used.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def within_member(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Expectations:
        factors, weights = (each.to(c.device) for each in law_nodes(v))
        one, two = (coefficients(self.function, variance, factors, weights) for variance in (a, b))
        return Expectations(*(sum_expansion(*pair, weights, a, b, c) for pair in zip(one, two, strict=True)))

    def between_members(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Expectations:
        factors, weights = (each.to(c.device) for each in law_nodes(v))
        alone = torch.ones(1, dtype=torch.float64, device=c.device)
        # Members' factors are independent: average each side's coefficients over its factors first.
        sides = (coefficients(self.function, variance, factors, weights) for variance in (a, b))
        one, two = ([(weights[:, None] * table).sum(-2, keepdim=True) for table in side] for side in sides)
        value, slope = (sum_expansion(*pair, alone, a, b, c) for pair in zip(one[:2], two[:2], strict=True))
        return Expectations(value, slope, None)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Homogeneous(0.0),
    "leaky_relu": Homogeneous(0.01),
    "identity": Homogeneous(1.0),
    "erf": ClosedForm(torch.erf, erf_moments, 2 / math.sqrt(math.pi)),
    "gelu": ClosedForm(F.gelu, gelu_moments, 0.5),
    **{each.__name__: Smooth(each) for each in (torch.tanh, torch.sigmoid, F.silu, F.softplus)},
}
SMOOTH_GELU = Smooth(lambda z: F.gelu(z, approximate="tanh"))
_MODULES = {each: each.__name__.lower() for each in (nn.ReLU, nn.Identity, nn.Tanh, nn.Sigmoid, nn.SiLU, Erf)}


def activation_of(given: str | nn.Module | Activation) -> Activation:
    """The `Activation` for a name ("relu", "erf", …) or an activation module; an `Activation` is returned unchanged."""
    if isinstance(given, Activation):
        return given
    if isinstance(given, str) and given in ACTIVATIONS:
        return ACTIVATIONS[given]
    if type(given) in _MODULES:
        return ACTIVATIONS[_MODULES[type(given)]]  # type: ignore[index]
    if isinstance(given, nn.LeakyReLU):
        return Homogeneous(given.negative_slope)
    if isinstance(given, nn.GELU):
        return ACTIVATIONS["gelu"] if given.approximate == "none" else SMOOTH_GELU
    if isinstance(given, nn.Softplus) and given.beta == 1:
        return ACTIVATIONS["softplus"]
    what = repr(given) if isinstance(given, str) else type(given).__name__
    advice = "name one of them, or pass theory.Smooth(function)"
    raise ValueError(f"expected an activation of {', '.join(ACTIVATIONS)}, got {what}; {advice}")


def is_expanded(layer: nn.Module) -> bool:
    """Whether this is an activation without a closed form."""
    try:
        return isinstance(activation_of(layer), Smooth)
    except ValueError:
        return False
