"""In-distribution and OOD counts at every distinct score: the sufficient statistics of all ranking metrics.

Exact metrics count at the distinct scores; streamed metrics (`streaming.ScoreHistogram`) count in bins, and give the exact
metric of the binned scores; bootstraps count each input as often as it was drawn, all resamples at once. Ties are handled
in this one place: a threshold never splits them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.example_weights import checked_weights, group_sums
from dissensus.utils.checks import fraction, one_of

Rule = Literal["at_least", "nearest"]
# (..., N) of the in-distribution and (..., N') of the OOD inputs; None counts every input once
PairOfWeights = tuple[Tensor, Tensor] | None


class RankedCounts(NamedTuple):
    """Counts in order of decreasing score; OOD is the positive class. Leading axes are resamples."""

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
        """(...) share of in-distribution inputs flagged at the threshold that flags a share `recall` of OOD inputs.

        "at_least": the highest threshold with at least that recall. "nearest": the threshold with the nearest recall,
        above or below, as in the released anomaly-segmentation code. If several thresholds have that recall, the lowest is
        taken; at full recall the highest.
        """
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
    """(K,) distinct scores, highest first, and their RankedCounts, from two flat tensors of one dtype.

    weights: how often each input counts; None counts each once.
    """
    thresholds, group = torch.unique(torch.cat([score_in, score_ood]), return_inverse=True)
    group = len(thresholds) - 1 - group  # highest first
    groups = group[: len(score_in)], group[len(score_in) :]
    if weights is None:
        counts = [torch.bincount(each, minlength=len(thresholds)) for each in groups]
    else:
        named = zip(("in", "ood"), weights, groups, strict=True)
        counts = [
            group_sums(checked_weights(w, len(g), f"the weights of score_{name}"), g, len(thresholds))
            for name, w, g in named
        ]
    return thresholds.flip(0), RankedCounts(counts[0], counts[1])
