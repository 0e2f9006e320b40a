"""How sure a reported number is: test examples and seeds counted together, the same resamples for every method.

The estimate is the mean over seeds of the metric. Examples are resampled with replacement, the same for all seeds and methods;
`spread` adds what seeds vary by. Methods are compared seed by seed on the seeds that both have. Where seeds have test examples
of their own (splits, drawn sets), what the seeds vary by counts the examples as well, and nothing is added. One example alone,
or numbers that do not vary at all, say nothing of their spread: they have no interval and no p-value.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.evaluation.evaluation import Evaluation
from dissensus.metrics import Interval
from dissensus.metrics.bootstrap import ROUNDING, count_tables
from dissensus.reporting.measures import Measure, root_mean
from dissensus.reporting.spread import Spread, holm_level, spread_of
from dissensus.reporting.spread import holm as adjusted

RESAMPLES = 1000
LEVEL = 0.95
SIGNIFICANT = 0.05
KEPT = 2**21  # weights at most, for the next measure

Overlap = Literal["shared", "shuffled", "own"]  # test examples of seeds or methods: the same, in another order, others


@dataclass(frozen=True, eq=False)
class Resampled:
    """A measure of one method with every seed, and on resamples of the test examples."""

    measure: Measure
    values: dict[Hashable, float]  # seed -> value
    draws: Tensor | None = None  # (S, R); None where it cannot be resampled
    targets: tuple[Tensor | None, ...] = ()  # of the test examples, one for each seed: by them rows are known
    sizes: tuple[tuple[int, ...], ...] = ()  # of the samples, for each seed

    @property
    def estimate(self) -> float:
        return sum(self.values.values()) / len(self.values)

    def interval(self, level: float = LEVEL) -> Interval | None:
        """The estimate with its interval, inside of what is possible; None where examples cannot be counted."""
        found = _spread(self, list(self.values.values()), self.draws)
        if found is None:
            return None
        half, (least, most) = found.half_width(level), self.measure.possible
        return Interval(self.estimate, max(least, self.estimate - half), min(most, self.estimate + half))

    def on(self, seeds: Sequence[Hashable]) -> Resampled:
        """The same with some of the seeds only."""
        places = [list(self.values).index(seed) for seed in seeds]
        return Resampled(
            self.measure,
            {seed: self.values[seed] for seed in seeds},
            None if self.draws is None else self.draws[places],
            tuple(self.targets[i] for i in places) if self.targets else (),
            tuple(self.sizes[i] for i in places) if self.sizes else (),
        )

    @property
    def rows(self) -> Overlap:
        """Whether seeds were tested on the same examples."""
        known = [each for each in self.targets if each is not None]
        return "own" if len(set(self.sizes)) > 1 else _overlap([(known[0], each) for each in known[1:]])

    @property
    def tested(self) -> int | None:
        """The examples that an interval rests on, of two samples the fewer; None where seeds count them or none are kept."""
        return min(map(min, self.sizes)) if self.sizes and not _separate(self) else None


class Compared(NamedTuple):
    """First method minus second, on the seeds that both have."""

    first: float
    second: float
    spread: Spread
    seeds: int
    counted: str  # what the interval and the p-value count, in words

    @property
    def difference(self) -> float:
        return self.first - self.second

    @property
    def p_value(self) -> float:
        """Two-sided, of no difference."""
        return self.spread.p_value(self.difference)

    def interval(self, level: float = LEVEL) -> Interval:
        half = self.spread.half_width(level)
        return Interval(self.difference, self.difference - half, self.difference + half)


class Family(NamedTuple):
    """Comparisons that are looked at together, with their p-values and the one level of their intervals."""

    comparisons: dict[tuple[str, ...], Compared]
    p_values: dict[tuple[str, ...], float]
    level: float


def resampled(
    measure: Measure,
    evaluations: Sequence[Evaluation],
    *,
    seeds: Sequence[Hashable] | None = None,
    resamples: int = RESAMPLES,
) -> Resampled:
    """The measure of one method's evaluations, one per seed, with resamples that depend only on the numbers of examples."""
    values = [each.metrics[measure.key] for each in evaluations]
    by_seed = dict(zip(range(len(values)) if seeds is None else seeds, values, strict=True))
    if len(by_seed) < len(values):
        raise ValueError("expected one evaluation per method and seed, got a seed twice; report each run once")
    targets = tuple(each.arrays.get("test/target") for each in evaluations)
    names = [name for group in measure.samples for name in group]
    if not names or any(name not in each.arrays for each in evaluations for name in names):
        return Resampled(measure, by_seed, None, targets)
    sizes = tuple(tuple(len(each.arrays[group[0]]) for group in measure.samples) for each in evaluations)
    draws = torch.empty(len(values), resamples, dtype=torch.float64)
    for size in dict.fromkeys(sizes):
        places = [i for i, each in enumerate(sizes) if each == size]
        draws[places] = _resample(measure, [evaluations[i] for i in places], size, resamples)
    return Resampled(measure, by_seed, draws, targets, sizes)


