"""Calibration errors: the difference between confidence and accuracy.

Bins are equal-width, left-open and right-closed, 15 by default (Guo et al., 2017): a confidence on an edge belongs to
the lower bin, a confidence of exactly 1 to the last bin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.metric_inputs import checked_weights, distributions, group_sums, labelled_rows, nonempty_values
from dissensus.utils.checks import fraction, integer


def ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """Expected calibration error (): Σ_k n_k/n |accuracy_k − confidence_k| over non-empty bins of the largest probability.

    Args:
        probabilities: (N, C), or (N, C, H, W) for pixels.
        y: class indices (N,) or (N, H, W).
        bins: number of equal-width bins, K.
        ignore_index: label of void places, which are left out; None counts all places.
    """
    return confidence_ece(*_top_class(probabilities, y, ignore_index), bins=bins)


def confidence_ece(confidence: Tensor, correct: Tensor, *, bins: int = 15, weights: Tensor | None = None) -> Tensor:
    """`ece` () or (...) from confidences (n,) and correctness (n,); weights (..., n): how often each example counts."""
    return ece_from_sums(*bin_sums(confidence, correct, bins, weights))


def adaptive_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() `ece` over bins of equal mass (Nguyen and O'Connor, 2015): bin sizes differ by at most one example.

    Examples of equal confidence in different bins count with their mean accuracy, so the order of the examples does not
    matter. Arguments as in `ece`.
    """
    confidence, correct = _top_class(probabilities, y, ignore_index)
    distinct, group, count = torch.unique(confidence, return_inverse=True, return_counts=True)
    accuracy = correct.new_zeros(len(distinct)).index_add(0, group, correct) / count
    group = group.sort().values  # ascending confidence
    gap: Tensor = accuracy[group] - distinct[group].double()
    index = torch.arange(len(gap), device=gap.device) * integer("bins", bins) // len(gap)
    return gap.new_zeros(bins).index_add(0, index, gap).abs().sum() / len(gap)


def classwise_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() calibration error of each class's probability p_c, averaged over classes (Kull et al., 2019).

    Arguments as in `ece`.
    """
    rows, labels = labelled_rows(probabilities, y, ignore_index)
    nonempty_values(labels)
    n, classes = rows.shape
    index = confidence_bin(rows, integer("bins", bins)) + bins * torch.arange(classes, device=rows.device)
    gap = rows.double() - torch.nn.functional.one_hot(labels, classes)
    return gap.new_zeros(classes * bins).index_add(0, index.flatten(), gap.flatten()).abs().sum() / (n * classes)


def debiased_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() square root of `debiased_squared_ece`, or 0 if that is negative; an L2 error, unlike `ece`."""
    return debiased_squared_ece(probabilities, y, bins=bins, ignore_index=ignore_index).clamp_min(0).sqrt()


def debiased_squared_ece(
    probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None
) -> Tensor:
    """() Squared calibration error without the bias of finite samples (Kumar, Liang, Ma, 2019); may be negative.

    Σ_k n_k/n [(accuracy_k − confidence_k)² − accuracy_k (1 − accuracy_k)/(n_k − 1)]. The subtracted term is the unbiased
    estimate of the sampling variance of accuracy_k; without it a perfectly calibrated model has a positive error on finite
    data. A bin with one example has no variance estimate and contributes nothing.
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
    """() ECE of in-distribution and OOD inputs together; every answer to an OOD input counts as wrong.

    This is the ECE in TRADI's out-of-distribution tables (Franchi et al., 2020). It penalises confidence on OOD inputs and
    grows with their share.

    Args:
        probabilities, y, bins, ignore_index: as in `ece`.
        ood_probabilities: (N', C) or (N', C, H, W).
        prevalence: reweights the inputs so that OOD is this share of the data; None does not reweight.
    """
    confidence, correct = _top_class(probabilities, y, ignore_index)
    ood = nonempty_values(distributions(ood_probabilities, class_axis=1, log=False)).amax(1).to(confidence.dtype)
    part = len(ood) / (len(ood) + len(confidence)) if prevalence is None else fraction("prevalence", prevalence)
    inside, outside = bin_sums(confidence, correct, bins), bin_sums(ood, ood.new_zeros(len(ood)), bins)
    mixed = ((1 - part) * i / len(confidence) + part * o / len(ood) for i, o in zip(inside, outside, strict=True))
    return ece_from_sums(*mixed)


class ReliabilityBins(NamedTuple):
    """The data of a reliability diagram with K bins."""

    counts: Tensor  # (K,) examples
    confidence: Tensor  # (K,) mean confidence, NaN in an empty bin
    accuracy: Tensor  # (K,) share of right answers, NaN in an empty bin
    edges: Tensor  # (K + 1,)


def reliability_bins(
    probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None
) -> ReliabilityBins:
    """Data of a reliability diagram: counts, mean confidence and accuracy (K,) of every bin, and the edges (K + 1,).

    Arguments as in `ece`.
    """
    counts, confidence, correct = bin_sums(*_top_class(probabilities, y, ignore_index), bins)
    edges = torch.arange(bins + 1, dtype=torch.float64, device=counts.device) / bins
    return ReliabilityBins(counts, confidence / counts, correct / counts, edges)


def confidence_bin(confidence: Tensor, bins: int) -> Tensor:
    """Index 0…bins−1 of the equal-width bin (k/bins, (k+1)/bins] of every confidence; same shape.

    Left-open, right-closed: a value on an edge belongs to the lower bin, 1 to the last bin, and 0 to the first. Edges
    are rounded to the dtype of the confidences, so 0.2 lies on the edge 3/15 in float32 as in float64.
    """
    edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    return torch.bucketize(confidence.contiguous(), edges.to(confidence.dtype))


def bin_sums(
    confidence: Tensor, correct: Tensor, bins: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, sum of confidence and sum of correctness per bin, (..., K) each: sufficient statistics of the ECE.

    weights (..., n): how often each example counts; None counts each once, and results are then (K,).
    """
    index = confidence_bin(confidence, integer("bins", bins))
    sums = confidence.double(), correct.double()
    if weights is None:
        count = torch.bincount(index, minlength=bins)
    else:
        w = checked_weights(weights, len(confidence))
        count, sums = group_sums(w, index, bins), (w * sums[0], w * sums[1])
    return count, group_sums(sums[0], index, bins), group_sums(sums[1], index, bins)


def ece_from_sums(counts: Tensor, confidence: Tensor, correct: Tensor) -> Tensor:
    """(...) ECE from the results of `bin_sums`: n_k |accuracy_k − confidence_k| is |Σ correct − Σ confidence|."""
    return (correct - confidence).abs().sum(-1) / counts.sum(-1)


def _top_class(probabilities: Tensor, y: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """(n,) confidence in the given dtype and (n,) correctness in float64."""
    rows, labels = labelled_rows(probabilities, y, ignore_index)
    confidence, prediction = rows.max(1)
    return nonempty_values(confidence), (prediction == labels).double()
