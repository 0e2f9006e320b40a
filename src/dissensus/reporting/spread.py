"""Intervals and p-values of a mean over seeds: one formula, read both ways.

A number m measured with S seeds on n test examples is uncertain because other seeds would give other networks, and because
other examples would give other scores. With s² the variance of the S values and v the bootstrap variance over examples,

    half-width(level)² = t² s²/S + z² v,

t and z the two-sided quantiles at that level of Student's t with S − 1 degrees of freedom and of the normal distribution.
p is one minus the level at which the interval just reaches zero. So an interval holds zero exactly where p ≥ 1 − level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

SMALLEST = 1e-15  # of what Student's tail can tell from zero
_NORMAL = NormalDist()


class Spread(NamedTuple):
    """How far a mean over seeds may be from the truth."""

    seeds: float  # s/√S; 0 with one seed
    freedom: int  # S − 1; 0 with one seed
    examples: float  # √v; 0 where examples are counted by the seeds, or not at all

    def half_width(self, level: float = 0.95) -> float:
        """Of the interval at this level."""
        t = student_quantile(level, self.freedom) if self.freedom and self.seeds else 0.0
        return math.hypot(t * self.seeds, _normal_quantile(1 - level) * self.examples)

    def p_value(self, mean: float) -> float:
        """Two-sided, of a true mean of zero."""
        if mean == 0 or not (self.seeds or self.examples):
            return 1.0 if mean == 0 else 0.0
        if not self.freedom or not self.seeds:
            return math.erfc(abs(mean) / self.examples / math.sqrt(2))

        def too_far(t: float) -> bool:
            return math.hypot(t * self.seeds, _normal_quantile(student_tail(t, self.freedom)) * self.examples) > abs(
                mean
            )

        return student_tail(_last_before(too_far, abs(mean) / self.seeds), self.freedom)


def spread(values: Sequence[float], examples: float) -> Spread:
    """The Spread of the mean of one value per seed, `examples` the standard error that test examples add."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return Spread(math.sqrt(variance / count), count - 1, examples)


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > t) of Student's t with a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


@lru_cache(maxsize=256)  # one level and few numbers of seeds, asked for in every cell of a table
def student_quantile(level: float, freedom: int) -> float:
    """t with P(|T| ≤ t) = level."""
    upper = 1.0
    while student_tail(upper, freedom) > 1 - level:
        upper *= 2
    return _last_before(lambda t: student_tail(t, freedom) < 1 - level, upper)


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


def _last_before(reached: Callable[[float], bool], upper: float) -> float:
    """The largest number in 0…upper at which a condition that holds from somewhere on does not hold yet."""
    lower = 0.0
    for _ in range(100):
        middle = (lower + upper) / 2
        if middle in (lower, upper):
            break
        lower, upper = (lower, middle) if reached(middle) else (middle, upper)
    return lower
