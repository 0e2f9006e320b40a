"""Metrics of millions of pixels in constant memory, from sufficient statistics that are updated and merged.

Every state is a tuple of sums. `update` and `merge` return a new state. Merging is addition, so several workers can each
keep a state. Calibration and intersection over union are exact; ranking is binned, with bounds on the error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics import classification
from dissensus.metrics.metric_inputs import labelled_rows, nonempty_values, score_pair
from dissensus.metrics.ranking import RankedCounts, RiskCoverage
from dissensus.utils.checks import integer, number


class CalibrationBins(NamedTuple):
    """Counts and sums per confidence bin, which give the exact ECE of all examples."""

    counts: Tensor  # (K,)
    confidence: Tensor  # (K,) sums
    correct: Tensor  # (K,) sums

    @classmethod
    def empty(cls, bins: int = 15, device: torch.device | str | None = None) -> CalibrationBins:
        """CalibrationBins without examples."""
        zeros = torch.zeros(integer("bins", bins), dtype=torch.float64, device=device)
        return cls(zeros.long(), zeros, zeros)

    def update(self, probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> CalibrationBins:
        """CalibrationBins with a batch added: probabilities (N, C, …) and labels (N, …)."""
        rows, labels = labelled_rows(probabilities, y, ignore_index)
        confidence, prediction = rows.max(1)
        return self.merge(CalibrationBins(*classification.bin_sums(confidence, prediction == labels, len(self.counts))))

    def merge(self, other: CalibrationBins) -> CalibrationBins:
        """CalibrationBins of both."""
        return CalibrationBins(*map(torch.add, self, other))

    def ece(self) -> Tensor:
        """() expected calibration error of all examples."""
        return classification.ece_from_sums(*_nonempty_state(self))


class ConfusionCounts(NamedTuple):
    """Confusion matrix, which gives the exact mIoU and accuracy of all examples."""

    matrix: Tensor  # (C, C) row = true class, column = predicted class

    @classmethod
    def empty(cls, classes: int, device: torch.device | str | None = None) -> ConfusionCounts:
        """ConfusionCounts without examples."""
        return cls(torch.zeros(classes, classes, dtype=torch.int64, device=device))

    def update(self, probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> ConfusionCounts:
        """ConfusionCounts with a batch added: probabilities (N, C, …) and labels (N, …)."""
        rows, labels = labelled_rows(probabilities, y, ignore_index)
        matrix = classification.confusion_matrix(rows.argmax(1), labels, classes=len(self.matrix))
        return self.merge(ConfusionCounts(matrix))

    def merge(self, other: ConfusionCounts) -> ConfusionCounts:
        """ConfusionCounts of both."""
        return ConfusionCounts(self.matrix + other.matrix)

    def miou(self) -> Tensor:
        """() mean intersection over union of the classes seen or predicted."""
        return classification.mean_of_present(classification.intersection_over_union(self.matrix))

    def accuracy(self) -> Tensor:
        """() share of right answers."""
        return self.matrix.trace() / _nonempty_state(self)[0].sum().double()


class Bounded(NamedTuple):
    """A metric of binned scores, with lower and upper bounds of the metric of the exact scores."""

    value: Tensor  # ()
    lower: Tensor  # ()
    upper: Tensor  # ()


class ScoreHistogram(NamedTuple):
    """Histograms of in-distribution and OOD scores in 2^bits bins that cover all numbers, for ranking metrics.

    A bin is the set of float32 numbers with the same leading `bits` bits: sign, 8 of exponent, bits − 9 of fraction.
    The range of the scores need not be known. The relative width of a bin is 2^(9−bits): 0.2 % for 18 bits (4 MB).
    `value` is the exact metric of the binned scores. Only the order within bins is lost; the bounds hold for every order.
    """

    in_counts: Tensor  # (2^bits,) lowest scores first
    ood_counts: Tensor  # (2^bits,)

    @classmethod
    def empty(cls, bits: int = 18, device: torch.device | str | None = None) -> ScoreHistogram:
        """ScoreHistogram without scores; bits: from 10 to 24."""
        size = 2 ** number("bits", bits, least=10, most=24, hint="18 is a good start")
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        return cls(zeros, zeros)

    def update(self, score_in: Tensor, score_ood: Tensor) -> ScoreHistogram:
        """ScoreHistogram with scores of any shape added, higher = more OOD; either may be empty."""
        k = len(self.in_counts)
        pair = score_pair(score_in, score_ood, empty=True)
        return self.merge(ScoreHistogram(*(torch.bincount(_leading_bits(s, k), minlength=k) for s in pair)))

    def merge(self, other: ScoreHistogram) -> ScoreHistogram:
        """ScoreHistogram of both."""
        return ScoreHistogram(*map(torch.add, self, other))

    def auroc(self) -> Bounded:
        """Bounded () area under the ROC curve. Each pair within a bin may be wrong by ½: |error| ≤ ½ Σ_k p_k q_k."""
        counts = self._ranked_counts()
        p, q = (c.double() / c.sum() for c in counts)
        value, error = counts.auroc(), (p * q).sum() / 2
        return Bounded(value, value - error, value + error)

    def aupr(self) -> Bounded:
        """Bounded () average precision, OOD positive."""
        return _aupr(self._ranked_counts())

    def aupr_in(self) -> Bounded:
        """Bounded () average precision, in-distribution positive."""
        return _aupr(self._ranked_counts().swap_classes())

    def fpr95(self, *, recall: float = 0.95) -> Bounded:
        """Bounded () share of in-distribution inputs flagged if at least 95 % of OOD inputs are."""
        return _fpr(self._ranked_counts(), recall)

    def fpr95_in(self, *, recall: float = 0.95) -> Bounded:
        """Bounded () share of OOD inputs accepted if at least 95 % of in-distribution inputs are."""
        return _fpr(self._ranked_counts().swap_classes(), recall)

    def _ranked_counts(self) -> RankedCounts:
        if not (self.in_counts.any() and self.ood_counts.any()):
            raise ValueError("expected in-distribution and OOD scores, got none of one kind; update with both first")
        used = (self.in_counts + self.ood_counts) > 0
        return RankedCounts(self.in_counts[used].flip(0), self.ood_counts[used].flip(0))


class RiskHistogram(NamedTuple):
    """Histograms of examples and errors by uncertainty, for risk–coverage curves; bins as in `ScoreHistogram`.

    Examples of one bin count as equally certain.
    """

    counts: Tensor  # (2^bits,) most certain first
    errors: Tensor  # (2^bits,)

    @classmethod
    def empty(cls, bits: int = 18, device: torch.device | str | None = None) -> RiskHistogram:
        """RiskHistogram without examples; bits: as in `ScoreHistogram`."""
        return cls(*ScoreHistogram.empty(bits, device))

    def update(self, score: Tensor, wrong: Tensor) -> RiskHistogram:
        """RiskHistogram with a batch added. score: higher = less certain; wrong: boolean, of the same shape."""
        k = len(self.counts)
        right, bad = ScoreHistogram.empty(k.bit_length() - 1, score.device).update(score[~wrong], score[wrong])
        return RiskHistogram(self.counts + right + bad, self.errors + bad)

    def merge(self, other: RiskHistogram) -> RiskHistogram:
        """RiskHistogram of both."""
        return RiskHistogram(*map(torch.add, self, other))

    def risk_coverage(self, points: int = 200) -> RiskCoverage:
        """RiskCoverage at about `points` coverages at most, evenly chosen from the ends of bins."""
        taken, lost = (each[_nonempty_state(self)[0] > 0].cumsum(0).double() for each in self)
        count = integer("points", points) + 1
        index = torch.linspace(0, taken[-1], count, dtype=torch.float64, device=taken.device)[1:]
        ends = torch.unique(torch.searchsorted(taken, index.ceil()).clamp(max=len(taken) - 1))
        return RiskCoverage(taken[ends] / taken[-1], lost[ends] / taken[ends])

    def aurc(self) -> Tensor:
        """() area under the risk-coverage curve of the binned scores, as `aurc` defines it, ties included."""
        counts, errors = _nonempty_state(self)
        taken, lost = counts[counts > 0].double(), errors[counts > 0].double()  # w, w l
        before, lost_before = taken.cumsum(0) - taken, lost.cumsum(0) - lost  # W, L
        # H_{W+w} − H_W, without a table of the harmonic numbers of all pixels
        rise: Tensor = torch.special.digamma(before + taken + 1) - torch.special.digamma(before + 1)
        return (lost + (lost_before - lost / taken * before) * rise).sum() / taken.sum()

    def adaptive_ece(self, *, bins: int = 15) -> Tensor:
        """() `adaptive_ece` of scores −log max p, each moved to the middle of its bin, by at most 0.001 |score|."""
        return classification.adaptive_ece_from_sums(*self._confidence_groups(), bins)

    def smooth_ece(self) -> Tensor:
        """() `smooth_ece`, as `adaptive_ece`."""
        confidence, count, correct = self._confidence_groups()
        return classification.smooth_ece_from_gaps(confidence, (correct - count * confidence) / count.sum())

    def _confidence_groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """(K,) confidence of every used bin, ascending, its examples and its right answers."""
        counts, errors = (each.flip(0) for each in _nonempty_state(self))
        used = (counts > 0).nonzero()[:, 0]
        width = 2**32 // len(counts)  # in bit patterns; those of scores of at least 0 are in the upper half of the bins
        middle = ((len(counts) - 1 - used) * width + width // 2 - 2**31).clamp(min=0).int()
        return (-middle.view(torch.float32).double()).exp(), counts[used], (counts - errors)[used].double()


def _aupr(counts: RankedCounts) -> Bounded:
    """Bounded average precision: the precision of every positive in bin k lies between those of two orders of the bin.

    At best its m_k positives come before its negatives; at worst after them, one by one: Σ_j g(T + j), g(t) = t/(t + F), with
    the counts T and F up to there. g is concave, so the sum is at least m_k (g(T + 1) + g(T + m_k))/2.
    """
    negative, positive = counts.in_counts.double(), counts.ood_counts.double()
    true, false = positive.cumsum(0), negative.cumsum(0)
    share = positive / positive.sum()
    held = positive > 0
    share, negative, positive, true, false = (t[held] for t in (share, negative, positive, true, false))
    best = true / (true + false - negative)
    first = true - positive + 1
    worst = (first / (first + false) + true / (true + false)) / 2
    return Bounded(counts.aupr(), (share * worst).sum(), (share * best).sum())


def _fpr(counts: RankedCounts, recall: float) -> Bounded:
    """Bounded FPR: the threshold lies in the bin where the recall is reached; none to all of its negatives are flagged."""
    value = counts.fpr(recall)
    k = (counts.rates()[1] < recall).sum()
    return Bounded(value, value - counts.in_counts[k] / counts.in_counts.sum().double(), value)


def _leading_bits(score: Tensor, bins: int) -> Tensor:
    """(n,) bin of every score, non-decreasing in the score."""
    pattern = (score.float() + 0.0).view(torch.int32).long()  # + 0.0 turns −0 into +0
    # Read as integers, the bit patterns of non-negative numbers have the numbers' order; those of negative ones the reverse.
    ordered = torch.where(pattern >= 0, pattern + 2**31, -1 - pattern)
    return ordered // (2**32 // bins)


def _nonempty_state(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The state; raises if it is empty."""
    nonempty_values(state[0][state[0] > 0])
    return state
