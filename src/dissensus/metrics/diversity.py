"""Diversity of members and distances between predictives. Members are log-probabilities (M, N, C, …)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.metric_inputs import (
    check_no_nan,
    checked_mean,
    distributions,
    labelled_rows,
    nonempty_values,
    same_shape,
    targets_of,
)


def mixture_log_probabilities(members: Tensor) -> Tensor:
    """Log-probabilities of the mixture, (N, C, …): log (1/M) Σₘ pₘ from members' log-probabilities (M, N, C, …)."""
    return torch.logsumexp(members, dim=0) - math.log(members.shape[0])


class EnsembleGain(NamedTuple):
    """Decomposition of the ensemble's NLL: mixture_nll = member_nll − diversity."""

    mixture_nll: Tensor  # () of the mixture
    member_nll: Tensor  # () mean over members
    diversity: Tensor  # () ≥ 0: the gain by mixing


def ensemble_gain(members: Tensor, y: Tensor, *, ignore_index: int | None = None) -> EnsembleGain:
    """Splits the mixture's NLL into the members' mean NLL and the gain by mixing: an EnsembleGain of scalars, in nats.

    Of log-probabilities `members` (M, N, C, …) and class indices y (N, …), without places where y is `ignore_index`.
    """
    rows, labels = labelled_rows(members, y, ignore_index, class_axis=2, log=True)
    index = nonempty_values(labels).expand(len(rows), -1).unsqueeze(2)
    return ensemble_gain_of(rows.gather(2, index).squeeze(2))


def ensemble_gain_of(log_likelihood: Tensor) -> EnsembleGain:
    """EnsembleGain of scalars from log pₘ(yₙ) (M, N), for any likelihood.

    −log (1/M) Σₘ pₘ = −(1/M) Σₘ log pₘ − [log (1/M) Σₘ pₘ − (1/M) Σₘ log pₘ] at y: Jensen's gap is the diversity.
    """
    if log_likelihood.ndim != 2:
        raise ValueError(f"expected log-likelihoods (M, N), got {tuple(log_likelihood.shape)}; pass one row per member")
    check_no_nan(nonempty_values(log_likelihood), "log_likelihood")
    log_likelihood = log_likelihood.detach().double()
    mixture, member = mixture_log_probabilities(log_likelihood), log_likelihood.mean(0)  # (N,), (N,)
    gap = torch.where(mixture == member, 0.0, mixture - member)  # no gain if every member excludes y: −inf, −inf
    return EnsembleGain(-mixture.mean(), -member.mean(), gap.mean())


def disagreement(members: Tensor) -> Tensor:
    """() share of pairs of members (M, N, C, …), over all examples, whose most probable classes differ; 0 for a single one."""
    votes = distributions(members, class_axis=2, log=True).argmax(2)  # (M, n)
    m, classes = votes.shape[0], members.shape[2]
    count = torch.zeros(votes.shape[1], classes, dtype=torch.float64, device=votes.device)
    count.scatter_add_(1, votes.T, torch.ones_like(votes.T, dtype=torch.float64))  # (n, C) votes for every class
    return 1 - checked_mean((count * (count - 1)).sum(1)) / (m * (m - 1)) if m > 1 else checked_mean(0 * count)


def pairwise_kl(members: Tensor) -> Tensor:
    """(M, M) mean KL(p_i ‖ p_j) over examples, in nats; infinite if j excludes a class that i allows."""
    rows = nonempty_values(distributions(members, class_axis=2, log=True)).double()
    # One member against all at a time: at most (M, n, C) in memory.
    return torch.stack([torch.where(row.exp() > 0, row.exp() * (row - rows), 0.0).sum(2).mean(1) for row in rows])


def effective_members(members: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """() effective number of members, between 1 and M: as many members with independent errors would be as good.

    With eₘ the members' probabilities centred within each true class (over the examples of that class),

        M_eff = (1/M) Σₘ ‖eₘ‖² / ‖(1/M) Σₘ eₘ‖² = M / (1 + (M − 1) ρ̄),    ρ̄ = mean_{m≠n} ⟨eₘ, eₙ⟩ / mean_m ‖eₘ‖².

    This is the factor by which averaging reduces the variance that the label does not explain (Tumer and Ghosh, 1996).
    Identical members, or members without any variation within classes, give 1; members that are independent given the true
    class give M. Trained networks stay below M: all make mistakes on difficult examples. A negative ρ̄ counts as 0.
    """
    rows, labels = labelled_rows(members, y, ignore_index, class_axis=2, log=True)
    classes, group, count = torch.unique(nonempty_values(labels), return_inverse=True, return_counts=True)
    p = rows.double().exp()  # (M, n, C)
    class_mean = p.new_zeros(p.shape[0], len(classes), p.shape[2]).index_add(1, group, p) / count.unsqueeze(1)
    return _variance_ratio(p - class_mean[:, group], scale=p.square().mean())


def effective_members_regression(means: Tensor, y: Tensor) -> Tensor:
    """() `effective_members` for regression, between 1 and M, from means (M, N, D) or (M, N) and targets (N, D) or (N,).

    eₘ is the residual of member m's means after least squares on (1, y), as centring is least squares on one-hot labels.
    """
    check_no_nan(means, "means")
    targets = targets_of(means, y)
    n = len(targets)
    outputs = means.detach().double().reshape(len(means), n, -1)  # (M, N, D)
    design = torch.cat([targets.new_ones(n, 1), targets.reshape(n, -1)], dim=1)  # (N, 1 + D)
    basis, singular, _ = torch.linalg.svd(design, full_matrices=False)
    basis = basis[:, singular > 1e-12 * singular[0]]  # (N, rank): constant targets add nothing to the ones
    return _variance_ratio(outputs - basis @ (basis.T @ outputs), scale=outputs.square().mean())


def _variance_ratio(errors: Tensor, scale: Tensor) -> Tensor:
    """() mean square of errors (M, …) divided by the mean square of their mean over members, between 1 and M."""
    own, joint = errors.square().mean(), errors.mean(0).square().mean()
    # Below (1e-12)² of the outputs' scale there are only rounding errors.
    return torch.where(own > 1e-24 * scale, own / joint, 1.0).clamp(1, errors.shape[0])


# Distances between two predictives, for example to a reference: Izmailov, Vikram, Hoffman & Wilson, "What are Bayesian neural
# network posteriors really like?", ICML 2021, section 4.


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
    pairs = [same_shape(means=m, variances=v) for m, v in ((means, variances), (reference_means, reference_variances))]
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
