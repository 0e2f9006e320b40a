"""Metrics of a ranking by scores: out-of-distribution detection, and selective prediction.

OOD is the positive class, with higher scores; ties are handled exactly. Scores come from log-probabilities: a float32 softmax
saturates at 1, which makes ties. If the largest probability rounds to 1, −log max p is computed from the other classes as
−log(1 − Σ_{c ≠ max} p_c), accurate down to 1e-300.

Selective prediction refuses the least confident examples. Confidence is any score, higher = more certain; loss is any number
per example, such as 0/1 errors. Examples of equal confidence count with their mean loss, the expectation over random orders.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.diversity import mixture_log_probabilities
from dissensus.metrics.metric_inputs import (
    check_no_nan,
    checked_weights,
    distributions,
    group_sums,
    same_shape,
    score_pair,
)
from dissensus.utils.arrays import tensor_of
from dissensus.utils.checks import fraction, number, one_of


def max_probability_score(log_probabilities: Tensor) -> Tensor:
    """OOD score −log max p, (N,) or (N, H, W) in float64, of log-probabilities (N, C) or (N, C, H, W)."""
    shape = log_probabilities.shape
    return _surprise(distributions(log_probabilities, class_axis=1, log=True))[0].reshape(shape[0], *shape[2:])


def total_uncertainty(log_probabilities: Tensor) -> Tensor:
    """Entropy −Σ_c p_c log p_c in nats, (N,) or (N, H, W) in float64, of log-probabilities (N, C) or (N, C, H, W)."""
    shape = log_probabilities.shape
    surprise, others = _surprise(distributions(log_probabilities, class_axis=1, log=True))
    entropy: Tensor = torch.special.entr(others.double().exp()).sum(1) + surprise * (-surprise).exp()
    return entropy.reshape(shape[0], *shape[2:])


def epistemic_uncertainty(member_log_probabilities: Tensor) -> Tensor:
    """Mutual information (1/M) Σₘ KL(pₘ ‖ mixture) in nats, (N,) or (N, H, W) in float64, of members (M, N, C, …).

    It is the part of the mixture's entropy due to disagreement between members; between 0 and log M.
    """
    shape = member_log_probabilities.shape
    rows = distributions(member_log_probabilities, class_axis=2, log=True).double()  # (M, n, C)
    mixture = mixture_log_probabilities(rows)  # (n, C)
    p, q = rows.exp(), mixture.exp()
    # p log(p/q) − p + q is never negative; the added −p + q has mean zero over members.
    terms = torch.where(p > 0, p * (rows - mixture) - p + q, q)
    return terms.sum(2).mean(0).clamp_min(0).reshape(shape[1], *shape[3:])


def energy_score(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Energy −T log Σ_c exp(logit_c / T), (N,) or (N, H, W) in float64, of logits (N, C, …) (Liu et al., 2020)."""
    number("temperature", temperature, above=0, hint="the usual value is 1")
    check_no_nan(logits, "logits", class_axis=1)
    return -temperature * torch.logsumexp(logits.detach().double() / temperature, dim=1)


