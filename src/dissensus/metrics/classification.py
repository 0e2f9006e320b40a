"""Metrics of class probabilities: accuracy, proper scores, intersection over union and calibration errors.

Probabilities are (N, C), or (N, C, H, W) for pixels; y holds class indices (N,) or (N, H, W). Places where y equals
`ignore_index` are void and left out. The `…_values` functions return one number per example, for bootstrap and tests.

A calibration error is the difference between confidence and accuracy, in 15 bins of equal width by default (Guo et al., 2017).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.metric_inputs import (
    checked_mean,
    checked_weights,
    class_indices,
    distributions,
    group_sums,
    labelled_rows,
    nonempty_values,
    soft_rows,
)
from dissensus.utils.checks import fraction, integer

SMOOTH_POINTS = 2**11


def accuracy(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """() share of examples whose most probable class is y; the first class wins ties.

    Args:
        probabilities: (N, C), or (N, C, H, W) for pixels; they must sum to one over classes.
        y: class indices (N,) or (N, H, W).
        ignore_index: label of void places, which are left out; None counts all places.
    """
    return checked_mean(accuracy_values(probabilities, y, ignore_index=ignore_index))


def accuracy_values(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """(n,) 1 if the most probable class is y, else 0, for each of n places that are not void."""
    rows, labels = labelled_rows(probabilities, y, ignore_index)
    return (rows.argmax(1) == labels).double()


def nll(log_probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """() mean negative log-likelihood −log p(y), in nats.

    Infinite if the true class has probability zero: nothing is clamped.

    Args:
        log_probabilities: (N, C) or (N, C, H, W) of the mixture, log (1/M) Σₘ pₘ (`mixture_log_probabilities`), not
            averaged logits.
        y, ignore_index: as in `accuracy`.
    """
    return checked_mean(nll_values(log_probabilities, y, ignore_index=ignore_index))


def nll_values(log_probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """(n,) −log p(y) per example, in nats; with soft labels y (N, C, …), the cross-entropy −Σ_c y_c log p_c."""
    if (soft := soft_rows(log_probabilities, y, log=True)) is not None:
        return -torch.where(soft[1] > 0, soft[1] * soft[0].double(), 0.0).sum(1)
    rows, labels = labelled_rows(log_probabilities, y, ignore_index, log=True)
    return -rows.gather(1, labels.unsqueeze(1)).squeeze(1).double()


def brier(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """() mean Brier score Σ_c (p_c − 1[c = y])², between 0 and 2; arguments as in `accuracy`.

    Sums over classes, as Brier defined it. Some papers, such as Deep Ensembles, divide by C.
    """
    return checked_mean(brier_values(probabilities, y, ignore_index=ignore_index))


def brier_values(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """(n,) Brier score Σ_c (p_c − 1[c = y])² per example; Σ_c (p_c − y_c)² with soft labels y (N, C, …)."""
    if (soft := soft_rows(probabilities, y)) is not None:
        return (soft[0].double() - soft[1]).square().sum(1)
    rows, labels = labelled_rows(probabilities, y, ignore_index)
    one = rows.new_ones(len(labels), 1, dtype=torch.float64)
    return rows.double().scatter_add(1, labels.unsqueeze(1), -one).square().sum(1)


class BrierDecomposition(NamedTuple):
    """Parts of the Brier score: brier = reliability − resolution + uncertainty + variance_within − covariance_within."""

    uncertainty: Tensor  # () of the labels only: Σ_c ō_c (1 − ō_c)
    resolution: Tensor  # () Σ_k n_k/n ‖ō_k − ō‖²: spread of the groups' label frequencies; more is better
    reliability: Tensor  # () Σ_k n_k/n ‖p̄_k − ō_k‖²: miscalibration of the groups
    variance_within: Tensor  # () (1/n) Σ_i ‖p_i − p̄_k(i)‖²
    covariance_within: Tensor  # () (2/n) Σ_i ⟨p_i − p̄_k(i), o_i − ō_k(i)⟩


def brier_decomposition(
    probabilities: Tensor, y: Tensor, *, bins: int | None = 15, ignore_index: int | None = None
) -> BrierDecomposition:
    """Splits the Brier score into calibration, resolution and uncertainty; for any grouping the parts add up to `brier`.

    Examples are grouped by predicted class and by `bins` equal-width bins of confidence; `bins=None` groups equal forecasts,
    without terms within groups (Murphy, 1973). These are those of Stephenson, Coelho and Jolliffe (2008), for vectors.
    """
    rows, labels = labelled_rows(probabilities, y, ignore_index)
    nonempty_values(labels)
    if bins is None:
        group = torch.unique(rows, dim=0, return_inverse=True)[1]
    else:
        confidence, prediction = rows.max(1)
        group = torch.unique(prediction * bins + confidence_bin(confidence, bins), return_inverse=True)[1]
    forecast = rows.double()  # (n, C) p_i
    outcome = torch.nn.functional.one_hot(labels, rows.shape[1]).double()  # (n, C) o_i
    count = torch.bincount(group).double().unsqueeze(1)  # (K, 1) n_k
    zeros = forecast.new_zeros(len(count), rows.shape[1])
    group_forecast = zeros.index_add(0, group, forecast) / count  # (K, C) p̄_k
    group_outcome = zeros.index_add(0, group, outcome) / count  # (K, C) ō_k
    base_rate = outcome.mean(0)  # (C,) ō
    share = count / count.sum()
    forecast_deviation = forecast - group_forecast[group]
    outcome_deviation = outcome - group_outcome[group]
    return BrierDecomposition(
        uncertainty=(base_rate * (1 - base_rate)).sum(),
        resolution=(share * (group_outcome - base_rate).square()).sum(),
        reliability=(share * (group_forecast - group_outcome).square()).sum(),
        variance_within=forecast_deviation.square().sum(1).mean(),
        covariance_within=2 * (forecast_deviation * outcome_deviation).sum(1).mean(),
    )


def miou(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """() mean intersection over union, pooled over all places, of the classes that occur; arguments as in `accuracy`."""
    rows, labels = labelled_rows(probabilities, y, ignore_index)
    nonempty_values(labels)
    return mean_of_present(intersection_over_union(_confusion(rows.argmax(1), labels, rows.shape[1])))


def intersection_over_union(confusion: Tensor) -> Tensor:
    """(C,) intersection over union TP / (TP + FP + FN) from a confusion matrix (C, C); NaN for an absent class."""
    hits = confusion.diagonal().double()
    return hits / (confusion.sum(0) + confusion.sum(1) - hits)


def mean_of_present(values: Tensor) -> Tensor:
    """() mean of the entries that are not NaN."""
    return checked_mean(values[~values.isnan()])


def confusion_matrix(prediction: Tensor, y: Tensor, *, classes: int, ignore_index: int | None = None) -> Tensor:
    """(C, C) counts: row = true class, column = predicted class; prediction and y are class indices of one shape."""
    if ignore_index is not None and prediction.shape == y.shape:
        prediction = prediction.where(y != ignore_index, 0)  # predictions at void places do not matter
    predicted, _ = class_indices("prediction", prediction, y.shape, classes)
    labels, keep = class_indices("y", y, y.shape, classes, ignore_index)
    if keep is not None:
        predicted, labels = predicted[keep], labels[keep]
    return _confusion(predicted, labels, classes)


def _confusion(prediction: Tensor, y: Tensor, classes: int) -> Tensor:
    return torch.bincount(y * classes + prediction, minlength=classes**2).reshape(classes, classes)


def ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """Expected calibration error (): Σ_k n_k/n |accuracy_k − confidence_k| over non-empty bins of the largest probability.

    Args:
        probabilities, y, ignore_index: as in `accuracy`.
        bins: number of equal-width bins, K.
    """
    return confidence_ece(*_top_class(probabilities, y, ignore_index), bins=bins)


def confidence_ece(confidence: Tensor, correct: Tensor, *, bins: int = 15, weights: Tensor | None = None) -> Tensor:
    """`ece` () or (...) from confidences (n,) and correctness (n,); weights (..., n): how often each example counts."""
    return ece_from_sums(*bin_sums(confidence, correct, bins, weights))


def adaptive_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() `ece` over bins of equal mass (Nguyen and O'Connor, 2015): bin sizes differ by at most one example.

    Examples of equal confidence in different bins count with their mean accuracy. Arguments as in `ece`.
    """
    confidence, correct = _top_class(probabilities, y, ignore_index)
    distinct, group, count = torch.unique(confidence, return_inverse=True, return_counts=True)
    return adaptive_ece_from_sums(distinct, count, correct.new_zeros(len(distinct)).index_add(0, group, correct), bins)


