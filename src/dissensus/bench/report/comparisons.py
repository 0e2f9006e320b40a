"""Uncertainty of reported numbers: test examples and seeds counted together, with the same resamples for every method.

The estimate is the mean of the metric over seeds. Examples are resampled with replacement, equally for all seeds and methods;
`spread` adds the variation over seeds. Methods are compared seed by seed on the seeds that both have. If each seed has its
own test examples (splits, drawn sets), the variation over seeds includes that of examples, and nothing is added. A single
example, or numbers that do not vary, have no interval and no p-value.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.bench.report.intervals import Spread, holm_level, spread_of
from dissensus.bench.report.intervals import holm as adjusted
from dissensus.bench.report.measures import Measure, root_mean
from dissensus.evaluation.evaluation import Evaluation
from dissensus.metrics import Interval
from dissensus.metrics.bootstrap import ROUNDING, count_tables

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
        return self.first - self.second

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
    if not common:
        return None
    if example_overlap(first, second) != "shared":
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
    """The overlap of pairs of test targets."""
    if all(torch.equal(a, b) for a, b in pairs):
        return "shared"
    same = all(torch.equal(a.flatten().sort().values, b.flatten().sort().values) for a, b in pairs)
    return "shuffled" if same else "own"


def comparison_family(comparisons: Mapping[tuple[str, ...], MethodComparison | None], *, holm: bool = False) -> Family:
    """The comparisons that are not None, with their p-values; `holm` adjusts these for the number of comparisons."""
    known = {key: each for key, each in comparisons.items() if each is not None}
    alone = [each.p_value for each in known.values()]
    p_values = dict(zip(known, adjusted(alone) if holm else alone, strict=True))
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
        aligned = method.seed_overlap == "shared"
        variance = draws.mean(0).var() if aligned else draws.var(1).mean()
        # The variance over resamples of n examples is 1 − 1/n of that over new examples.
        found = spread_of(values, math.sqrt(float(variance) * tested / (tested - 1)), tested)
    return _varying_spread(found, method)


def _varying_spread(found: Spread, method: ResampledMeasure) -> Spread | None:
    """None if the method's values vary only by rounding."""
    return found if max(found.seeds, found.examples) > ROUNDING * max(map(abs, method.values.values())) else None


def _resampled_values(
    measure: Measure, evaluations: Sequence[Evaluation], sizes: Sequence[int], resamples: int
) -> Tensor:
    """(S, R) the measure of every seed on every resample."""
    names = [name for group in measure.samples for name in group]
    found = []
    for weights in _weights(tuple(sizes), resamples):
        values = [measure.statistic(weights, *(e.arrays[name] for name in names)) for e in evaluations]
        found.append(torch.stack(values))
    return torch.cat(found, 1)


def _weights(sizes: tuple[int, ...], resamples: int) -> Iterable[tuple[Tensor, ...]]:
    """`count_tables` from a generator with a fixed seed: equal sizes always give equal tables."""
    if sum(sizes) * resamples <= KEPT:
        return _small_weights(sizes, resamples)
    return count_tables(sizes, resamples, torch.Generator().manual_seed(0))


@lru_cache(maxsize=2)  # all measures and methods use the same tables; at most 16 MB each
def _small_weights(sizes: tuple[int, ...], resamples: int) -> list[tuple[Tensor, ...]]:
    return list(count_tables(sizes, resamples, torch.Generator().manual_seed(0)))
