"""In-distribution and OOD counts at every distinct score: all that a ranking metric depends on.

Exact metrics count at the distinct scores themselves; streamed ones (`streaming.ScoreHistogram`) count in bins and so
give the exact metric of the binned scores. Ties are therefore handled in one place: a threshold never splits them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.checks import fraction

Rule = Literal["at_least", "nearest"]


class RankedCounts(NamedTuple):
    """Counts in order of falling score; OOD is the positive class."""

    in_counts: Tensor  # (K,) in-distribution inputs at the k-th highest score
    ood_counts: Tensor  # (K,) OOD inputs there

    def swapped(self) -> RankedCounts:
        """RankedCounts with in-distribution as the positive class and the scores negated."""
        return RankedCounts(self.ood_counts.flip(0), self.in_counts.flip(0))

    def rates(self) -> tuple[Tensor, Tensor]:
        """(K,) false positive rate and (K,) recall when everything down to the k-th score is flagged."""
        false, true = self.in_counts.cumsum(0), self.ood_counts.cumsum(0)
        return false / false[-1].double(), true / true[-1].double()

    def precision(self, prevalence: float | None = None) -> Tensor:
        """(K,) share of OOD among the flagged, at the given share of OOD among all (None: the one in the data)."""
        if prevalence is None:
            false, true = self.in_counts.cumsum(0).double(), self.ood_counts.cumsum(0).double()
        else:
            # precision = π·TPR / (π·TPR + (1 − π)·FPR)
            false, true = self.rates()
            false, true = (1 - prevalence) * false, fraction(prevalence, "prevalence") * true
        # an empty bin above the first score has flagged nothing; it adds no recall, so any finite value will do
        return torch.where(true > 0, true / (true + false), 0.0)

    def auroc(self) -> Tensor:
        """() P(score of OOD > score of in-distribution) + ½ P(equal)."""
        false, true = self.in_counts.double(), self.ood_counts.double()
        above = true.cumsum(0) - true  # OOD with a strictly higher score
        return (false * (above + true / 2)).sum() / (false.sum() * true.sum())

    def aupr(self, prevalence: float | None = None) -> Tensor:
        """() average precision Σ_k (recall_k − recall_{k−1}) precision_k, without interpolation."""
        share = self.ood_counts.double() / self.ood_counts.sum()
        return (share * self.precision(prevalence)).sum()

    def fpr(self, recall: float = 0.95, rule: Rule = "at_least") -> Tensor:
        """() share of in-distribution inputs flagged at the threshold where `recall` of OOD is.

        "at_least": the highest threshold with that recall or more. "nearest": the recall nearest to it, from above or
        below, as in the released anomaly-segmentation code; of several thresholds with that recall the lowest, unless
        the recall is full, and then the highest.
        """
        fpr, reached = self.rates()
        if rule == "at_least":
            return fpr[(reached < fraction(recall, "recall")).sum()]
        if rule == "nearest":
            # Thresholds below the first one with full recall only add false positives, and are not looked at.
            candidates = int((reached < 1).sum()) + 1
            distance = (reached[:candidates] - fraction(recall, "recall")).abs()
            return fpr[candidates - 1 - distance.flip(0).argmin()]
        raise ValueError(f'expected rule "at_least" or "nearest", got {rule!r}; choose one of the two')


def ranked_counts(score_in: Tensor, score_ood: Tensor) -> tuple[Tensor, RankedCounts]:
    """(K,) distinct scores, highest first, and the RankedCounts at them, of two flat tensors of one dtype."""
    thresholds, group = torch.unique(torch.cat([score_in, score_ood]), return_inverse=True)
    k = len(thresholds)
    in_counts = torch.bincount(group[: len(score_in)], minlength=k)
    ood_counts = torch.bincount(group[len(score_in) :], minlength=k)
    return thresholds.flip(0), RankedCounts(in_counts.flip(0), ood_counts.flip(0))
