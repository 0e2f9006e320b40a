"""Means with intervals over seeds and test examples, and sentences about them."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np

from dissensus.bench.report.comparisons import LEVEL
from dissensus.bench.report.intervals import holm_level, spread_of
from dissensus.metrics.bootstrap import MANY, student_quantile, student_tail

Array = Any  # of numpy


class Claim(NamedTuple):
    """A number with its 95 % interval (NaN if nothing varies), and the question it answers."""

    question: str
    about: str
    value: float
    lower: float
    upper: float
    unit: str
    seeds: int  # number of seeds behind it

    @property
    def text(self) -> str:
        scale = 100 if self.unit == "points" else 1
        value, lower, upper = (f"{scale * each:+.2f}" for each in (self.value, self.lower, self.upper))
        ends = "no interval: nothing varies" if math.isnan(self.lower) else f"{lower} … {upper}"
        alone = ", one seed, whose spread is not counted" if self.seeds == 1 else ""
        return f"{value} ({ends}{alone})".replace("-", "−")

    def p_value(self, near: float = 0.0) -> float:
        """p-value of "the true value is within ±near", from the interval, as if only seeds varied: never too small."""
        error = (self.upper - self.lower) / 2 / student_quantile(LEVEL, self.freedom)
        return student_tail(max(abs(self.value) - near, 0.0) / error, self.freedom) if error > 0 else 1.0

    @property
    def freedom(self) -> int:
        return self.seeds - 1 if self.seeds > 1 else MANY

    def at_level(self, level: float) -> Self:
        """The claim with an interval of this level instead of 95 %, as if only seeds varied: never too narrow."""
        ratio = student_quantile(level, self.freedom) / student_quantile(LEVEL, self.freedom)
        half = ratio * (self.upper - self.lower) / 2
        return self._replace(lower=self.value - half, upper=self.value + half)


class VerdictWords(NamedTuple):
    """Words for an interval above near, below −near, and neither; `equal`: within ±near."""

    above: str
    below: str
    neither: str
    near: float = 0.0
    equal: str = ""

    def word_for(self, claim: Claim) -> str:
        if -self.near < claim.lower and claim.upper < self.near:
            return self.equal
        return self.above if claim.lower > self.near else self.below if claim.upper < -self.near else self.neither


def claim_of(question: str, about: str, values: Array, unit: str) -> Claim:
    """The claim about the mean of numbers (S, n)."""
    value, lower, upper, seeds = mean_interval(values)
    return Claim(question, about, value, lower, upper, unit, seeds)


def verdicts(found: Sequence[Claim], words: Mapping[str, VerdictWords]) -> list[str]:
    """One sentence per question: what its claims show, with intervals widened by Holm's adjustment for their number."""
    said = []
    for question, each in words.items():
        mine = [claim for claim in found if claim.question == question]
        level = holm_level([claim.p_value(each.near) for claim in mine])
        shown = [f"{c.about}: {each.word_for(c)}, {c.text} {c.unit}" for c in (claim.at_level(level) for claim in mine)]
        said += [f"{question} {'; '.join(shown)}."] if shown else []
    return said


def mean_interval(values: Array) -> tuple[float, float, float, int]:
    """(mean, lower, upper, seeds), 95 %, of numbers (S, n) over seeds and test examples; seeds with NaN are skipped.

    n = 1 means numbers without examples: only seeds are counted.
    """
    values = values[~np.isnan(values).any(1)]
    seeds, tested = values.shape
    if not seeds:
        return math.nan, math.nan, math.nan, 0
    error = float(values.mean(0).std(ddof=1)) / math.sqrt(tested) if tested > 1 else 0.0
    mean, half = float(values.mean()), spread_of(values.mean(1).tolist(), error, max(tested, 2)).half_width()
    return mean, mean - half, mean + half, seeds


def slope_weights(x: Sequence[float]) -> Array:
    """The weights of y in the least-squares slope over log₂ x."""
    centred = np.log2(x) - np.log2(x).mean()
    return centred / (centred**2).sum()


def array_over(rows: Sequence[Mapping[str, Any]], name: str, **axes: Collection[Any]) -> Array:
    """(…, n) one column of rows, arranged by the values of other columns; n = 1 for plain numbers, NaN without a row."""
    found = {tuple(row[key] for key in axes): row[name] for row in rows}
    values = [np.atleast_1d(found.get(place, math.nan)) for place in product(*axes.values())]
    tested = max(map(len, values), default=1)
    return np.array([np.broadcast_to(each, tested) for each in values]).reshape(*map(len, axes.values()), tested)


def seed_means(values: Array) -> Array:
    """Means of numbers (…, S, n) over the seeds that have them; NaN if none has."""
    return np.ma.masked_invalid(values).mean((-2, -1)).filled(math.nan)
