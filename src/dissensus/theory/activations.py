"""Activations under Gaussian inputs: the three expectations that every kernel of a wide network is made of.

For (z, z') ~ N(0, [[a, c], [c, b]]) and modulations v, v' (equal within a member, independent between two):

    value    C = E φ(vz) φ(v'z')
    slope    D = E v v' φ'(vz) φ'(v'z')
    product  Z = E z z' φ'(vz) φ'(vz')          (within a member: what training v adds)

Closed forms where they exist (Cho & Saul 2009 for ReLU, Williams 1997 for erf); other smooth activations by expansion in
Hermite polynomials. All in float64, whatever the inputs: kernels are factorised later.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.nets.blocks import Erf
from dissensus.surgery.modulation import Modulation
from dissensus.theory import closed_forms
from dissensus.theory.expansion import coefficients, expanded
from dissensus.theory.hermite import law_nodes

ONE = Modulation.constant(1.0)


class Moments(NamedTuple):
    """C, D and Z of the module's docstring, each of c's shape; Z is None between members, where nothing needs it."""

    value: Tensor
    slope: Tensor
    product: Tensor | None


class Activation(ABC):
    """An activation whose expectations are known; a, b, c are tensors that broadcast to c's shape."""

    @abstractmethod
    def within(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Moments:
        """Both factors from one member."""

    @abstractmethod
    def between(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Moments:
        """The factors from two members."""


class Homogeneous(Activation):
    """φ(z) = z above 0, slope·z below: ReLU (0), leaky ReLU, the identity (1)."""

    def __init__(self, negative_slope: float) -> None:
        self.negative_slope = negative_slope

    def within(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Moments:
        value, slope = closed_forms.piecewise_linear(a, b, c, self.negative_slope)
        # φ(vz) = |v| φ(±z), and (−z, −z') has the law of (z, z'). φ'(0) is the slope below 0, as torch has it.
        zero = sum(weight for atom, weight in v.atoms() if atom == 0) if v.discrete else 0.0
        product = (1 - zero) * value + zero * self.negative_slope**2 * c
        return Moments(v.second_moment * value, v.second_moment * slope, product)

    def between(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Moments:
        # Two members' factors have equal or opposite signs: m₊² + m₋² and 2 m₊ m₋ of E|v||v'|.
        plus, minus = v.halves
        equal, opposite = plus**2 + minus**2, 2 * plus * minus
        value, slope = closed_forms.piecewise_linear(a, b, c, self.negative_slope)
        mirrored, mirrored_slope = closed_forms.piecewise_linear(a, b, -c, self.negative_slope)
        return Moments(equal * value + opposite * mirrored, equal * slope - opposite * mirrored_slope, None)


class Closed(Activation):
    """Activations with a closed form of (C, D, Z) without modulations; those are averaged by quadrature."""

    def __init__(
        self, moments: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], slope_at_zero: float
    ) -> None:
        self._moments = moments
        self._slope_at_zero = slope_at_zero

    def within(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Moments:
        total = [torch.zeros_like(c) for _ in range(3)]
        for factor, weight in zip(*(each.tolist() for each in law_nodes(v)), strict=True):
            if factor == 0:
                # φ(0) = 0 for all of these
                total[2] += weight * self._slope_at_zero**2 * c
                continue
            square = factor**2
            value, slope, product = self._moments(square * a, square * b, square * c)
            for sum_, term in zip(total, (value, square * slope, product / square), strict=True):
                sum_ += weight * term
        return Moments(*total)

    def between(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Moments:
        value, slope = torch.zeros_like(c), torch.zeros_like(c)
        nodes = list(zip(*(each.tolist() for each in law_nodes(v)), strict=True))
        for one, weight_one in nodes:
            for two, weight_two in nodes:
                if one * two == 0:
                    continue
                found = self._moments(one**2 * a, two**2 * b, one * two * c)
                value += weight_one * weight_two * found[0]
                slope += weight_one * weight_two * one * two * found[1]
        return Moments(value, slope, None)


class Smooth(Activation):
    """Any smooth elementwise function, expanded in Hermite polynomials; one with kinks is refused where it is used."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def within(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation = ONE) -> Moments:
        factors, weights = (each.to(c.device) for each in law_nodes(v))
        one, two = (coefficients(self.function, variance, factors, weights) for variance in (a, b))
        return Moments(*(expanded(left, right, weights, a, b, c) for left, right in zip(one, two, strict=True)))

    def between(self, a: Tensor, b: Tensor, c: Tensor, v: Modulation) -> Moments:
        factors, weights = (each.to(c.device) for each in law_nodes(v))
        alone = torch.ones(1, dtype=torch.float64, device=c.device)
        # Members' factors are independent: average each side's coefficients over its own first.
        one, two = (
            [
                (weights[:, None] * table).sum(-2, keepdim=True)
                for table in coefficients(self.function, variance, factors, weights)
            ]
            for variance in (a, b)
        )
        value, slope = (expanded(left, right, alone, a, b, c) for left, right in zip(one[:2], two[:2], strict=True))
        return Moments(value, slope, None)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Homogeneous(0.0),
    "leaky_relu": Homogeneous(0.01),
    "identity": Homogeneous(1.0),
    "erf": Closed(closed_forms.erf, 2 / math.sqrt(math.pi)),
    "gelu": Closed(closed_forms.gelu, 0.5),
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
    """The expectations of an activation named, held by a module, or given as they are."""
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
    raise ValueError(
        f"expected an activation of {', '.join(ACTIVATIONS)}, got {what}; "
        "name one of them, or pass theory.Smooth(function) for a smooth function of your own"
    )
