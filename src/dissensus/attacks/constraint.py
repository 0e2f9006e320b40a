"""The region of an attack: a ball around the inputs, within bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dissensus.data.input_transforms import Standardiser
from dissensus.utils.checks import number, one_of

Norm = Literal["inf", "2"]
Bounds = tuple[float, float] | None
ROUNDING = 1e-3  # share of the range by which inputs may exceed their bounds


@dataclass(frozen=True, eq=False)
class Ball:
    """Inputs within ε of x and within bounds. `unit`: the value of one unit of ε in the units of the inputs."""

    x: Tensor
    epsilon: float
    norm: Norm
    unit: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def around_inputs(
        cls, x: Tensor, epsilon: float | None, *, norm: Norm, bounds: Bounds, standardiser: Standardiser | None
    ) -> Ball:
        """The ball; without ε, everything within the bounds."""
        radius = math.inf if epsilon is None else float(number("epsilon", epsilon, least=0))
        low, high = (-math.inf, math.inf) if bounds is None else map(float, bounds)
        ends = torch.tensor([low, high], dtype=x.dtype, device=x.device)
        unit = torch.ones_like(ends[0])
        edges = ends[:1], ends[1:]
        if standardiser is not None:
            mean, unit = standardiser.mean.to(x), 1 / standardiser.std.to(x)
            edges = (ends[0] - mean) * unit, (ends[1] - mean) * unit
        room = ROUNDING * (high - low) * unit
        if not (low < high and bool(((x >= edges[0] - room) & (x <= edges[1] + room)).all())):
            got, advice = f"{float(x.min()):g} to {float(x.max()):g}", "pass standardiser=, other bounds= or None"
            raise ValueError(f"expected inputs within bounds {bounds}, got values from {got}; {advice}")
        # An input that is outside by rounding is allowed.
        low_, high_ = torch.minimum(edges[0], x), torch.maximum(edges[1], x)
        return cls(x, radius, one_of("norm", norm, ("inf", "2")), unit, low_, high_)

    def step(self, at: Tensor, way: Tensor, size: float) -> Tensor:
        """A step of this size along `way`, projected onto the ball."""
        up = way.to(self.x) * self.unit  # the gradient in the units of ε
        along = up.sign() if self.norm == "inf" else up / euclidean_norms(up).clamp(min=torch.finfo(up.dtype).tiny)
        return self.project((at - self.x) / self.unit + size * along)

    def project(self, delta: Tensor) -> Tensor:
        """x + δ, with δ projected onto the ball and the sum onto the bounds; exactly x if δ is 0."""
        if self.norm == "inf":
            delta = delta.clamp(-self.epsilon, self.epsilon)
        else:
            far = euclidean_norms(delta)
            delta = torch.where(far > self.epsilon, delta * (self.epsilon / far), delta)
        moved = torch.where(delta == 0, self.x, self.x + delta * self.unit)
        return torch.minimum(torch.maximum(moved, self.low), self.high)

    def random_point(self, generator: torch.Generator | None) -> Tensor:
        """A uniformly drawn point of the ball, projected onto the bounds."""
        empty = torch.empty_like(self.x, device=torch.device("cpu") if generator is None else generator.device)
        if self.norm == "inf":
            delta = empty.uniform_(-1, 1, generator=generator)
        else:  # a direction, and a radius whose D-th power is uniform
            delta = empty.normal_(generator=generator)
            radius = torch.empty_like(euclidean_norms(delta)).uniform_(generator=generator)
            delta = delta / euclidean_norms(delta) * radius ** (1 / max(math.prod(delta.shape[1:]), 1))
        return self.project(self.epsilon * delta.to(self.x))


def euclidean_norms(vectors: Tensor) -> Tensor:
    """(B, 1...) Euclidean norms of vectors (B, ...)."""
    return append_axes(vectors.flatten(1).norm(dim=1), vectors)


def append_axes(values: Tensor, like: Tensor) -> Tensor:
    """Values (B,) or (M, B) with trailing axes of length 1, to broadcast with `like`."""
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim))
