"""How well a score separates OOD from in-distribution inputs.

Every function takes (score_in, score_ood), any shapes, higher = more OOD; OOD is the positive class. Thresholds are
distinct scores, so ties are handled exactly. Use `max_probability_score` and the other scores rather than probabilities:
a float32 softmax saturates at 1, which makes ties.

weights=(of score_in, of score_ood), (..., N) and (..., N'): how often each input counts, as in a bootstrap; the result
then has the leading axes. None counts every input once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.checks import no_nan, scores
from dissensus.metrics.ranked_counts import PairOfWeights, RankedCounts, Rule, ranked_counts


def auroc(score_in: Tensor, score_ood: Tensor, *, weights: PairOfWeights | None = None) -> Tensor:
    """() or (...) area under the ROC curve: P(OOD scores higher) + ½ P(equal).

    Args:
        score_in, score_ood: scores of in-distribution and OOD inputs, any shapes, higher = more OOD.
        weights: (of score_in, of score_ood), (..., N) and (..., N'): how often each input counts, as in a bootstrap;
            the result then has the leading axes. None counts each once.
    """
    return _counts(score_in, score_ood, weights).auroc()


def aupr(score_in: Tensor, score_ood: Tensor, *, weights: PairOfWeights | None = None) -> Tensor:
    """() or (...) average precision with OOD as the positive class; chance level is the share of OOD in the data.

    Arguments as in `auroc`.
    """
    return _counts(score_in, score_ood, weights).aupr()


def aupr_in(score_in: Tensor, score_ood: Tensor, *, weights: PairOfWeights | None = None) -> Tensor:
    """() or (...) average precision with in-distribution as the positive class (low scores); arguments as in `auroc`."""
    return _counts(score_in, score_ood, weights).swapped().aupr()


def aupr_adjusted(
    score_in: Tensor, score_ood: Tensor, *, prevalence: float = 0.5, weights: PairOfWeights | None = None
) -> Tensor:
    """() or (...) average precision, reweighted so that OOD is a share `prevalence` of the data; OOD is positive.

    precision = π·TPR / (π·TPR + (1 − π)·FPR). Comparable between sets of different sizes; chance level is `prevalence`.
    Other arguments as in `auroc`.
    """
    return _counts(score_in, score_ood, weights).aupr(prevalence)


def fpr95(
    score_in: Tensor,
    score_ood: Tensor,
    *,
    recall: float = 0.95,
    rule: Rule = "at_least",
    weights: PairOfWeights | None = None,
) -> Tensor:
    """() or (...) false positive rate at 95 % recall: share of in-distribution inputs flagged if 95 % of OOD inputs are.

    Args:
        score_in, score_ood, weights: as in `auroc`.
        recall: share of OOD inputs that must be flagged, 0.95 by default.
        rule: "at_least": the highest threshold with at least that recall; "nearest": the threshold with the nearest
            recall, above or below, as in the released anomaly-segmentation code (Hendrycks et al., 2019).
    """
    return _counts(score_in, score_ood, weights).fpr(recall, rule)


def fpr95_in(
    score_in: Tensor,
    score_ood: Tensor,
    *,
    recall: float = 0.95,
    rule: Rule = "at_least",
    weights: PairOfWeights | None = None,
) -> Tensor:
    """() or (...) share of OOD inputs accepted if 95 % of in-distribution inputs are; arguments as in `fpr95`."""
    return _counts(score_in, score_ood, weights).swapped().fpr(recall, rule)


class RocCurve(NamedTuple):
    """ROC points in order of decreasing threshold, from (0, 0) to (1, 1)."""

    fpr: Tensor  # (K + 1,)
    tpr: Tensor  # (K + 1,)
    thresholds: Tensor  # (K + 1,) flagged when score ≥ threshold; the first is +inf


def roc_curve(score_in: Tensor, score_ood: Tensor) -> RocCurve:
    """RocCurve with one point per distinct score; scores as in `auroc`."""
    thresholds, counts = ranked_counts(*scores(score_in, score_ood))
    fpr, tpr = counts.rates()
    return RocCurve(_prepend(0.0, fpr), _prepend(0.0, tpr), _prepend(float("inf"), thresholds))


class PrecisionRecallCurve(NamedTuple):
    """Precision and recall in order of decreasing threshold, from recall 0 (where precision is set to 1) to recall 1."""

    precision: Tensor  # (K + 1,)
    recall: Tensor  # (K + 1,)
    thresholds: Tensor  # (K + 1,) flagged when score ≥ threshold; the first is +inf


def precision_recall_curve(score_in: Tensor, score_ood: Tensor) -> PrecisionRecallCurve:
    """PrecisionRecallCurve with one point per distinct score; OOD is positive, scores as in `auroc`."""
    thresholds, counts = ranked_counts(*scores(score_in, score_ood))
    recall = counts.rates()[1]
    return PrecisionRecallCurve(
        _prepend(1.0, counts.precision()), _prepend(0.0, recall), _prepend(float("inf"), thresholds)
    )


class PerImageOOD(NamedTuple):
    """Means over the images with both kinds of pixels."""

    auroc: Tensor  # ()
    aupr: Tensor  # ()
    fpr95: Tensor  # ()
    images: int  # number of images used


def per_image_ood(
    score: Tensor, ood: Tensor, *, void: Tensor | None = None, recall: float = 0.95, rule: Rule = "at_least"
) -> PerImageOOD:
    """OOD metrics of every image's pixels, averaged over images (PerImageOOD); pixels are not pooled.

    Images without OOD pixels, or with nothing else, are skipped: they have no ranking.

    Args:
        score: (N, H, W), higher = more OOD.
        ood: (N, H, W), True at OOD pixels.
        void: (N, H, W), True at pixels to leave out; None leaves none out.
        recall, rule: as in `fpr95`.
    """
    for name, mask in (("ood", ood), ("void", void)):
        if mask is None:
            continue
        if mask.dtype != torch.bool:
            raise TypeError(f"expected a boolean mask in {name}, got {mask.dtype}; pass for example labels == index")
        if mask.shape != score.shape:
            got = tuple(mask.shape)
            raise ValueError(f"expected {name} of shape {tuple(score.shape)}, got {got}; pass one entry per pixel")
    no_nan(score if void is None else score.masked_fill(void, 0), "score")
    results = []
    for i in range(len(score)):
        valid = torch.ones_like(ood[i]) if void is None else ~void[i]
        score_in, score_ood = score[i][valid & ~ood[i]], score[i][valid & ood[i]]
        if score_in.numel() and score_ood.numel():
            counts = _counts(score_in, score_ood)
            results.append(torch.stack([counts.auroc(), counts.aupr(), counts.fpr(recall, rule)]))
    if not results:
        raise ValueError(f"expected an image with both OOD and other pixels, got none of {len(score)}; check ood")
    means = torch.stack(results).mean(0)
    return PerImageOOD(means[0], means[1], means[2], len(results))


def _counts(score_in: Tensor, score_ood: Tensor, weights: PairOfWeights | None = None) -> RankedCounts:
    return ranked_counts(*scores(score_in, score_ood), weights)[1]


def _prepend(value: float, tail: Tensor) -> Tensor:
    return torch.cat([tail.new_full((1,), value), tail])
