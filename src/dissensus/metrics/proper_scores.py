"""Accuracy, proper scores and intersection over union of class probabilities.

Probabilities are (N, C), or (N, C, H, W) for pixels; y holds class indices (N,) or (N, H, W). Places where y equals
`ignore_index` are void and left out. The `…_values` functions return one number per example, for bootstrap and tests.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.calibration import confidence_bin
from dissensus.metrics.metric_inputs import checked_mean, class_indices, labelled_rows, nonempty_values


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
    """(n,) −log p(y) per example, in nats."""
    rows, labels = labelled_rows(log_probabilities, y, ignore_index, log=True)
    return -rows.gather(1, labels.unsqueeze(1)).squeeze(1).double()


def brier(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """() mean Brier score Σ_c (p_c − 1[c = y])², between 0 and 2; arguments as in `accuracy`.

    Sums over classes, as Brier defined it. Some papers, such as Deep Ensembles, divide by C.
    """
    return checked_mean(brier_values(probabilities, y, ignore_index=ignore_index))


def brier_values(probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """(n,) Brier score Σ_c (p_c − 1[c = y])² per example."""
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

    Examples are grouped by predicted class and by `bins` equal-width bins of confidence. `bins=None` groups equal
    forecasts, which makes both within-group terms zero (Murphy, 1973). The within-group terms are those of Stephenson,
    Coelho and Jolliffe (2008), written for vectors; the factor 2 is part of the covariance term.
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
    """() mean intersection over union of the classes, pooled over all places; absent classes are skipped.

    Arguments as in `accuracy`.
    """
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
