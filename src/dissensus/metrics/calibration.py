"""Calibration errors: how far confidence is from accuracy.

Bins are equal-width, left-open and right-closed, 15 by default (Guo et al., 2017): a confidence on an edge belongs to
the lower bin, a confidence of exactly 1 to the last one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.checks import distributions, labelled, not_empty
from dissensus.metrics.weights import group_sums, weighted
from dissensus.numerics.checks import share, whole


def ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() Σ_k n_k/n |accuracy_k − confidence_k| over the bins that hold something; confidence = largest probability.

    Args:
        probabilities: (N, C), or (N, C, H, W) for pixels.
        y: class indices (N,) or (N, H, W).
        bins: K, of equal width.
        ignore_index: the label of void places, which are left out; None counts all.
    """
    return confidence_ece(*_top_class(probabilities, y, ignore_index), bins=bins)


def confidence_ece(confidence: Tensor, correct: Tensor, *, bins: int = 15, weights: Tensor | None = None) -> Tensor:
    """() or (...) the same of confidences (n,) and correctness (n,); weights (..., n): how often each example counts."""
    return ece_from_sums(*bin_sums(confidence, correct, bins, weights))


def adaptive_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() `ece` over bins of equal mass (Nguyen and O'Connor, 2015): sizes differ by at most one example.

    Examples of equal confidence that fall on both sides of a bin's end count with their common accuracy, so the order
    of the examples does not matter. Arguments as in `ece`.
    """
    confidence, correct = _top_class(probabilities, y, ignore_index)
    distinct, group, count = torch.unique(confidence, return_inverse=True, return_counts=True)
    accuracy = correct.new_zeros(len(distinct)).index_add(0, group, correct) / count
    group = group.sort().values  # ascending confidence
    gap: Tensor = accuracy[group] - distinct[group].double()
    index = torch.arange(len(gap), device=gap.device) * whole("bins", bins) // len(gap)
    return gap.new_zeros(bins).index_add(0, index, gap).abs().sum() / len(gap)


def classwise_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() mean over classes of the binned error between p_c and the frequency of class c (Kull et al., 2019).

    Arguments as in `ece`.
    """
    rows, labels = labelled(probabilities, y, ignore_index)
    not_empty(labels)
    n, classes = rows.shape
    index = confidence_bin(rows, whole("bins", bins)) + bins * torch.arange(classes, device=rows.device)
    gap = rows.double() - torch.nn.functional.one_hot(labels, classes)
    return gap.new_zeros(classes * bins).index_add(0, index.flatten(), gap.flatten()).abs().sum() / (n * classes)


def debiased_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() root of `debiased_squared_ece`, or zero where that is negative; an L2 error, unlike `ece`."""
    return debiased_squared_ece(probabilities, y, bins=bins, ignore_index=ignore_index).clamp_min(0).sqrt()


def debiased_squared_ece(
    probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None
) -> Tensor:
    """() Σ_k n_k/n [(accuracy_k − confidence_k)² − accuracy_k (1 − accuracy_k)/(n_k − 1)] (Kumar, Liang, Ma, 2019).

    The subtracted term is the unbiased estimate of the sampling variance of accuracy_k; without it a perfectly
    calibrated model has a positive error on finite data. The result may be negative. A bin with one example has no
    variance estimate and contributes nothing.
    """
    count, confidence, accuracy, _ = reliability_bins(probabilities, y, bins=bins, ignore_index=ignore_index)
    several = count > 1
    share, spare = (count / count.sum())[several], (count - 1)[several]
    confidence, accuracy = confidence[several], accuracy[several]
    return (share * ((accuracy - confidence).square() - accuracy * (1 - accuracy) / spare)).sum()


def union_ece(
    probabilities: Tensor,
    y: Tensor,
    ood_probabilities: Tensor,
    *,
    bins: int = 15,
    prevalence: float | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """() ECE of in-distribution and OOD inputs together, where every answer to an OOD input counts as wrong.

    This is the ECE of TRADI's out-of-distribution tables (Franchi et al., 2020): it punishes confidence on OOD inputs,
    and grows with their share. ood_probabilities: (N', C) or (N', C, H, W). prevalence: the error as it would be if OOD
    were that share of the data; None takes the inputs as they are.
    """
    confidence, correct = _top_class(probabilities, y, ignore_index)
    ood = not_empty(distributions(ood_probabilities, class_axis=1, log=False)).amax(1).to(confidence.dtype)
    part = len(ood) / (len(ood) + len(confidence)) if prevalence is None else share("prevalence", prevalence)
    inside, outside = bin_sums(confidence, correct, bins), bin_sums(ood, ood.new_zeros(len(ood)), bins)
    mixed = ((1 - part) * i / len(confidence) + part * o / len(ood) for i, o in zip(inside, outside, strict=True))
    return ece_from_sums(*mixed)


class ReliabilityBins(NamedTuple):
    """What a reliability diagram shows, for K bins."""

    counts: Tensor  # (K,) examples
    confidence: Tensor  # (K,) mean confidence, NaN in an empty bin
    accuracy: Tensor  # (K,) share of right answers, NaN in an empty bin
    edges: Tensor  # (K + 1,)


def reliability_bins(
    probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None
) -> ReliabilityBins:
    """ReliabilityBins: counts, mean confidence and accuracy (K,) of every bin, and the edges (K + 1,).

    Arguments as in `ece`.
    """
    counts, confidence, correct = bin_sums(*_top_class(probabilities, y, ignore_index), bins)
    edges = torch.arange(bins + 1, dtype=torch.float64, device=counts.device) / bins
    return ReliabilityBins(counts, confidence / counts, correct / counts, edges)


def confidence_bin(confidence: Tensor, bins: int) -> Tensor:
    """Index 0…bins−1 of the equal-width bin (k/bins, (k+1)/bins] of every confidence, of the same shape.

    Left-open, right-closed: a value on an edge belongs to the lower bin, 1 to the last one, and 0 to the first. Edges
    are rounded to the confidences' own dtype, so 0.2 in float32 is on the edge 3/15 as it is in float64.
    """
    edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    return torch.bucketize(confidence.contiguous(), edges.to(confidence.dtype))


def bin_sums(
    confidence: Tensor, correct: Tensor, bins: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(..., K) count, sum of confidence and sum of correctness per bin: all that the ECE depends on.

    weights (..., n): how often each example counts; None counts each once, and the first axes are then not there.
    """
    index = confidence_bin(confidence, whole("bins", bins))
    sums = confidence.double(), correct.double()
    if weights is None:
        count = torch.bincount(index, minlength=bins)
    else:
        w = weighted(weights, len(confidence))
        count, sums = group_sums(w, index, bins), (w * sums[0], w * sums[1])
    return count, group_sums(sums[0], index, bins), group_sums(sums[1], index, bins)


def ece_from_sums(counts: Tensor, confidence: Tensor, correct: Tensor) -> Tensor:
    """(...) ECE from what `bin_sums` returns: n_k |accuracy_k − confidence_k| is |Σ correct − Σ confidence|."""
    return (correct - confidence).abs().sum(-1) / counts.sum(-1)


def _top_class(probabilities: Tensor, y: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """(n,) confidence in the given dtype and (n,) correctness in float64."""
    rows, labels = labelled(probabilities, y, ignore_index)
    confidence, prediction = rows.max(1)
    return not_empty(confidence), (prediction == labels).double()
