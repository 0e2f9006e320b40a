"""Uncertainty of reported numbers: intervals, p-values and comparisons that count seeds and test examples together.

A number m measured with S seeds on n test examples is uncertain because other seeds would give other networks, and because
other examples would give other scores. With s² the variance of the S values and v the variance due to n examples,

    half-width(level)² = t² s²/S + u² v,

where t and u are the two-sided quantiles at that level of Student's t with S − 1 and n − 1 degrees of freedom. With one seed
the half-width is u √v. p is one minus the level at which the interval just reaches zero, so an interval contains zero exactly
if p ≥ 1 − level. If nothing varies, both are NaN.

The estimate is the mean of the metric over seeds. Examples are resampled with replacement, equally for all seeds and methods,
which gives v. Methods are compared seed by seed on the seeds that both have. If each seed has its own test examples (splits,
drawn sets), the variation over seeds includes that of examples, and nothing is added. A single example, or numbers that do
not vary, have no interval and no p-value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from statistics import NormalDist, fmean
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dissensus.bench.report.measures import Measure, root_mean
from dissensus.evaluation.evaluation import Evaluation
from dissensus.metrics import Interval
from dissensus.metrics.bootstrap import MANY, ROUNDING, count_tables, last_before, student_quantile, student_tail

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
        freedom, u = self.example_count - 1, -_NORMAL.inv_cdf(max(tail, SMALLEST) / 2) if tail < 1 else 0.0
        if freedom < MANY:
            u = math.sqrt(freedom * math.expm1((u * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom))
        return math.hypot(t * self.seeds, u * self.examples)


def spread_of(values: Sequence[float], examples: float, tested: int = MANY + 1) -> Spread:
    """The Spread of the mean of one value per seed; `examples`: standard error due to the `tested` examples."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return Spread(math.sqrt(variance / count), count - 1, examples, tested)


def holm_p_values(p_values: Sequence[float]) -> list[float]:
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
    return 1 - alpha / max(len(p_values) - sum(p < alpha for p in holm_p_values(p_values)), 1)


RESAMPLES = 1000
LEVEL = 0.95
SIGNIFICANT = 0.05
KEPT = 2**21  # most weights kept for the next measure

Overlap = Literal["shared", "shuffled", "own"]  # test examples of seeds or methods: same, reordered, different


@dataclass(frozen=True, eq=False)
class ResampledMeasure:
    """A measure of one method for every seed, and on resamples of the test examples."""

    measure: Measure
    values: dict[Hashable, float]  # seed -> value
    draws: Tensor | None = None  # (S, R); None if it cannot be resampled
    targets: tuple[Tensor | None, ...] = ()  # targets of each seed's test examples, which identify the examples
    sizes: tuple[tuple[int, ...], ...] = ()  # sizes of the samples, for each seed

    @property
    def estimate(self) -> float:
        return fmean(self.values.values())

    def interval(self, level: float = LEVEL) -> Interval | None:
        """The estimate with its interval, clipped to possible values; None if examples cannot be counted."""
        found = _mean_spread(self, list(self.values.values()), self.draws)
        if found is None:
            return None
        half, (least, most) = found.half_width(level), self.measure.possible_range
        return Interval(self.estimate, max(least, self.estimate - half), min(most, self.estimate + half))

    @property
    def half_width(self) -> float | None:
        """Half-width of the interval; None without one."""
        found = self.interval()
        return None if found is None else max(found.estimate - found.lower, found.upper - found.estimate)

    def for_seeds(self, seeds: Sequence[Hashable]) -> ResampledMeasure:
        """The same for some of the seeds only."""
        places = [list(self.values).index(seed) for seed in seeds]
        return ResampledMeasure(
            self.measure,
            {seed: self.values[seed] for seed in seeds},
            None if self.draws is None else self.draws[places],
            tuple(self.targets[i] for i in places) if self.targets else (),
            tuple(self.sizes[i] for i in places) if self.sizes else (),
        )

    @property
    def seed_overlap(self) -> Overlap:
        """Whether seeds were tested on the same examples."""
        known = [each for each in self.targets if each is not None]
        return "own" if len(set(self.sizes)) > 1 else _target_overlap([(known[0], each) for each in known[1:]])

    @property
    def example_count(self) -> int | None:
        """Number of examples behind an interval (the smaller of two samples); None if seeds include them or none are stored."""
        return min(map(min, self.sizes)) if self.sizes and not _has_separate_examples(self) else None


