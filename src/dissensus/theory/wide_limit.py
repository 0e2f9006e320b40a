"""What members of an embedded ensemble have in common in the wide limit: `embedded_kernels`' recursion on a network at hand.

For a chain of ReLU layers and one input, weights drawn at random, with the moments of the factors that were drawn in place of
those of a law; layers without factors have factors of 1, and biases, which members share at the start, are left out:

    K_k ← 2 m_k C_k,    Θ_k ← m_k (C_k + 2 D_k Θ_k),    k = same member, different members

What pools, runs beside another way, or is no layer that is known may bring members nearer than a chain would. There both ends
are followed, members as near as the chain says (or not at all, behind activations other than ReLU) and members that are
equal; what they do not agree on is not told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dissensus.core.posterior import Posterior
from dissensus.surgery.conversion import CONVERTIBLE, CONVOLUTIONS, READERS
from dissensus.surgery.order import chained, follow
from dissensus.theory.passing import passed

BATCH_NORM = nn.modules.batchnorm._NormBase
NORMS = (BATCH_NORM, nn.LayerNorm, nn.GroupNorm)
APART = 0.1  # of both ends, beyond which there is no telling


@dataclass(frozen=True)
class Link:
    """A linear or convolutional layer of the chain; r and s are (M, n), None where they are 1."""

    r: Tensor | None
    s: Tensor | None
    normed: bool  # an own batch norm follows
    loose: bool  # what follows may bring members nearer
    opaque: bool  # what follows is no ReLU


def wide_limit(posterior: Posterior, modulations: dict[str, Tensor]) -> tuple[float | None, float | None]:
    """(K_o/K_d, Θ_o/Θ_d) of one input at the outputs; None where there is no telling."""
    links = chain(posterior, modulations)
    low, high = (followed(links, equal=equal) for equal in (False, True))
    told = [
        a if a is not None and b is not None and abs(a - b) <= APART else None for a, b in zip(low, high, strict=True)
    ]
    return told[0], told[1]


def chain(posterior: Posterior, modulations: dict[str, Tensor]) -> list[Link]:
    """The network's layers, with factors or without, in the order of calls."""
    network = posterior.particles.template.network
    parts = dict(network.named_modules())
    fixed = {*posterior.particles.template.always_eval, *posterior.particles.frozen_norms()}  # they undo no size
    norms = {n for n, part in parts.items() if isinstance(part, BATCH_NORM) and f"network.{n}" not in fixed}
    layers = [name for name, part in parts.items() if isinstance(part, CONVERTIBLE)]
    with posterior.particles.turn():
        names = [name for name in parts if name in layers or name in norms]
        seen = follow(network, names)
        order = chained(names, seen)
        whole = [name for name in order if name in layers]
        through = passed(network, whole, seen)
    known = not any(_foreign(part) for part in parts.values())
    opaque = any(_activates(part) and not isinstance(part, nn.ReLU) for part in parts.values())
    # A forward of one's own may pool without a layer; a sequence cannot.
    written = any(list(part.children()) and not isinstance(part, nn.Sequential) for part in parts.values())
    pools = any(type(part).__module__ == nn.modules.pooling.__name__ for part in parts.values())
    straight = known and through >= set(whole)
    links = []
    for name, after in zip(order, [*order[1:], ""], strict=True):
        if name in layers:
            r, s = (modulations.get(f"{name}.{factor}") for factor in "rs")
            image = isinstance(parts[name], CONVOLUTIONS)
            loose = name not in through if name == whole[-1] else not straight or (image and (written or pools))
            links.append(Link(r, s, after in norms, loose, opaque))
    return links


def followed(links: list[Link], *, equal: bool) -> tuple[float | None, float | None]:
    """(K_o/K_d, Θ_o/Θ_d) at the end of the chain; members `equal`, or as near as the chain says, behind loose links."""
    same, cross, theta_same, theta_cross = 1.0, 1.0, 0.0, 0.0
    for place, link in enumerate(links):
        s = link.s
        within, between = (1.0, 1.0) if link.r is None else moments(link.r, link.r)
        # z = W (r ∘ h), W ~ N(0, 2/n): K = 2 m h, Θ = m (h + 2 Θ)
        theta_same = within * (same + 2 * theta_same)
        theta_cross = between * (cross + 2 * theta_cross)
        same, cross = 2 * within * same, 2 * between * cross
        if not same > 0 or not theta_same > 0:  # factors of 0 let nothing through
            return None, None
        if link.normed:  # an own batch norm undoes the size of s and of z
            s = None if s is None else s.sign()
            same, cross, theta_same, theta_cross = 1.0, cross / same, theta_same / same, theta_cross / same
        if place == len(links) - 1:  # outputs: no activation
            within, between = (1.0, 1.0) if s is None else moments(s, s)
            if not within > 0:
                return None, None
            if equal and link.loose:
                return 1.0, 1.0
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
        if equal and (link.loose or link.opaque):
            cross, theta_cross = same, theta_same
        elif link.opaque:
            cross = theta_cross = 0.0
    raise ValueError("expected modulations, got none; pass an embedded ensemble with layers that are cut")


def moments(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(mean of a_α b_α within members, mean of a_α b_β over pairs of different ones) of factors (M, n)."""
    a, b = a.detach().double(), b.detach().double()
    members = len(a)
    own, total = (a * b).sum(0), a.sum(0) * b.sum(0)
    return float(own.mean()) / members, float((total - own).mean()) / (members * (members - 1))


def _foreign(part: nn.Module) -> bool:
    """Whether it has weights of which there is no telling what they do: attention, recurrent layers, embeddings."""
    own = not isinstance(part, (*CONVERTIBLE, *NORMS)) and not list(part.children()) and bool(list(part.parameters()))
    return own or isinstance(part, READERS)


def _activates(part: nn.Module) -> bool:
    return type(part).__module__ == nn.modules.activation.__name__ and not isinstance(part, READERS)


def _value(c: float) -> float:
    """E φ(z) φ(z') of ReLU, unit variances and correlation c: (√(1 − c²) + (π − acos c) c)/2π."""
    return (math.sqrt(1 - c * c) + (math.pi - math.acos(c)) * c) / (2 * math.pi)


def _slope(c: float) -> float:
    """E φ'(z) φ'(z'): (π − acos c)/2π."""
    return (math.pi - math.acos(c)) / (2 * math.pi)