def compared(first: Resampled, second: Resampled, *, seeds_alone: bool = False) -> Compared | None:
    """The comparison of two methods; None where they share no seed, were tested on different examples, or nothing varies.

    Where the examples cannot be counted, None as well, unless `seeds_alone` and there are several.
    """
    common = [seed for seed in first.values if seed in second.values]
    if not common:
        return None
    if rows_of(first, second) != "shared":
        return None
    first, second = first.on(common), second.on(common)
    each = [first.values[seed] - second.values[seed] for seed in common]
    draws = None if first.draws is None or second.draws is None else first.draws - second.draws
    if draws is not None and first.measure.statistic is root_mean and first.draws is not None:
        # a − b = (a² − b²)/(a + b): means of squares are what a t-test is of, with few examples roots are not
        draws = draws * (2 * first.draws - draws) / (first.estimate + second.estimate)
    found = _spread(first, each, draws)
    counted = _counted(first)
    if found is None:
        if not seeds_alone or len(common) < 2 or not torch.tensor(each).isfinite().all():
            return None
        found, counted = _varying(spread_of(each, 0.0), first), f"{len(common)} seeds, not test examples"
    return found and Compared(first.estimate, second.estimate, found, len(common), counted)


def rows_of(first: Resampled, second: Resampled) -> Overlap:
    """Whether two methods were tested on the same examples, with the seeds that both have."""
    common = [seed for seed in first.values if seed in second.values]
    first, second = first.on(common), second.on(common)
    if first.sizes != second.sizes:
        return "own"
    pairs = zip(first.targets, second.targets, strict=False)
    return _overlap([(a, b) for a, b in pairs if a is not None and b is not None])


def _overlap(pairs: Sequence[tuple[Tensor, Tensor]]) -> Overlap:
    """Of test targets, pair by pair."""
    if all(torch.equal(a, b) for a, b in pairs):
        return "shared"
    same = all(torch.equal(a.flatten().sort().values, b.flatten().sort().values) for a, b in pairs)
    return "shuffled" if same else "own"


def family(comparisons: Mapping[tuple[str, ...], Compared | None], *, holm: bool = False) -> Family:
    """The comparisons there are, with their p-values; `holm` adjusts these for the number of comparisons."""
    known = {key: each for key, each in comparisons.items() if each is not None}
    alone = [each.p_value for each in known.values()]
    p_values = dict(zip(known, adjusted(alone) if holm else alone, strict=True))
    return Family(known, p_values, holm_level(alone, LEVEL) if holm and alone else LEVEL)


def _counted(method: Resampled) -> str:
    seeds = len(method.values)
    if seeds == 1:
        return "test examples, not seeds"
    return f"{seeds} seeds with test examples of their own" if _separate(method) else f"test examples and {seeds} seeds"


def _separate(method: Resampled) -> bool:
    """Whether seeds count all examples. Foreign inputs may be the same with every seed where the test inputs are not."""
    of_test = method.measure.best is not None and not method.measure.key.startswith(("ood/", "shift/"))
    return of_test and len(method.values) > 1 and method.rows == "own"


def _spread(method: Resampled, values: Sequence[float], draws: Tensor | None) -> Spread | None:
    """Of the mean of values, one per seed; draws (S, R) the same on resamples of the examples."""
    if not torch.tensor(values).isfinite().all():
        return None
    if _separate(method):
        found = spread_of(values, 0.0)
    elif draws is None or not draws.isfinite().all() or (tested := method.tested or 0) < 2:
        return None
    else:
        # Examples in another order cannot be resampled together; as if all seeds erred alike, which is on the safe side.
        aligned = method.rows == "shared"
        variance = draws.mean(0).var() if aligned else draws.var(1).mean()
        # resamples of n examples vary by 1 − 1/n of what other examples would
        found = spread_of(values, math.sqrt(float(variance) * tested / (tested - 1)), tested)
    return _varying(found, method)


def _varying(found: Spread, method: Resampled) -> Spread | None:
    """None where nothing varies but by rounding of the method's values."""
    return found if max(found.seeds, found.examples) > ROUNDING * max(map(abs, method.values.values())) else None


def _resample(measure: Measure, evaluations: Sequence[Evaluation], sizes: Sequence[int], resamples: int) -> Tensor:
    """(S, R) the measure of every seed on every resample of so many examples."""
    names = [name for group in measure.samples for name in group]
    found = []
    for weights in _weights(tuple(sizes), resamples):
        found.append(
            torch.stack([measure.statistic(weights, *(e.arrays[name] for name in names)) for e in evaluations])
        )
    return torch.cat(found, 1)


def _weights(sizes: tuple[int, ...], resamples: int) -> Iterable[tuple[Tensor, ...]]:
    """`count_tables` of one generator, which the same sizes always meet in the same state."""
    if sum(sizes) * resamples <= KEPT:
        return _small_weights(sizes, resamples)
    return count_tables(sizes, resamples, torch.Generator().manual_seed(0))


@lru_cache(maxsize=2)  # every measure and method asks for the same; at most 16 MB each
def _small_weights(sizes: tuple[int, ...], resamples: int) -> list[tuple[Tensor, ...]]:
    return list(count_tables(sizes, resamples, torch.Generator().manual_seed(0)))