def adaptive_ece_from_sums(confidence: Tensor, count: Tensor, correct: Tensor, bins: int = 15) -> Tensor:
    """() `adaptive_ece` of groups (K,) of ascending confidence, their sizes and their numbers of right answers."""
    taken, gap = count.cumsum(0), correct - count * confidence.double()
    ends = -(-torch.arange(integer("bins", bins) + 1, device=taken.device) * taken[-1] // bins)  # examples before each
    at = torch.searchsorted(taken, ends)  # the group that holds the end
    sums = (gap.cumsum(0) - gap)[at] + (ends - taken[at] + count[at]) * (gap / count)[at]
    return sums.diff().abs().sum() / taken[-1]


def smooth_ece(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """() calibration error without bins (Błasiok and Nakkiran, 2023), to 1e-6; arguments as in `ece`.

    The σ with σ = ∫₀¹ |(1/n) Σ_i (correct_i − confidence_i) K_σ(t, confidence_i)| dt, K_σ the Gaussian reflected at 0 and 1.
    """
    confidence, correct = _top_class(probabilities, y, ignore_index)
    return smooth_ece_from_gaps(confidence, (correct - confidence) / len(correct))


def smooth_ece_from_gaps(confidence: Tensor, gap: Tensor) -> Tensor:
    """() `smooth_ece` of confidences (K,) and what each adds to accuracy less confidence (K,)."""
    place = confidence.double().clamp(0, 1) * SMOOTH_POINTS
    left = place.long().clamp(max=SMOOTH_POINTS - 1)  # each gap is split between two points
    sums = gap.new_zeros(SMOOTH_POINTS + 1).index_add(0, left, gap * (left + 1 - place))
    sums = sums.index_add(0, left + 1, gap * (place - left))
    # even, of period 2
    waves = torch.fft.rfft(torch.cat([sums[:1], sums[1:-1] / 2, sums[-1:], sums[1:-1].flip(0) / 2]))
    frequency = torch.pi * torch.arange(len(waves), dtype=torch.float64, device=waves.device)
    low, high = 0.0, 1.0
    for _ in range(20):  # the integral falls with σ
        width = (low + high) / 2
        # over [0, 2]: both halves count
        smooth = torch.fft.irfft(waves * (-0.5 * (width * frequency) ** 2).exp()).abs()
        low, high = (width, high) if smooth.sum() > width else (low, width)
    return gap.new_tensor(high)


def classwise_ece(probabilities: Tensor, y: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> Tensor:
    """() calibration error of each class's probability, averaged over classes (Kull et al., 2019); arguments as in `ece`."""
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
    estimate of the sampling variance of accuracy_k; a bin with one example has none and contributes nothing.
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
    return reliability_from_sums(*bin_sums(*_top_class(probabilities, y, ignore_index), bins))


def reliability_from_sums(counts: Tensor, confidence: Tensor, correct: Tensor) -> ReliabilityBins:
    """The bins from the results of `bin_sums`."""
    edges = torch.arange(len(counts) + 1, dtype=torch.float64, device=counts.device) / len(counts)
    return ReliabilityBins(counts, confidence / counts, correct / counts, edges)


def confidence_bin(confidence: Tensor, bins: int) -> Tensor:
    """Index of the bin (k/bins, (k+1)/bins] of every confidence, 0 in the first; edges in the dtype of confidences."""
    edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    return torch.bucketize(confidence.contiguous(), edges.to(confidence.dtype))


def bin_sums(
    confidence: Tensor, correct: Tensor, bins: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, sums of confidence and of correctness per bin, (..., K) each; weights (..., n): how often each example counts."""
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