class MethodComparison(NamedTuple):
    """First method minus second, on the seeds that both have."""

    first: float
    second: float
    spread: Spread
    seeds: int
    counted_text: str  # what the interval and the p-value count, in words

    @property
    def difference(self) -> float:
        """First minus second; 0 if they differ only by rounding."""
        found = self.first - self.second
        return found if abs(found) > ROUNDING * max(abs(self.first), abs(self.second)) else 0.0

    @property
    def p_value(self) -> float:
        """Two-sided p-value of no difference."""
        return self.spread.p_value(self.difference)

    def interval(self, level: float = LEVEL) -> Interval:
        half = self.spread.half_width(level)
        return Interval(self.difference, self.difference - half, self.difference + half)


class Family(NamedTuple):
    """Comparisons that are judged together, with their p-values and the common level of their intervals."""

    comparisons: dict[tuple[str, ...], MethodComparison]
    p_values: dict[tuple[str, ...], float]
    level: float


def resample_measure(
    measure: Measure,
    evaluations: Sequence[Evaluation],
    *,
    seeds: Sequence[Hashable] | None = None,
    resamples: int = RESAMPLES,
) -> ResampledMeasure:
    """The measure of one method's evaluations, one per seed; resamples depend only on the numbers of examples."""
    values = [each.metrics[measure.key] for each in evaluations]
    by_seed = dict(zip(range(len(values)) if seeds is None else seeds, values, strict=True))
    if len(by_seed) < len(values):
        raise ValueError("expected one evaluation per method and seed, got a seed twice; report each run once")
    targets = tuple(each.arrays.get("test/target") for each in evaluations)
    names = [name for group in measure.samples for name in group]
    if not names or any(name not in each.arrays for each in evaluations for name in names):
        return ResampledMeasure(measure, by_seed, None, targets)
    sizes = tuple(tuple(len(each.arrays[group[0]]) for group in measure.samples) for each in evaluations)
    draws = torch.empty(len(values), resamples, dtype=torch.float64)
    for size in dict.fromkeys(sizes):
        places = [i for i, each in enumerate(sizes) if each == size]
        draws[places] = _resampled_values(measure, [evaluations[i] for i in places], size, resamples)
    return ResampledMeasure(measure, by_seed, draws, targets, sizes)


def compare_methods(
    first: ResampledMeasure, second: ResampledMeasure, *, seeds_alone: bool = False
) -> MethodComparison | None:
    """The comparison of two methods; None if they share no seed, were tested on different examples, or nothing varies.

    Also None if examples cannot be counted, unless `seeds_alone` is set and there are several seeds.
    """
    common = [seed for seed in first.values if seed in second.values]
    if not common or example_overlap(first, second) != "shared":
        return None
    first, second = first.for_seeds(common), second.for_seeds(common)
    each = [first.values[seed] - second.values[seed] for seed in common]
    draws = None if first.draws is None or second.draws is None else first.draws - second.draws
    if draws is not None and first.measure.statistic is root_mean and first.draws is not None:
        # a − b = (a² − b²)/(a + b): with few examples a t-test fits means of squares, but not their roots
        draws = draws * (2 * first.draws - draws) / (first.estimate + second.estimate)
    found = _mean_spread(first, each, draws)
    counted = _counted_text(first)
    if found is None:
        if not seeds_alone or len(common) < 2 or not torch.tensor(each).isfinite().all():
            return None
        found, counted = _varying_spread(spread_of(each, 0.0), first), f"{len(common)} seeds, not test examples"
    return found and MethodComparison(first.estimate, second.estimate, found, len(common), counted)


