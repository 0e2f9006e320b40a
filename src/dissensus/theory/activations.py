"""Activations under Gaussian inputs: the three expectations that make up every kernel of a wide network.

For (z, z') ~ N(0, [[a, c], [c, b]]) and modulations v, v' (equal within a member, independent between two):

    value    C = E φ(vz) φ(v'z')
    slope    D = E v v' φ'(vz) φ'(v'z')
    product  Z = E z z' φ'(vz) φ'(vz')          (within a member: the contribution of training v)

ReLU (Cho & Saul 2009), erf (Williams 1997) and a few others have closed forms; other smooth activations are expanded in
Hermite polynomials. Everything is in float64, because kernels are factorised later.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.layers.modulation import Modulation
from dissensus.nets.blocks import Erf
from dissensus.theory import closed_forms
from dissensus.theory.hermite import coefficients, law_nodes, sum_expansion

ONE = Modulation.constant(1.0)


class Expectations(NamedTuple):
    """C, D and Z of the module's docstring, each of c's shape; Z is None between members, where it is not needed."""

    value: Tensor
    slope: Tensor
    product: Tensor | None


class Activation(ABC):
    """Base class of activations with known expectations under Gaussian inputs, used by the kernels.

    For (z, z') ~ N(0, [[a, c], [c, b]]), with tensors a, b, c that broadcast to c's shape; `v` is the law of the
    modulations.
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
        value, slope = closed_forms.piecewise_linear(a, b, c, self.negative_slope)
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
        value, slope = closed_forms.piecewise_linear(a, b, c, self.negative_slope)
        mirrored, mirrored_slope = closed_forms.piecewise_linear(a, b, -c, self.negative_slope)
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

    def _average_moments(
        self, a: Tensor, b: Tensor, c: Tensor, factors: list[tuple[float, float, float]]
    ) -> list[Tensor]:
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
        return Expectations(
            *(sum_expansion(left, right, weights, a, b, c) for left, right in zip(one, two, strict=True))
        )

    def between_members(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Expectations:
        factors, weights = (each.to(c.device) for each in law_nodes(v))
        alone = torch.ones(1, dtype=torch.float64, device=c.device)
        # Members' factors are independent: average each side's coefficients over its factors first.
        one, two = (
            [
                (weights[:, None] * table).sum(-2, keepdim=True)
                for table in coefficients(self.function, variance, factors, weights)
            ]
            for variance in (a, b)
        )
        value, slope = (
            sum_expansion(left, right, alone, a, b, c) for left, right in zip(one[:2], two[:2], strict=True)
        )
        return Expectations(value, slope, None)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Homogeneous(0.0),
    "leaky_relu": Homogeneous(0.01),
    "identity": Homogeneous(1.0),
    "erf": ClosedForm(torch.erf, closed_forms.erf, 2 / math.sqrt(math.pi)),
    "gelu": ClosedForm(F.gelu, closed_forms.gelu, 0.5),
    "tanh": Smooth(torch.tanh),
    "sigmoid": Smooth(torch.sigmoid),
    "silu": Smooth(F.silu),
    "softplus": Smooth(F.softplus),
}
SMOOTH_GELU = Smooth(lambda z: F.gelu(z, approximate="tanh"))
_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Identity: "identity",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    Erf: "erf",
}


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
