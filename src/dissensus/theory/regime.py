"""Which regime an embedded ensemble is in: M networks, or one in disguise; said before it is trained, from its modulations.

In the wide limit only moments of r and s, within members and between them, matter: the recursion of `embedded_kernels` for
a chain of ReLU layers and one input, with the moments that were drawn in place of those of a law:

    K_k ← 2 m_k C_k,    Θ_k ← m_k (C_k + 2 D_k Θ_k),    k = same member, different members
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.core.batch import Inputs
from dissensus.core.posterior import Posterior
from dissensus.surgery.order import chained, follow
from dissensus.theory.stability import Outputs, largest_rate, overlap

BATCH_NORM = nn.modules.batchnorm._NormBase


@dataclass(frozen=True)
class Regime:
    """What to expect of an embedded ensemble. `str()` says it in a sentence."""

    members: int
    gamma: float
    kind: Literal["independent", "collective"]  # collective where the kernels of M − 1 others outweigh a member's own
    correlation: float  # of two members' outputs at the start, in the wide limit
    overlap: float  # Θ_αβ/Θ_αα of shared weights: measured where there are inputs, else in the wide limit
    measured: bool
    rate: (
        float | None
    )  # the largest stable learning rate of SGD on the inputs; None without, or by a likelihood of one's own

    @property
    def effective_members(self) -> float:
        """M / (1 + (M − 1) correlation), at the start."""
        return self.members / (1 + (self.members - 1) * max(self.correlation, 0.0))

    @property
    def advice(self) -> str:
        """What to change, "" where γ suits the modulations."""
        if self.members == 1:
            return ""
        if self.kind == "collective" and self.gamma > 1 + 1e-9:
            return f'γ = {self.gamma:g} only lowers the largest stable rate; pass regime="collective", or signs as modulations'
        if self.kind == "independent" and self.gamma < self.members / 2:
            slower = self.members / self.gamma
            return f'γ = {self.gamma:g} trains shared weights {slower:g} times slower; pass regime="independent"'
        return ""

    def __str__(self) -> str:
        said = f"{self.members} members with γ = {self.gamma:g} are {self.kind}: correlation {self.correlation:.2f} at the "
        said += f"start ({self.effective_members:.1f} effective), kernels between members {self.overlap:.2f} of those within"
        said += f"{'' if self.measured else ' in the wide limit'}"
        said += "" if self.rate is None else f"; SGD is stable up to a learning rate of {self.rate:.3g}"
        return f"{said}; {self.advice}" if self.advice else said


def regime(posterior: Posterior, x: Inputs | None = None) -> Regime:
    """The `Regime` of an embedded ensemble as its modulations are now; with inputs x the kernel is measured, not modelled.

    The rate is 2B/λ_max of the kernel over members × examples of the network at hand, for full batches x and SGD without
    momentum (with momentum β it is (1 + β) times that). For classification a bound, for a likelihood of one's own None: see
    `theory.stability`.
    """
    modulations: dict[str, Tensor] | None = getattr(posterior, "modulations", None)
    if modulations is None:
        raise TypeError(
            f"expected an embedded ensemble, got {type(posterior).__name__}; pass a BatchEnsemble or a DropoutEnsemble"
        )
    embedded: Any = posterior
    members, gamma = posterior.particles.members, float(embedded.gamma)
    correlation, between = wide_limit(posterior, modulations) if members > 1 else (0.0, 0.0)
    rate = None
    if x is not None:
        posterior.check_inputs(x)
        outputs = Outputs(posterior, x)
        rate = largest_rate(outputs)
        between = overlap(outputs) if members > 1 else 0.0
    together = (members - 1) * between > 1
    kind: Literal["independent", "collective"] = "collective" if together else "independent"
    return Regime(members, gamma, kind, correlation, between, x is not None, rate)


def wide_limit(posterior: Posterior, modulations: dict[str, Tensor]) -> tuple[float, float]:
    """(K_o/K_d, Θ_o/Θ_d) of one input at the outputs, layers taken as a chain in the order of calls, with ReLU between."""
    network = posterior.particles.template.network
    parts = dict(network.named_modules())
    layers = dict.fromkeys(name.rpartition(".")[0] for name in modulations)
    fixed = {*posterior.particles.template.always_eval, *posterior.particles.frozen_norms()}  # they undo no size
    norms = [n for n, part in parts.items() if isinstance(part, BATCH_NORM) and f"network.{n}" not in fixed]
    with posterior.particles.turn():
        names = [name for name in parts if name in layers or name in norms]
        order = chained(names, follow(network, names))
    chain = [(name, after) for name, after in zip(order, [*order[1:], ""], strict=True) if name in layers]
    same, cross, theta_same, theta_cross = 1.0, 1.0, 0.0, 0.0
    for place, (name, after) in enumerate(chain):
        r, s = (modulations.get(f"{name}.{factor}") for factor in "rs")
        within, between = (1.0, 1.0) if r is None else moments(r, r)
        # z = W (r ∘ h), W ~ N(0, 2/n): K = 2 m h, Θ = m (h + 2 Θ)
        theta_same = within * (same + 2 * theta_same)
        theta_cross = between * (cross + 2 * theta_cross)
        same, cross = 2 * within * same, 2 * between * cross
        if after in norms:  # an own batch norm undoes the size of s and of z
            s = None if s is None else s.sign()
            same, cross, theta_same, theta_cross = 1.0, cross / same, theta_same / same, theta_cross / same
        if place == len(chain) - 1:  # outputs: no activation
            within, between = (1.0, 1.0) if s is None else moments(s, s)
            return between * cross / (within * same), between * theta_cross / (within * theta_same)
        # h = φ(s ∘ z), φ = ReLU: C_d = V₂ K/2; between members by the signs of both: C_o = P F(c) + Q F(−c)
        ups, downs = (torch.ones(2, 1), torch.zeros(2, 1)) if s is None else (s.clamp(min=0), (-s).clamp(min=0))
        alike = moments(ups, ups)[1] + moments(downs, downs)[1]
        apart = moments(ups, downs)[1] + moments(downs, ups)[1]
        second = 1.0 if s is None else moments(s, s)[0]
        c = min(1.0, max(-1.0, cross / same))
        value = alike * _value(c) + apart * _value(-c)
        slope = alike * _slope(c) - apart * _slope(-c)
        theta_same, theta_cross = second / 2 * theta_same, slope * theta_cross
        same, cross = second * same / 2, value * same
    raise ValueError("expected modulations, got none; pass an embedded ensemble with layers that are cut")


def moments(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(mean of a_α b_α within members, mean of a_α b_β over pairs of different ones) of factors (M, n)."""
    a, b = a.detach().double(), b.detach().double()
    members = len(a)
    own, total = (a * b).sum(0), a.sum(0) * b.sum(0)
    return float(own.mean()) / members, float((total - own).mean()) / (members * (members - 1))


def _value(c: float) -> float:
    """E φ(z) φ(z') of ReLU, unit variances and correlation c: (√(1 − c²) + (π − acos c) c)/2π."""
    return (math.sqrt(1 - c * c) + (math.pi - math.acos(c)) * c) / (2 * math.pi)


def _slope(c: float) -> float:
    """E φ'(z) φ'(z'): (π − acos c)/2π."""
    return (math.pi - math.acos(c)) / (2 * math.pi)
