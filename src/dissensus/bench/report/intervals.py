"""Intervals and p-values of a mean over seeds, both from one formula.

A number m measured with S seeds on n test examples is uncertain because other seeds would give other networks, and because
other examples would give other scores. With s² the variance of the S values and v the variance due to n examples,

    half-width(level)² = t² s²/S + u² v,

where t and u are the two-sided quantiles at that level of Student's t with S − 1 and n − 1 degrees of freedom. With one seed
the half-width is u √v. p is one minus the level at which the interval just reaches zero, so an interval contains zero exactly
if p ≥ 1 − level. If nothing varies, both are NaN.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from dissensus.metrics.bootstrap import MANY, last_before, student_quantile, student_tail

SMALLEST = 1e-15  # smallest tail probability that Student's t can distinguish from zero
_NORMAL = NormalDist()


class Spread(NamedTuple):
    """The uncertainty of a mean over seeds."""

    seeds: float  # s/√S; 0 with one seed
    freedom: int  # S − 1; 0 with one seed
    examples: float  # √v; 0 if seeds include the variation of examples, or if it is not counted
    example_count: int = MANY + 1  # n; for two samples, the smaller number

    def half_width(self, level: float = 0.95) -> float:
        """Half-width of the interval at this level."""
        if not self.seeds:
            return student_quantile(level, self.example_count - 1) * self.examples if self.examples else math.nan
        return self._half_width_at(student_quantile(level, self.freedom), 1 - level)

    def p_value(self, mean: float) -> float:
        """Two-sided p-value of a true mean of zero."""
        if not self.seeds:
            return student_tail(abs(mean) / self.examples, self.example_count - 1) if self.examples else math.nan

        def too_far(t: float) -> bool:
            return self._half_width_at(t, student_tail(t, self.freedom)) > abs(mean)

        return student_tail(last_before(too_far, abs(mean) / self.seeds), self.freedom)

    def _half_width_at(self, t: float, tail: float) -> float:
        """The half-width if t is the quantile of seeds; u by Wallace's formula (1959), at most 4 % too large for n > 2."""
        u, freedom = _normal_quantile(tail), self.example_count - 1
        if freedom < MANY:
            u = math.sqrt(freedom * math.expm1((u * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom))
        return math.hypot(t * self.seeds, u * self.examples)


def spread_of(values: Sequence[float], examples: float, tested: int = MANY + 1) -> Spread:
    """The Spread of the mean of one value per seed; `examples`: standard error due to the `tested` examples."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return Spread(math.sqrt(variance / count), count - 1, examples, tested)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm, 1979): the probability that any true null gets p < α is at most α."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def holm_level(p_values: Sequence[float], level: float = 0.95) -> float:
    """The common level at which each interval excludes zero exactly if Holm's p is below 1 − level.

    With r of m below, it is 1 − (1 − level)/(m − r): these r have p < (1 − level)/(m − k + 1) for some k ≤ r, the next one
    does not.
    """
    alpha = 1 - level
    below = sum(p < alpha for p in holm(p_values))
    return 1 - alpha / max(len(p_values) - below, 1)


def _normal_quantile(tail: float) -> float:
    """z with P(|Z| > z) = tail."""
    return -_NORMAL.inv_cdf(max(tail, SMALLEST) / 2) if tail < 1 else 0.0
