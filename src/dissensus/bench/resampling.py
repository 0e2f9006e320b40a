"""Metrics of many resamples at once. A resample is a row of weights: how often each example was drawn.

Every function takes weights (R, n) with the arrays (n,) they belong to, and gives (R,): the metric of `dissensus.metrics`
on each resample, ties included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dissensus.metrics.calibration import confidence_bin


def draw_weights(count: int, resamples: int, generator: torch.Generator) -> Tensor:
    """(R, n) how often each of n examples is drawn in each resample, n draws with replacement."""
    index = torch.randint(count, (resamples, count), generator=generator)
    return torch.zeros(resamples, count, dtype=torch.float64).scatter_add_(
        1, index, torch.ones((), dtype=torch.float64).expand_as(index)
    )


def mean(weights: Tensor, values: Tensor) -> Tensor:
    """(R,) mean of values."""
    return weights @ values.double() / weights.sum(1)


def root_mean(weights: Tensor, squared: Tensor) -> Tensor:
    """(R,) root of the mean of squared errors."""
    return mean(weights, squared).sqrt()


def ece(weights: Tensor, confidence: Tensor, correct: Tensor, *, bins: int = 15) -> Tensor:
    """(R,) Σ_k |Σ_{i in k} w_i (correct_i − confidence_i)| / n."""
    gap = correct.double() - confidence.double()
    return _grouped(weights * gap, confidence_bin(confidence, bins), bins).abs().sum(1) / weights.sum(1)


def aurc(weights: Tensor, score: Tensor, correct: Tensor) -> Tensor:
    """(R,) area under the risk–coverage curve, surest (lowest score) first; loss is 1 − correct.

    A group of w equal scores with mean loss l, after W examples of summed loss L, adds Σ_{j=1…w} (L + j l)/(W + j)
    = w l + (L − l W)(H_{W+w} − H_W), H the harmonic numbers.
    """
    group = torch.unique(score, return_inverse=True)[1]
    groups = int(group.max()) + 1
    taken = _grouped(weights, group, groups)  # (R, K) w
    lost = _grouped(weights * (1 - correct.double()), group, groups)  # (R, K) w l
    before, lost_before = taken.cumsum(1) - taken, lost.cumsum(1) - lost  # W, L
    n = round(float(weights[0].sum()))
    harmonic = torch.cat([torch.zeros(1), (1 / torch.arange(1, n + 1, dtype=torch.float64)).cumsum(0)]).double()
    rise = harmonic[(before + taken).long()] - harmonic[before.long()]
    loss = torch.where(taken > 0, lost / taken, 0.0)
    return (lost + (lost_before - loss * before) * rise).sum(1) / n


def auroc(weights_in: Tensor, weights_ood: Tensor, score_in: Tensor, score_ood: Tensor) -> Tensor:
    """(R,) P(OOD scores higher) + ½ P(equal)."""
    inside, ood = _ranked(weights_in, weights_ood, score_in, score_ood)
    below = inside.cumsum(1) - inside / 2  # strictly lower, and half of the equal ones
    return (ood * below).sum(1) / (inside.sum(1) * ood.sum(1))


def aupr(weights_in: Tensor, weights_ood: Tensor, score_in: Tensor, score_ood: Tensor) -> Tensor:
    """(R,) average precision with OOD positive."""
    false, true = _flagged(weights_in, weights_ood, score_in, score_ood)
    found = torch.diff(true, dim=1, prepend=torch.zeros_like(true[:, :1]))
    precision = torch.where(true > 0, true / (true + false), 0.0)
    return (found * precision).sum(1) / true[:, -1]


def fpr95(weights_in: Tensor, weights_ood: Tensor, score_in: Tensor, score_ood: Tensor) -> Tensor:
    """(R,) share of in-distribution inputs flagged when at least 95 % of OOD are."""
    false, true = _flagged(weights_in, weights_ood, score_in, score_ood)
    reached = (true / true[:, -1:] < 0.95).sum(1, keepdim=True)
    return (false / false[:, -1:]).gather(1, reached).squeeze(1)


def _flagged(weights_in: Tensor, weights_ood: Tensor, score_in: Tensor, score_ood: Tensor) -> tuple[Tensor, Tensor]:
    """(R, K) in-distribution and OOD inputs at or above the k-th highest score."""
    inside, ood = _ranked(weights_in, weights_ood, score_in, score_ood)
    return inside.flip(1).cumsum(1), ood.flip(1).cumsum(1)


def _ranked(weights_in: Tensor, weights_ood: Tensor, score_in: Tensor, score_ood: Tensor) -> tuple[Tensor, Tensor]:
    """(R, K) in-distribution and OOD weights at each distinct score, lowest first."""
    group = torch.unique(torch.cat([score_in, score_ood]), return_inverse=True)[1]
    groups = int(group.max()) + 1
    return (
        _grouped(weights_in, group[: len(score_in)], groups),
        _grouped(weights_ood, group[len(score_in) :], groups),
    )


def _grouped(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """(R, K) sums of values (R, n) by group (n,)."""
    return values.new_zeros(len(values), groups).index_add_(1, group, values)