def _surprise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) −log max p in float64, and (n, C) the log-probabilities with the largest one set to −inf."""
    largest, index = rows.max(1, keepdim=True)
    others = rows.scatter(1, index, -math.inf)
    log_rest = torch.logsumexp(others, dim=1).double()  # log Σ_{c ≠ max} p_c
    direct = -largest.squeeze(1).double()
    return torch.where(log_rest < math.log(0.5), -torch.log1p(-log_rest.exp()), direct), others


def auroc(score_in: Tensor, score_ood: Tensor, *, weights: PairOfWeights = None) -> Tensor:
    """() or (...) area under the ROC curve: P(OOD scores higher) + ½ P(equal).

    Args:
        score_in, score_ood: scores of in-distribution and OOD inputs, any shapes, higher = more OOD.
        weights: (of score_in, of score_ood), (..., N) and (..., N'): how often each input counts, as in a bootstrap;
            the result then has the leading axes. None counts each once.
    """
    return _counts(score_in, score_ood, weights).auroc()


def aupr(score_in: Tensor, score_ood: Tensor, *, weights: PairOfWeights = None) -> Tensor:
    """() or (...) average precision with OOD positive; chance level is the share of OOD; arguments as in `auroc`."""
    return _counts(score_in, score_ood, weights).aupr()


def aupr_in(score_in: Tensor, score_ood: Tensor, *, weights: PairOfWeights = None) -> Tensor:
    """() or (...) average precision with in-distribution as the positive class (low scores); arguments as in `auroc`."""
    return _counts(score_in, score_ood, weights).swap_classes().aupr()


def aupr_adjusted(
    score_in: Tensor, score_ood: Tensor, *, prevalence: float = 0.5, weights: PairOfWeights = None
) -> Tensor:
    """() or (...) average precision, reweighted so that OOD is a share `prevalence` of the data; OOD is positive.

    precision = π·TPR / (π·TPR + (1 − π)·FPR). Comparable between sets of different sizes; chance level is `prevalence`.
    Other arguments as in `auroc`.
    """
    return _counts(score_in, score_ood, weights).aupr(prevalence)


def fpr95(
    score_in: Tensor, score_ood: Tensor, *, recall: float = 0.95, rule: Rule = "at_least", weights: PairOfWeights = None
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
    score_in: Tensor, score_ood: Tensor, *, recall: float = 0.95, rule: Rule = "at_least", weights: PairOfWeights = None
) -> Tensor:
    """() or (...) share of OOD inputs accepted if 95 % of in-distribution inputs are; arguments as in `fpr95`."""
    return _counts(score_in, score_ood, weights).swap_classes().fpr(recall, rule)


class RocCurve(NamedTuple):
    """ROC points in order of decreasing threshold, from (0, 0) to (1, 1)."""

    fpr: Tensor  # (K + 1,)
    tpr: Tensor  # (K + 1,)
    thresholds: Tensor  # (K + 1,) flagged when score ≥ threshold; the first is +inf


def roc_curve(score_in: Tensor, score_ood: Tensor) -> RocCurve:
    """RocCurve with one point per distinct score; scores as in `auroc`."""
    thresholds, counts = ranked_counts(*score_pair(score_in, score_ood))
    fpr, tpr = (_prepend(0.0, rate) for rate in counts.rates())
    return RocCurve(fpr, tpr, _prepend(math.inf, thresholds))


class PrecisionRecallCurve(NamedTuple):
    """Precision and recall in order of decreasing threshold, from recall 0 (where precision is set to 1) to recall 1."""

    precision: Tensor  # (K + 1,)
    recall: Tensor  # (K + 1,)
    thresholds: Tensor  # (K + 1,) flagged when score ≥ threshold; the first is +inf


def precision_recall_curve(score_in: Tensor, score_ood: Tensor) -> PrecisionRecallCurve:
    """PrecisionRecallCurve with one point per distinct score; OOD is positive, scores as in `auroc`."""
    thresholds, counts = ranked_counts(*score_pair(score_in, score_ood))
    precision, recall = _prepend(1.0, counts.precision()), _prepend(0.0, counts.rates()[1])
    return PrecisionRecallCurve(precision, recall, _prepend(math.inf, thresholds))


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
    check_no_nan(score if void is None else score.masked_fill(void, 0), "score")
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


def _counts(score_in: Tensor, score_ood: Tensor, weights: PairOfWeights = None) -> RankedCounts:
    return ranked_counts(*score_pair(score_in, score_ood), weights)[1]


def _prepend(value: float, tail: Tensor) -> Tensor:
    return torch.cat([tail.new_full((1,), value), tail])


class RiskCoverage(NamedTuple):
    """Risk at every coverage, most confident examples first."""

    coverage: Tensor  # (N,) k/N for k = 1…N
    risk: Tensor  # (N,) mean loss of the k most confident examples


def risk_coverage(confidence: Tensor, loss: Tensor) -> RiskCoverage:
    """Risk–coverage curve: RiskCoverage (N,), (N,) from confidences and losses of one shape."""
    confidence, loss = (t.flatten() for t in same_shape(confidence=confidence, loss=loss))
    group, count = torch.unique(-confidence, return_inverse=True, return_counts=True)[1:]
    group_loss = loss.new_zeros(len(count)).index_add(0, group, loss) / count
    taken = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    return RiskCoverage(taken / len(loss), group_loss[group.sort().values].cumsum(0) / taken)


def aurc(confidence: Tensor, loss: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """() or (...) area under the risk-coverage curve: mean risk of the k most confident examples over k (Geifman et al., 2019).

    weights (..., N): how often each example counts, whole numbers; None counts each once. A group of w examples of equal
    confidence and mean loss l, after W examples of summed loss L, adds Σ_{j=1…w} (L + j l)/(W + j)
    = w l + (L − l W)(H_{W+w} − H_W), H the harmonic numbers.
    """
    confidence, loss = (t.flatten() for t in same_shape(confidence=confidence, loss=loss))
    counts = torch.ones_like(loss) if weights is None else checked_weights(weights, len(loss)).to(loss.device)
    if (counts != counts.round()).any():
        raise ValueError("expected whole numbers as weights, got others; pass how often each example counts")
    distinct, group = torch.unique(-confidence, return_inverse=True)
    taken, lost = (group_sums(each, group, len(distinct)) for each in (counts, counts * loss))  # (..., K) w, w l
    before, lost_before = taken.cumsum(-1) - taken, lost.cumsum(-1) - lost  # W, L
    total = counts.sum(-1)
    steps = torch.arange(1, int(total.max()) + 1, dtype=torch.float64, device=loss.device)
    harmonic = torch.cat([steps.new_zeros(1), (1 / steps).cumsum(0)])
    rise = harmonic[(before + taken).long()] - harmonic[before.long()]
    mean_loss = torch.where(taken > 0, lost / taken, 0.0)
    return (lost + (lost_before - mean_loss * before) * rise).sum(-1) / total


def excess_aurc(confidence: Tensor, loss: Tensor) -> Tensor:
    """() `aurc` minus that of a perfect ranking, by the loss itself; 0 is best.

    The perfect AURC is computed on the data, not from the large-N formula r + (1 − r) log(1 − r) for 0/1 losses.
    """
    return aurc(confidence, loss) - aurc(-loss.double(), loss)


def augrc(confidence: Tensor, loss: Tensor) -> Tensor:
    """() area under the generalised risk-coverage curve (Traub et al., 2024): of coverage · risk, by the trapezoidal rule.

    For errors 0/1 of mean e it is e (1 − e) (1 − AUROC) + e²/2, AUROC that of telling right from wrong answers.
    """
    silent_failures = torch.mul(*risk_coverage(confidence, loss))  # (N,) losses of the k most confident examples / N
    return (silent_failures.sum() - silent_failures[-1] / 2) / len(silent_failures)


def coverage_at_risk(confidence: Tensor, loss: Tensor, *, risk: float) -> Tensor:
    """() the largest share of examples that a threshold of confidence answers with a mean loss of at most `risk`; 0 if none.

    Measured on these examples, not guaranteed for others, as `ds.selective` does it.
    """
    coverage, risks = risk_coverage(confidence, loss)
    ends = torch.unique(-tensor_of(confidence).flatten(), return_counts=True)[1].cumsum(0) - 1  # ties: all or none
    met = risks[ends] <= number("risk", risk, least=0, hint="pass for example 0.05") + 1e-12
    return (coverage[ends] * met).amax()


Rule = Literal["at_least", "nearest"]
# (..., N) of the in-distribution and (..., N') of the OOD inputs; None counts every input once
PairOfWeights = tuple[Tensor, Tensor] | None


class RankedCounts(NamedTuple):
    """Counts in order of decreasing score, the sufficient statistics of all OOD metrics. Leading axes are resamples."""

    in_counts: Tensor  # (..., K) in-distribution inputs at the k-th highest score
    ood_counts: Tensor  # (..., K) OOD inputs there

    def swap_classes(self) -> RankedCounts:
        """RankedCounts with negated scores, and in-distribution as the positive class."""
        return RankedCounts(self.ood_counts.flip(-1), self.in_counts.flip(-1))

    def rates(self) -> tuple[Tensor, Tensor]:
        """False positive rate and recall, (..., K) each, if all inputs down to the k-th score are flagged."""
        false, true = self.in_counts.cumsum(-1), self.ood_counts.cumsum(-1)
        return false / false[..., -1:].double(), true / true[..., -1:].double()

    def precision(self, prevalence: float | None = None) -> Tensor:
        """(..., K) share of OOD among flagged inputs; prevalence: share of OOD among all inputs (None: as in the data)."""
        if prevalence is None:
            false, true = self.in_counts.cumsum(-1).double(), self.ood_counts.cumsum(-1).double()
        else:
            # precision = π·TPR / (π·TPR + (1 − π)·FPR)
            false, true = self.rates()
            false, true = (1 - prevalence) * false, fraction("prevalence", prevalence) * true
        # An empty bin above the first score flags nothing and adds no recall, so any finite value is right.
        return torch.where(true > 0, true / (true + false), 0.0)

    def auroc(self) -> Tensor:
        """(...) P(score of OOD > score of in-distribution) + ½ P(equal)."""
        false, true = self.in_counts.double(), self.ood_counts.double()
        above = true.cumsum(-1) - true  # OOD with a strictly higher score
        return (false * (above + true / 2)).sum(-1) / (false.sum(-1) * true.sum(-1))

    def aupr(self, prevalence: float | None = None) -> Tensor:
        """(...) average precision Σ_k (recall_k − recall_{k−1}) precision_k, without interpolation."""
        share = self.ood_counts.double() / self.ood_counts.sum(-1, keepdim=True)
        return (share * self.precision(prevalence)).sum(-1)

    def fpr(self, recall: float = 0.95, rule: Rule = "at_least") -> Tensor:
        """(...) share of in-distribution inputs flagged where a share `recall` of OOD inputs is; `rule` as in `fpr95`."""
        one_of("rule", rule, ("at_least", "nearest"))
        fraction("recall", recall)
        fpr, reached = self.rates()
        if rule == "at_least":
            place = (reached < recall).sum(-1, keepdim=True)
        else:
            # Thresholds below the first one with full recall only add false positives: ignore them.
            beyond = (reached >= 1).cumsum(-1) > 1
            distance = (reached - recall).abs().masked_fill(beyond, torch.inf)
            place = reached.shape[-1] - 1 - distance.flip(-1).argmin(-1, keepdim=True)
        return fpr.gather(-1, place).squeeze(-1)


def ranked_counts(score_in: Tensor, score_ood: Tensor, weights: PairOfWeights = None) -> tuple[Tensor, RankedCounts]:
    """(K,) distinct scores, highest first, and their RankedCounts; weights: how often each input counts, None: once."""
    thresholds, group = torch.unique(torch.cat([score_in, score_ood]), return_inverse=True)
    group = len(thresholds) - 1 - group  # highest first
    groups = group[: len(score_in)], group[len(score_in) :]
    if weights is None:
        counts = [torch.bincount(each, minlength=len(thresholds)) for each in groups]
    else:
        named = zip(("in", "ood"), weights, groups, strict=True)
        checked = ((checked_weights(w, len(g), f"the weights of score_{name}"), g) for name, w, g in named)
        counts = [group_sums(w, g, len(thresholds)) for w, g in checked]
    return thresholds.flip(0), RankedCounts(counts[0], counts[1])
