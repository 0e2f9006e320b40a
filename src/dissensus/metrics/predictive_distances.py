"""Distances between two predictives, for example to a reference.

Izmailov, Vikram, Hoffman & Wilson, "What are Bayesian neural network posteriors really like?", ICML 2021, section 4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dissensus.metrics.metric_inputs import checked_mean, distributions, nonempty_values, same_shape


def agreement(probabilities: Tensor, reference: Tensor) -> Tensor:
    """() share of inputs with the same most probable class under both probabilities, (N, C, …) each."""
    mine, theirs = _checked_pair(probabilities, reference)
    return checked_mean((mine.argmax(1) == theirs.argmax(1)).double())


def total_variation(probabilities: Tensor, reference: Tensor) -> Tensor:
    """() mean total variation ½ Σ_c |p_c − q_c| of probabilities (N, C, …): 0 if they are equal, at most 1."""
    return checked_mean(total_variation_values(probabilities, reference))


def total_variation_values(probabilities: Tensor, reference: Tensor) -> Tensor:
    """(n,) total variation ½ Σ_c |p_c − q_c| of every input."""
    mine, theirs = _checked_pair(probabilities, reference)
    return (mine.double() - theirs.double()).abs().sum(1) / 2


def mixture_total_variation(
    means: Tensor, variances: Tensor, reference_means: Tensor, reference_variances: Tensor
) -> Tensor:
    """() total variation ½ ∫ |p(y) − q(y)| dy of two mixtures of Gaussians, averaged over inputs and outputs.

    Args:
        means, variances: (M, N, D) of the first mixture's members.
        reference_means, reference_variances: (K, N, D) of the second mixture's members.
    """
    return mixture_total_variation_values(means, variances, reference_means, reference_variances).mean()


def mixture_total_variation_values(
    means: Tensor, variances: Tensor, reference_means: Tensor, reference_variances: Tensor
) -> Tensor:
    """(N, D) ½ ∫ |p(y) − q(y)| dy, by the trapezoidal rule with steps of at most ⅕ of the smallest standard deviation."""
    both = [(means, variances), (reference_means, reference_variances)]
    pairs = [same_shape(means=m, variances=v) for m, v in both]
    if pairs[0][0].shape[1:] != pairs[1][0].shape[1:]:
        got = f"{tuple(means.shape)} and {tuple(reference_means.shape)}"
        raise ValueError(f"expected means of the same N inputs and D outputs, got {got}; predict both on one x")
    lowest = torch.cat([m - 6 * v.sqrt() for m, v in pairs]).amin(0)  # (N, D)
    highest = torch.cat([m + 6 * v.sqrt() for m, v in pairs]).amax(0)
    least = torch.cat([v for _, v in pairs]).amin(0).sqrt()
    points = ((highest - lowest) / least * 5).amax(1).clamp(min=1000).ceil().long().tolist()  # of each input
    distances = []
    for row, count in enumerate(points):
        share = torch.linspace(0, 1, count, dtype=torch.float64, device=lowest.device)
        y = lowest[row] + share[:, None] * (highest - lowest)[row]  # (points, D)
        mine, theirs = (_density(y, m[:, row], v[:, row]) for m, v in pairs)
        distances.append(torch.trapezoid((mine - theirs).abs(), y, dim=0) / 2)
    return torch.stack(distances)


def _density(y: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """(points, D) density of a mixture with means (M, D)."""
    mean, variance = means[:, None], variances[:, None]
    parts = [  # at most (M, 1000, D) in memory
        (torch.exp(-((part - mean) ** 2) / (2 * variance)) / (2 * math.pi * variance).sqrt()).mean(0)
        for part in torch.split(y, 1000)
    ]
    return torch.cat(parts)


def _checked_pair(probabilities: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if probabilities.shape != reference.shape:
        got = f"{tuple(probabilities.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"expected probabilities of the same shape, got {got}; predict both on the same inputs")
    both = (distributions(each, class_axis=1, log=False) for each in (probabilities, reference))
    mine, theirs = map(nonempty_values, both)
    return mine, theirs
