"""Hamiltonian Monte Carlo on flat vectors: M chains in parallel, independent of each other.

Neal, "MCMC using Hamiltonian dynamics", Handbook of Markov Chain Monte Carlo 2011.
Hoffman & Gelman, "The No-U-Turn sampler", JMLR 2014: section 3.2 (dual averaging) and algorithm 4 (the first step size).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Energy = Callable[[Tensor], tuple[Tensor, Tensor]]  # (M, P) -> (M,) −log density, (M, P) its gradient
JITTER = 0.2  # of trajectory lengths: a fixed length equal to the period of a direction would return to its start


class Chains(NamedTuple):
    """The results of chains after their warm-up."""

    draws: Tensor  # (M, S, P)
    acceptance: Tensor  # (M,) mean probability of acceptance
    step_size: Tensor  # (M,)


class Point(NamedTuple):
    """The state of the chains: position (M, P), energy (M,), its gradient (M, P)."""

    position: Tensor
    energy: Tensor
    gradient: Tensor


def sample_chains(
    energy: Energy,
    start: Tensor,
    *,
    samples: int,
    warmup: int,
    leapfrog: int,
    target_acceptance: float,
    generators: Sequence[torch.Generator],
    every: int = 1,
) -> Chains:
    """Samples of exp(−energy) from start (M, P); each chain has its generator, and finds its step size in the warm-up."""
    point = Point(start, *energy(start))
    sizes = StepSizes(first_step_size(energy, point, generators), target_acceptance)
    draws = start.new_empty(len(start), samples, start.shape[1])
    acceptance = torch.zeros_like(point.energy)
    for number in range(warmup + samples * every):
        size = sizes.current if number < warmup else sizes.settled
        point, accepted = trajectory(energy, point, size, leapfrog, generators)
        if number < warmup:
            sizes.update(accepted)
        else:
            draws[:, (number - warmup) // every] = point.position  # overwritten until the last of `every`
            acceptance += accepted / (samples * every)
    return Chains(draws, acceptance, sizes.settled)


def trajectory(
    energy: Energy, point: Point, size: Tensor, steps: int, generators: Sequence[torch.Generator]
) -> tuple[Point, Tensor]:
    """(the chains' state after one trajectory each, (M,) probabilities of acceptance)."""
    momentum, jitter, chance = _random(point.position, generators)
    moved, end = leapfrogs(energy, point, momentum, size * (1 + JITTER * (2 * jitter - 1)), steps)
    accepted = log_ratio(point, momentum, moved, end).clamp(max=0).exp()  # (M,)
    went = chance < accepted
    kept = (torch.where(went.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in zip(moved, point, strict=True))
    return Point(*kept), accepted


def leapfrogs(energy: Energy, point: Point, momentum: Tensor, size: Tensor, steps: int) -> tuple[Point, Tensor]:
    """(point, momentum) after `steps` leapfrog steps of these sizes (M,)."""
    size = size.unsqueeze(1)
    momentum = momentum - size / 2 * point.gradient
    for number in range(steps):
        position = point.position + size * momentum
        point = Point(position, *energy(position))
        momentum = momentum - (size if number + 1 < steps else size / 2) * point.gradient
    return point, momentum


def log_ratio(before: Point, momentum: Tensor, after: Point, end: Tensor) -> Tensor:
    """(M,) decrease of the total energy; −∞ if it is not finite."""
    fallen = before.energy - after.energy + (momentum.square() - end.square()).sum(1) / 2
    return torch.where(fallen.isfinite(), fallen, -math.inf)


def first_step_size(energy: Energy, point: Point, generators: Sequence[torch.Generator]) -> Tensor:
    """(M,) step sizes, powers of two, at which the acceptance of one step crosses ½; dual averaging starts there."""
    momentum, _, _ = _random(point.position, generators)
    size = torch.ones_like(point.energy)

    def above(size: Tensor) -> Tensor:
        return log_ratio(point, momentum, *leapfrogs(energy, point, momentum, size, 1)) > -math.log(2)

    up = above(size)
    moving = torch.ones_like(up)
    for _ in range(50):
        size = torch.where(moving, torch.where(up, 2 * size, size / 2), size)
        moving &= above(size) == up
        if not moving.any():
            break
    return size


class StepSizes:
    """Dual averaging of M log step sizes towards a probability of acceptance; Hoffman & Gelman's eq. (6) and constants."""

    def __init__(self, first: Tensor, target: float) -> None:
        self.target = target
        self.shrunk_to = (10 * first).log()
        self.current, self.settled = first, first
        self.error, self.log_mean = torch.zeros_like(first), torch.zeros_like(first)
        self.count = 0

    def update(self, accepted: Tensor) -> None:
        """Updates the sizes by the probabilities of acceptance (M,) at the present sizes."""
        self.count += 1
        share = 1 / (self.count + 10)
        self.error = (1 - share) * self.error + share * (self.target - accepted)
        log_size = self.shrunk_to - math.sqrt(self.count) / 0.05 * self.error
        weight = self.count**-0.75
        self.log_mean = weight * log_size + (1 - weight) * self.log_mean
        self.current, self.settled = log_size.exp(), self.log_mean.exp()


def _random(like: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor, Tensor]:
    """(N(0, 1) (M, P), uniform (M,), uniform (M,)), each chain's from its own generator."""
    normal, uniform = torch.empty_like(like), like.new_empty(len(like), 2)
    for chain, generator in enumerate(generators):
        normal[chain].normal_(generator=generator)
        uniform[chain].uniform_(generator=generator)
    return normal, uniform[:, 0], uniform[:, 1]
