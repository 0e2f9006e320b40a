"""Mixtures of Gaussians over the latents of nodes, as numbers: cross-entropy, bounds on the entropy, KL divergences.

    q(z) = (1/K) Σ_k N(z; μ_k, diag σ_k²),    p(z) = N(z; 1, s² I)

with one component index for the latents of all layers (Trinh et al., "Tackling covariate shift with node-based Bayesian neural
networks", ICML 2022). μ and σ are (K, D), D counting the latents of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

EXACT = 1 / 4  # of (μ_k − μ_r)² / (σ_k² + σ_r²) in the Bhattacharyya distance
RELEASED = 1 / 16  # what the authors' code has in its place: still a lower bound, a looser one


def cross_entropy(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """() H[q, p] = (1/K) Σ_k Σ_d [½ log 2πs² + ((μ − 1)² + σ²) / 2s²]."""
    constant = 0.5 * math.log(2 * math.pi * prior_std**2) * mean.shape[1]
    return constant + ((mean - 1).square() + std.square()).sum() / (2 * prior_std**2 * len(mean))


def component_entropies(std: Tensor) -> Tensor:
    """(K,) H[q_k] = Σ_d ½ log 2πe σ²."""
    return 0.5 * math.log(2 * math.pi * math.e) * std.shape[1] + std.log().sum(1)


def bhattacharyya(mean: Tensor, std: Tensor, *, factor: float = EXACT) -> Tensor:
    """(K, K, D) −log ∫ √(q_k q_r) in every dimension; their sum over d is that of the whole.

    factor (μ_k − μ_r)² / (σ_k² + σ_r²) + ½ log (σ_k² + σ_r²) / (2 σ_k σ_r)
    """
    both = std.square()[:, None] + std.square()[None]  # (K, K, D)
    log_std = std.log()
    apart = (mean[:, None] - mean[None]).square() / both
    return factor * apart + 0.5 * (both.log() - math.log(2.0) - log_std[:, None] - log_std[None])


def entropy_bound(mean: Tensor, std: Tensor, *, widths: Sequence[int] | None = None, factor: float = EXACT) -> Tensor:
    """() a lower bound on H[q] (Kolchinsky & Tracey 2017):

        Ĥ = (1/K) Σ_k H[q_k] − (1/K) Σ_k log (1/K) Σ_r BC(q_k, q_r)

    `widths`: latents of each layer, to bound each layer's mixture alone and add up, as the authors' code does. The log K that
    distinct components earn then counts once for every layer: it is no bound on the entropy of the joint mixture any more.
    """
    single = component_entropies(std).mean()
    if len(mean) == 1:
        return single
    distance = bhattacharyya(mean, std, factor=factor)
    parts = [distance] if widths is None else distance.split_with_sizes(list(widths), dim=2)
    log_overlap = torch.stack([torch.logsumexp(-part.sum(2), dim=1) - math.log(len(mean)) for part in parts])
    return single - log_overlap.mean(1).sum()


def surrogate_kl(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """() KL(N(mean_k μ_k, Σ_k σ_k² / K²) ‖ N(1, s²)), summed over latents: iBNN's, from its authors' code.

    The Gaussian of the components' average, not of their mixture: components may spread as long as their mean stays at 1. No
    bound on the mixture's KL.
    """
    centre, variance = mean.mean(0), std.square().sum(0) / len(std) ** 2
    ratio = variance / prior_std**2
    return 0.5 * ((centre - 1).square() / prior_std**2 + ratio - 1 - ratio.log()).sum()


def raw_std(std: Tensor) -> Tensor:
    """ρ with softplus(ρ) = σ."""
    return std + torch.log(-torch.expm1(-std))
