"""A solvable linear model of an embedded ensemble: the best number of members, and when members act as one.

f = U w/√N with trained weights w ~ N(0, I_N) and fixed modulations U (M, N) = p + √(1 − p²) G; all targets are 1. With
A = UUᵀ/N = Σ λ_i e_i e_iᵀ, q_i = (1·e_i)²/M, r_i = λ_i/λ_max and time in units of 1/λ_max:

    L_ind = Σ_i q_i e^{−2tr_i} + (1/M) Σ_i λ_i e^{−2tr_i}                   loss of a member
    L_ens = E (Σ_i q_i e^{−tr_i})² + (1/M) E Σ_i q_i λ_i e^{−2tr_i}         loss of the members' mean: bias² + variance
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from dissensus.layers.modulation import Modulation
from dissensus.utils.checks import integer, number


class ToyLosses(NamedTuple):
    """Losses (T,) of a member and of the members' mean in the toy model, averaged over draws of U and exactly over w."""

    individual: Tensor
    ensemble: Tensor


def toy_losses(
    members: int, width: int, times: Tensor, *, p: float = 0.0, draws: int = 20, generator: Generator | None = None
) -> ToyLosses:
    """Losses (T,) of a member and of the members' mean over time, in the linear toy model of an embedded ensemble.

    Args:
        members, width: number of members M and width N.
        times: (T,) ≥ 0, in units of 1/λ_max.
        p: mean of the modulations, whose second moment is 1: 0 makes members independent, 1 equal.
        draws: number of draws of the modulations to average over.
        generator: source of random numbers; None means torch's global generator.
    """
    for time in times.tolist():
        number("times", time, least=0)
    individual, ensemble = torch.zeros_like(times), torch.zeros_like(times)
    for values, overlaps in _spectra(members, width, p, draws, generator):
        share = torch.exp(-times[:, None] * values / values[-1])  # (T, M)
        individual += (share**2 * overlaps).sum(1) + (share**2 * values).sum(1) / members
        ensemble += (share * overlaps).sum(1) ** 2 + (share**2 * overlaps * values).sum(1) / members
    return ToyLosses(individual / draws, ensemble / draws)


def toy_spectrum(
    members: int, width: int, *, p: float, draws: int = 20, generator: Generator | None = None
) -> tuple[float, float]:
    """(λ_max, overlap (e_max·1)²/M of its eigenvector with the vector of ones), both averaged over draws.

    Arguments as in `toy_losses`.
    """
    found = [(float(values[-1]), float(q[-1])) for values, q in _spectra(members, width, p, draws, generator)]
    largest, overlap = zip(*found, strict=True)
    return sum(largest) / draws, sum(overlap) / draws


def optimal_members(width: int, time: float) -> float:
    """The best number of members in the toy model, M* = (N/(4t²))^{1/3}: at p = 0, more members train too slowly to help.

    Args:
        width: width N.
        time: training time t > 0, in units of 1/λ_max.
    """
    integer("width", width)
    number("time", time, above=0, hint="without training, more members always help")
    return float((width / (4 * time**2)) ** (1 / 3))


def transition(members: int, width: int) -> float:
    """The critical mean of modulations, p_c = (1 + √(MN))^{−1/2}: above it the members' mean is a separate direction.

    Args:
        members, width: number of members M and width N.
    """
    integer("members", members)
    integer("width", width)
    return float((1 + (members * width) ** 0.5) ** -0.5)


def largest_eigenvalue(members: int, width: int, p: float) -> float:
    """The largest eigenvalue λ_max of A for large M and N; arguments as in `toy_losses`.

    A spike θ = p√(M/(1 − p²)) leaves the bulk (1 ± √c)², c = M/N, once θ > c^{1/4}.
    """
    integer("members", members)
    integer("width", width)
    number("p", p, least=-1, most=1, hint="p² is the collectivity")
    if abs(p) == 1:
        return float(members)
    ratio, noise = members / width, 1 - p**2
    spike = p**2 * members / noise  # θ²
    if spike <= ratio**0.5:
        return float(noise * (1 + ratio**0.5) ** 2)
    return float(noise * (1 + spike) * (ratio + spike) / spike)


def _spectra(members: int, width: int, p: float, draws: int, source: Generator | None) -> list[tuple[Tensor, Tensor]]:
    """(λ (M,) ascending, q (M,)) of every draw."""
    for name, value in (("members", members), ("width", width), ("draws", draws)):
        integer(name, value)
    law = Modulation.between(p)
    found = []
    for _ in range(draws):
        u = law.sample((members, width), source, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(u @ u.T / width)
        found.append((values.clamp(min=0), vectors.sum(0) ** 2 / members))
    return found
