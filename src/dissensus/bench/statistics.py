"""How sure a reported number is: bootstrap over test examples and over seeds, the same resamples for every method.

With S seeds the estimate is the mean over seeds of the metric. A resample draws examples with replacement, the same for
all seeds and methods, and then seeds. The interval is the percentile interval; two methods are compared by the resampled
difference d*: p = (1 + #{|d* − d| ≥ |d|}) / (1 + R), as in `dissensus.metrics.paired_bootstrap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.bench.measures import Measure
from dissensus.bench.resampling import draw_weights
from dissensus.evaluate import Evaluation
from dissensus.metrics import Comparison, Interval

RESAMPLES = 1000
_CHUNK = 2**21  # weights held at once


class Resampled(NamedTuple):
    """A measure of one method and its resamples; None where it cannot be resampled."""

    estimate: float
    draws: Tensor | None  # (R,)

    def interval(self, level: float = 0.95) -> Interval | None:
        """The estimate with its percentile interval."""
        if self.draws is None or not self.draws.isfinite().all():
            return None
        tail = (1 - level) / 2
        lower, upper = torch.quantile(self.draws, self.draws.new_tensor([tail, 1 - tail])).tolist()
        return Interval(self.estimate, lower, upper)


def resampled(measure: Measure, seeds: Sequence[Evaluation], *, resamples: int = RESAMPLES) -> Resampled:
    """The measure of one method's evaluations, one per seed, with resamples that depend only on the numbers of examples."""
    estimate = sum(each.metrics[measure.key] for each in seeds) / len(seeds)
    names = [name for group in measure.samples for name in group]
    if not names or any(name not in each.arrays for each in seeds for name in names):
        return Resampled(estimate, None)
    sizes = [len(seeds[0].arrays[group[0]]) for group in measure.samples]
    if any(len(each.arrays[g[0]]) != n for each in seeds for g, n in zip(measure.samples, sizes, strict=True)):
        return Resampled(estimate, None)
    generator = torch.Generator().manual_seed(0)
    per_seed = _per_seed(measure, seeds, sizes, resamples, generator)  # (S, R)
    chosen = torch.randint(len(seeds), (len(seeds), resamples), generator=generator)
    return Resampled(estimate, per_seed.gather(0, chosen).mean(0))


def compared(first: Resampled, second: Resampled, *, level: float = 0.95) -> Comparison | None:
    """first − second on the same resamples; None where one of them has none."""
    if first.draws is None or second.draws is None or len(first.draws) != len(second.draws):
        return None
    difference = first.estimate - second.estimate
    draws = first.draws - second.draws
    if not draws.isfinite().all():
        return None
    tail = (1 - level) / 2
    lower, upper = torch.quantile(draws, draws.new_tensor([tail, 1 - tail])).tolist()
    extreme = int(((draws - difference).abs() >= abs(difference)).sum())
    return Comparison(difference, lower, upper, (1 + extreme) / (1 + len(draws)))


def _per_seed(
    measure: Measure, seeds: Sequence[Evaluation], sizes: list[int], resamples: int, generator: torch.Generator
) -> Tensor:
    """(S, R) the measure of every seed on every resample of the examples."""
    names = [name for group in measure.samples for name in group]
    found = []
    rows = max(1, _CHUNK // sum(sizes))
    for start in range(0, resamples, rows):
        weights = [draw_weights(n, min(rows, resamples - start), generator) for n in sizes]  # (r, n) each
        found.append(torch.stack([measure.statistic(*weights, *(e.arrays[name] for name in names)) for e in seeds]))
    return torch.cat(found, 1)
