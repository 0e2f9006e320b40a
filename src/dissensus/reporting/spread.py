"""Intervals and p-values of a mean over seeds: one formula, read both ways.

A number m measured with S seeds on n test examples is uncertain because other seeds would give other networks, and because
other examples would give other scores. With s² the variance of the S values and v the variance that n examples add,

    half-width(level)² = t² s²/S + u² v,

t and u the two-sided quantiles at that level of Student's t with S − 1 and n − 1 degrees of freedom; with one seed u √v alone.
p is one minus the level at which the interval just reaches zero. So an interval holds zero exactly where p ≥ 1 − level.
Where nothing varies there is neither: both are NaN.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from dissensus.metrics.student import MANY, last_before, student_quantile, student_tail

SMALLEST = 1e-15  # of what Student's tail can tell from zero
_NORMAL = NormalDist()


class Spread(NamedTuple):
    """How far a mean over seeds may be from the truth."""

    seeds: float  # s/√S; 0 with one seed
    freedom: int  # S − 1; 0 with one seed
    examples: float  # √v; 0 where examples are counted by the seeds, or not at all
    tested: int = MANY + 1  # n; of two samples, the fewer

    def half_width(self, level: float = 0.95) -> float:
        """Of the interval at this level."""
        if not self.seeds:
            return student_quantile(level, self.tested - 1) * self.examples if self.examples else math.nan
        return self._reach(student_quantile(level, self.freedom), 1 - level)

    def p_value(self, mean: float) -> float:
        """Two-sided, of a true mean of zero."""
        if not self.seeds:
            return student_tail(abs(mean) / self.examples, self.tested - 1) if self.examples else math.nan

        def too_far(t: float) -> bool:
            return self._reach(t, student_tail(t, self.freedom)) > abs(mean)

        return student_tail(last_before(too_far, abs(mean) / self.seeds), self.freedom)

    def _reach(self, t: float, tail: float) -> float:
        """The half-width where t is the quantile of seeds; u by Wallace's formula (1959), at most 4 % too large for n > 2."""
        u, freedom = _normal_quantile(tail), self.tested - 1
        if freedom < MANY:
            u = math.sqrt(freedom * math.expm1((u * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom))
        return math.hypot(t * self.seeds, u * self.examples)


def spread_of(values: Sequence[float], examples: float, tested: int = MANY + 1) -> Spread:
    """The Spread of the mean of one value per seed, `examples` the standard error that so many `tested` examples add."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return Spread(math.sqrt(variance / count), count - 1, examples, tested)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number (Holm, 1979): at most a share α of families has one below α by chance."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def holm_level(p_values: Sequence[float], level: float = 0.95) -> float:
    """The one level at which each interval leaves zero out exactly where Holm's p is below 1 − level.

    With r of m below, that is 1 − (1 − level)/(m − r): the r have p < (1 − level)/(m − k + 1) for some k ≤ r, the next one
    has not.
    """
    alpha = 1 - level
    below = sum(p < alpha for p in holm(p_values))
    return 1 - alpha / max(len(p_values) - below, 1)


def _normal_quantile(tail: float) -> float:
    """z with P(|Z| > z) = tail."""
    return -_NORMAL.inv_cdf(max(tail, SMALLEST) / 2) if tail < 1 else 0.0