def example_overlap(first: ResampledMeasure, second: ResampledMeasure) -> Overlap:
    """Whether two methods were tested on the same examples, for the seeds that both have."""
    common = [seed for seed in first.values if seed in second.values]
    first, second = first.for_seeds(common), second.for_seeds(common)
    if first.sizes != second.sizes:
        return "own"
    pairs = zip(first.targets, second.targets, strict=False)
    return _target_overlap([(a, b) for a, b in pairs if a is not None and b is not None])


def _target_overlap(pairs: Sequence[tuple[Tensor, Tensor]]) -> Overlap:
    if all(torch.equal(a, b) for a, b in pairs):
        return "shared"
    same = all(torch.equal(a.flatten().sort().values, b.flatten().sort().values) for a, b in pairs)
    return "shuffled" if same else "own"


def comparison_family(comparisons: Mapping[tuple[str, ...], MethodComparison | None], *, holm: bool = False) -> Family:
    """The comparisons that are not None, with their p-values; `holm` adjusts these for the number of comparisons."""
    known = {key: each for key, each in comparisons.items() if each is not None}
    alone = [each.p_value for each in known.values()]
    p_values = dict(zip(known, holm_p_values(alone) if holm else alone, strict=True))
    return Family(known, p_values, holm_level(alone, LEVEL) if holm and alone else LEVEL)


def _counted_text(method: ResampledMeasure) -> str:
    seeds = len(method.values)
    if seeds == 1:
        return "test examples, not seeds"
    separate = _has_separate_examples(method)
    return f"{seeds} seeds with test examples of their own" if separate else f"test examples and {seeds} seeds"


def _has_separate_examples(method: ResampledMeasure) -> bool:
    """Whether the variation over seeds includes that of examples. Foreign inputs may be shared while test inputs are not."""
    of_test = method.measure.best is not None and not method.measure.key.startswith(("ood/", "shift/"))
    return of_test and len(method.values) > 1 and method.seed_overlap == "own"


def _mean_spread(method: ResampledMeasure, values: Sequence[float], draws: Tensor | None) -> Spread | None:
    """Spread of the mean of values, one per seed; draws (S, R): the values on resamples of the examples."""
    if not torch.tensor(values).isfinite().all():
        return None
    if _has_separate_examples(method):
        found = spread_of(values, 0.0)
    elif draws is None or not draws.isfinite().all() or (tested := method.example_count or 0) < 2:
        return None
    else:
        # Reordered examples cannot be resampled together: assume that all seeds err alike, which is conservative.
        variance = draws.mean(0).var() if method.seed_overlap == "shared" else draws.var(1).mean()
        # The variance over resamples of n examples is 1 − 1/n of that over new examples.
        found = spread_of(values, math.sqrt(float(variance) * tested / (tested - 1)), tested)
    return _varying_spread(found, method)


def _varying_spread(found: Spread, method: ResampledMeasure) -> Spread | None:
    """None if the method's values vary only by rounding."""
    return found if max(found.seeds, found.examples) > ROUNDING * max(map(abs, method.values.values())) else None


def _resampled_values(measure: Measure, runs: Sequence[Evaluation], sizes: Sequence[int], resamples: int) -> Tensor:
    """(S, R) the measure of every seed on every resample."""
    names = [name for group in measure.samples for name in group]
    tables = _weights(tuple(sizes), resamples)
    found = [[measure.statistic(table, *(e.arrays[name] for name in names)) for e in runs] for table in tables]
    return torch.cat([torch.stack(values) for values in found], 1)


def _weights(sizes: tuple[int, ...], resamples: int) -> Iterable[tuple[Tensor, ...]]:
    """`count_tables` from a generator with a fixed seed: equal sizes always give equal tables."""
    if sum(sizes) * resamples <= KEPT:
        return _small_weights(sizes, resamples)
    return count_tables(sizes, resamples, torch.Generator().manual_seed(0))


@lru_cache(maxsize=2)  # all measures and methods use the same tables; at most 16 MB each
def _small_weights(sizes: tuple[int, ...], resamples: int) -> list[tuple[Tensor, ...]]:
    return list(count_tables(sizes, resamples, torch.Generator().manual_seed(0)))


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
