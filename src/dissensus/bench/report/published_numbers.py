"""Published numbers beside ours: a task's [reference], a table of both, and where orderings differ.

[reference]
source = "Somebody 2020, table 2"

[reference.deep_ensemble]
accuracy = 0.9888
nll = [0.035, 0.002]                # a number and its error
"ood/notmnist/auroc" = 0.972        # any key of metrics.json, in its units
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from dissensus.bench.report import comparisons
from dissensus.bench.report.comparisons import SIGNIFICANT, Family, MethodComparison
from dissensus.bench.report.measures import Measure
from dissensus.bench.report.results import Results, all_have_metric, mean_over_seeds
from dissensus.bench.report.tables import Cell, Table, measure_row, method_table, p_text

HIGHER = ("accuracy", "auroc", "aupr", "aupr_in", "aupr_adjusted", "miou")
PERCENT = (*HIGHER, "fpr95", "fpr95_in", "fpr95_nearest", "ece", "ece_union")


class PublishedNumber(NamedTuple):
    """A published number and its error; None if no error was given."""

    value: float
    error: float | None = None


def published_numbers(reference: Mapping[str, Any]) -> dict[str, dict[str, PublishedNumber]]:
    """Method -> metric's key -> published number, from a task's [reference]."""
    rows = {method: row.items() for method, row in reference.items() if method != "source"}
    listed = {method: {key: v if isinstance(v, list) else [v] for key, v in row} for method, row in rows.items()}
    return {method: {key: PublishedNumber(*v) for key, v in row.items()} for method, row in listed.items()}


def reference_table(results: Results, found: Sequence[Measure]) -> Table | None:
    """Our numbers (mean over seeds) beside the published ones; None if the task has none for these methods."""
    theirs = {name: row for name, row in published_numbers(results.reference).items() if name in results.methods}
    if not any(theirs.values()):
        return None
    rows = []
    for key in dict.fromkeys(key for row in theirs.values() for key in row):
        measure = _measure(key, found)
        cells = []
        for name in theirs:
            ours, number = _our_mean(results, key, name), theirs[name].get(key)
            text = "–" if ours is None else measure.text(ours)
            error = "" if number is None or number.error is None else f" ± {measure.text(number.error)}"
            cells.append(Cell(text, note="" if number is None else f"published {measure.text(number.value)}{error}"))
        rows.append(measure_row(measure, cells))
    return method_table(results, list(theirs), rows)


class Ordering(NamedTuple):
    """A pair of methods with a published order in one metric."""

    measure: Measure
    ahead: str
    behind: str
    published: tuple[float, float]
    ours: tuple[float, float]
    comparison: MethodComparison | None

    @property
    def key(self) -> tuple[str, ...]:
        return self.measure.key, self.ahead, self.behind

    @property
    def gap(self) -> float:
        """Above zero if our order agrees with the published one."""
        return _gap(self.measure, *self.ours)


def orderings(results: Results, found: Sequence[Measure]) -> list[Ordering]:
    """Every pair of methods in every metric with a published order; equal published numbers have no order.

    Without stored test examples, only the variation over seeds is counted.
    """
    theirs = {name: row for name, row in published_numbers(results.reference).items() if name in results.methods}
    listed = []
    for key in dict.fromkeys(key for row in theirs.values() for key in row):
        measure = _measure(key, found)
        ours = {name: _our_mean(results, key, name) for name, row in theirs.items() if key in row}
        known = {name: value for name, value in ours.items() if value is not None and measure.best is not None}
        resample = partial(comparisons.resample_measure, measure)
        each = {name: resample(results.methods[name], seeds=results.seeds(name)) for name in known}
        for pair in combinations(known, 2):
            gap = _gap(measure, *(theirs[name][key].value for name in pair))
            if gap == 0:
                continue
            ahead, behind = pair if gap > 0 else pair[::-1]
            published, here = (theirs[ahead][key].value, theirs[behind][key].value), (known[ahead], known[behind])
            compared = comparisons.compare_methods(each[ahead], each[behind], seeds_alone=True)
            listed.append(Ordering(measure, ahead, behind, published, here, compared))
    return listed


def reference_sentences(results: Results, found: Sequence[Measure]) -> list[str]:
    """A sentence with the number of orderings that differ from the published ones, then one for each with its numbers."""
    listed = orderings(results, found)
    judged = comparisons.comparison_family({each.key: each.comparison for each in listed}, holm=results.holm)
    said = [
        f"{each.measure.label}{f', {each.measure.group}' * (each.measure.group not in ('', 'test'))}: "
        f"published, {each.ahead} is ahead of {each.behind} "
        f"({_pair_text(each.measure, *each.published)}); here it is {'level' if each.gap == 0 else 'behind'} "
        f"({_pair_text(each.measure, *each.ours)}; {_chance_text(each, judged)})."
        for each in listed
        if each.gap <= 0
    ]
    if not listed:
        return []
    if not said:
        return [f"All {len(listed)} orderings of two methods are as published."]
    return [f"{len(said)} of {len(listed)} orderings of two methods are not as published.", *said]


def _gap(measure: Measure, first: float, second: float) -> float:
    """Above zero if the first is better."""
    return measure.goodness(first) - measure.goodness(second)


def _our_mean(results: Results, key: str, method: str) -> float | None:
    several = results.methods[method]
    return mean_over_seeds(key, several) if all_have_metric(key, several) else None


def _measure(key: str, found: Sequence[Measure]) -> Measure:
    """The report's measure with this key, or a new one named after the key."""
    for measure in found:
        if measure.key == key:
            return measure
    group, _, last = key.rpartition("/")
    percent = last in PERCENT
    best = "high" if last in HIGHER else "low"
    return Measure(key, last.replace("_", " "), group, best, 100 if percent else 1, 2 if percent else 4, "%" * percent)  # type: ignore[arg-type]


def _pair_text(measure: Measure, first: float, second: float) -> str:
    return f"{measure.text(first)} against {measure.text(second)} {measure.unit}".strip()


def _chance_text(ordering: Ordering, judged: Family) -> str:
    """Our difference with its interval and whether it is significant, as words."""
    measure, comparison = ordering.measure, ordering.comparison
    if comparison is None:
        return "no interval: nothing varies, or one seed without its test examples"
    interval, p_value = comparison.interval(judged.level), judged.p_values[ordering.key]
    half = (interval.upper - interval.lower) / 2
    verdict = "beyond chance" if p_value < SIGNIFICANT else "within chance"
    text = f"difference {measure.text(interval.estimate, half, signed=True)}, "
    text += f"{measure.interval_text(interval, half, signed=True)}, {verdict}, paired test, {p_text(p_value)}"
    return f"{text}; counts {comparison.counted_text}"
