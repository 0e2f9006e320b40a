"""Sufficient statistics in constant memory, for millions of pixels: states that are updated, merged and read.

Every state is a tuple of sums. `update` and `merge` return a new state, merging is addition, so several workers can
each keep one. Calibration and intersection over union lose nothing; ranking is binned, with bounds on what that costs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.calibration import bin_sums, ece_from_sums
from dissensus.metrics.checks import labelled, not_empty, scores
from dissensus.metrics.proper import confusion_matrix, intersection_over_union, mean_of_present
from dissensus.metrics.ranked_counts import RankedCounts
from dissensus.metrics.selective import RiskCoverage
from dissensus.numerics.checks import number, whole


class CalibrationBins(NamedTuple):
    """Counts and sums per confidence bin: the ECE from them is the ECE of all examples, exactly."""

    counts: Tensor  # (K,)
    confidence: Tensor  # (K,) sums
    correct: Tensor  # (K,) sums

    @classmethod
    def empty(cls, bins: int = 15, device: torch.device | str | None = None) -> CalibrationBins:
        """CalibrationBins that hold nothing yet."""
        zeros = torch.zeros(whole("bins", bins), dtype=torch.float64, device=device)
        return cls(zeros.long(), zeros, zeros)

    def update(self, probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> CalibrationBins:
        """CalibrationBins with a batch (N, C, …), (N, …) added."""
        rows, labels = labelled(probabilities, y, ignore_index)
        confidence, prediction = rows.max(1)
        return self.merge(CalibrationBins(*bin_sums(confidence, prediction == labels, len(self.counts))))

    def merge(self, other: CalibrationBins) -> CalibrationBins:
        """CalibrationBins of both."""
        return CalibrationBins(*(a + b for a, b in zip(self, other, strict=True)))

    def ece(self) -> Tensor:
        """() expected calibration error of everything seen."""
        return ece_from_sums(*_with_examples(self))


class ConfusionCounts(NamedTuple):
    """Confusion matrix of everything seen."""

    matrix: Tensor  # (C, C) row = true class, column = predicted class

    @classmethod
    def empty(cls, classes: int, device: torch.device | str | None = None) -> ConfusionCounts:
        """ConfusionCounts that hold nothing yet."""
        return cls(torch.zeros(classes, classes, dtype=torch.int64, device=device))

    def update(self, probabilities: Tensor, y: Tensor, *, ignore_index: int | None = None) -> ConfusionCounts:
        """ConfusionCounts with a batch (N, C, …), (N, …) added."""
        rows, labels = labelled(probabilities, y, ignore_index)
        return self.merge(ConfusionCounts(confusion_matrix(rows.argmax(1), labels, classes=len(self.matrix))))

    def merge(self, other: ConfusionCounts) -> ConfusionCounts:
        """ConfusionCounts of both."""
        return ConfusionCounts(self.matrix + other.matrix)

    def miou(self) -> Tensor:
        """() mean intersection over union of the classes seen or predicted."""
        return mean_of_present(intersection_over_union(self.matrix))

    def accuracy(self) -> Tensor:
        """() share of right answers."""
        return self.matrix.trace() / _with_examples(self)[0].sum().double()


class Bounded(NamedTuple):
    """A number from binned scores, and the least and the largest that the scores themselves can give."""

    value: Tensor  # ()
    lower: Tensor  # ()
    upper: Tensor  # ()


class ScoreHistogram(NamedTuple):
    """Counts of scores, in-distribution and OOD, in 2^bits bins that cover all numbers.

    A bin is the set of float32 numbers with the same leading `bits` bits: sign, 8 of exponent, bits − 9 of fraction.
    Nothing has to be known about the scores' range, and a bin is 2^(9−bits) wide relative to its scores: 0.2 % for 18
    bits (4 MB). `value`s are the exact metrics of the binned scores; in-bin order is all that is lost, and the bounds
    run through every order.
    """

    in_counts: Tensor  # (2^bits,) lowest scores first
    ood_counts: Tensor  # (2^bits,)

    @classmethod
    def empty(cls, bits: int = 18, device: torch.device | str | None = None) -> ScoreHistogram:
        """ScoreHistogram that holds nothing yet."""
        zeros = torch.zeros(
            2 ** number("bits", bits, least=10, most=24, hint="18 is a good start"), dtype=torch.int64, device=device
        )
        return cls(zeros, zeros)

    def update(self, score_in: Tensor, score_ood: Tensor) -> ScoreHistogram:
        """ScoreHistogram with scores of any shape added, higher = more OOD; either may be empty."""
        k = len(self.in_counts)
        pair = scores(score_in, score_ood, empty=True)
        return self.merge(ScoreHistogram(*(torch.bincount(_leading_bits(s, k), minlength=k) for s in pair)))

    def merge(self, other: ScoreHistogram) -> ScoreHistogram:
        """ScoreHistogram of both."""
        return ScoreHistogram(*(a + b for a, b in zip(self, other, strict=True)))

    def auroc(self) -> Bounded:
        """Bounded (): only pairs within a bin are unsure, by ½ each: |error| ≤ ½ Σ_k p_k q_k."""
        counts = self._ranked()
        p, q = (c.double() / c.sum() for c in counts)
        value, error = counts.auroc(), (p * q).sum() / 2
        return Bounded(value, value - error, value + error)

    def aupr(self) -> Bounded:
        """Bounded () average precision, OOD positive."""
        return _aupr(self._ranked())

    def aupr_in(self) -> Bounded:
        """Bounded () average precision, in-distribution positive."""
        return _aupr(self._ranked().swapped())

    def fpr95(self, *, recall: float = 0.95) -> Bounded:
        """Bounded () share of in-distribution inputs flagged when at least 95 % of OOD are."""
        return _fpr(self._ranked(), recall)

    def fpr95_in(self, *, recall: float = 0.95) -> Bounded:
        """Bounded () share of OOD inputs accepted when at least 95 % of in-distribution are."""
        return _fpr(self._ranked().swapped(), recall)

    def _ranked(self) -> RankedCounts:
        if not (self.in_counts.any() and self.ood_counts.any()):
            raise ValueError("expected scores of both kinds, got none of at least one; update with both first")
        used = (self.in_counts + self.ood_counts) > 0
        return RankedCounts(self.in_counts[used].flip(0), self.ood_counts[used].flip(0))


class RiskHistogram(NamedTuple):
    """Counts of examples and of errors by how unsure they are, binned as in `ScoreHistogram`: 0.2 % relative width for 18 bits.

    Examples of one bin are taken as equally sure.
    """

    counts: Tensor  # (2^bits,) surest first
    errors: Tensor  # (2^bits,)

    @classmethod
    def empty(cls, bits: int = 18, device: torch.device | str | None = None) -> RiskHistogram:
        """RiskHistogram that holds nothing yet."""
        return cls(*ScoreHistogram.empty(bits, device))

    def update(self, score: Tensor, wrong: Tensor) -> RiskHistogram:
        """RiskHistogram with scores, higher = less sure, and whether the answers are wrong added; both of any one shape."""
        k = len(self.counts)
        right, bad = ScoreHistogram.empty(k.bit_length() - 1, score.device).update(score[~wrong], score[wrong])
        return RiskHistogram(self.counts + right + bad, self.errors + bad)

    def merge(self, other: RiskHistogram) -> RiskHistogram:
        """RiskHistogram of both."""
        return RiskHistogram(*(a + b for a, b in zip(self, other, strict=True)))

    def risk_coverage(self, points: int = 200) -> RiskCoverage:
        """RiskCoverage at no more than about this many coverages, evenly spread over those that bins end at."""
        taken, lost = (each[_with_examples(self)[0] > 0].cumsum(0).double() for each in self)
        index = torch.linspace(0, taken[-1], whole("points", points) + 1, dtype=torch.float64, device=taken.device)[1:]
        ends = torch.unique(torch.searchsorted(taken, index.ceil()).clamp(max=len(taken) - 1))
        return RiskCoverage(taken[ends] / taken[-1], lost[ends] / taken[ends])

    def aurc(self) -> Tensor:
        """() area under the risk-coverage curve of the binned scores, as `aurc` defines it, ties included."""
        counts, errors = _with_examples(self)
        taken, lost = counts[counts > 0].double(), errors[counts > 0].double()  # w, w l
        before, lost_before = taken.cumsum(0) - taken, lost.cumsum(0) - lost  # W, L
        # H_{W+w} − H_W, without a table of the harmonic numbers of all pixels
        rise = torch.special.digamma(before + taken + 1) - torch.special.digamma(before + 1)
        return (lost + (lost_before - lost / taken * before) * rise).sum() / taken.sum()


def _aupr(counts: RankedCounts) -> Bounded:
    """Every positive of bin k has a precision between those of two orders of the bin.

    At best it is counted with all m_k positives of the bin and none of its negatives. At worst the bin's negatives come
    first and then its positives one by one: Σ_j g(T + j), g(t) = t/(t + F), T and F counted up to there. g is concave,
    so the sum is at least m_k (g(T + 1) + g(T + m_k))/2.
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
    """The threshold lies somewhere in the bin where the recall is reached: none or all of its negatives are flagged."""
    value = counts.fpr(recall)
    k = (counts.rates()[1] < recall).sum()
    return Bounded(value, value - counts.in_counts[k] / counts.in_counts.sum().double(), value)


def _leading_bits(score: Tensor, bins: int) -> Tensor:
    """(n,) bin of every score; larger scores never get a smaller one."""
    pattern = (score.float() + 0.0).view(torch.int32).long()  # + 0.0 turns −0 into +0
    # Of non-negative numbers the bit patterns, read as integers, are in the numbers' order; of negative ones reversed.
    ordered = torch.where(pattern >= 0, pattern + 2**31, -1 - pattern)
    return ordered // (2**32 // bins)


def _with_examples(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The state, not all zero."""
    not_empty(state[0][state[0] > 0])
    return state
