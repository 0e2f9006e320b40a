"""Published numbers beside ours: a task's [reference], a table of both, and where orderings differ.

[reference]
source = "Somebody 2020, table 2"

[reference.deep_ensemble]
accuracy = 0.9888
nll = [0.035, 0.002]                # a number and its error
"ood/notmnist/auroc" = 0.972        # any key of metrics.json, in its units
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dissensus.bench.measures import Measure
from dissensus.bench.results import Results
from dissensus.bench.statistics import compared, resampled
from dissensus.bench.tables import SIGNIFICANT, Cell, Row, Table, arrow, p_text

HIGHER = ("accuracy", "auroc", "aupr", "aupr_in", "aupr_adjusted", "miou")
PERCENT = (*HIGHER, "fpr95", "fpr95_in", "ece", "ece_union")


class Published(NamedTuple):
    """A number and its error, None where none was given."""

    value: float
    error: float | None = None


def published(reference: Mapping[str, Any]) -> dict[str, dict[str, Published]]:
    """Method -> metric's key -> number, of a task's [reference]."""
    return {
        method: {key: Published(*value) if isinstance(value, list) else Published(value) for key, value in row.items()}
        for method, row in reference.items()
        if method != "source"
    }


def reference_table(results: Results, found: Sequence[Measure]) -> Table | None:
    """Our numbers, mean over seeds, each with the published one; None where a task gives none for these methods."""
    theirs = {name: row for name, row in published(results.reference).items() if name in results.methods}
    if not any(theirs.values()):
        return None
    rows = []
    for key in dict.fromkeys(key for row in theirs.values() for key in row):
        measure = _measure(key, found)
        cells = []
        for name in theirs:
            ours, number = _ours(results, key, name), theirs[name].get(key)
            text = "–" if ours is None else measure.text(ours)
            cells.append(Cell(text, note="" if number is None else f"published {_text(measure, number)}"))
        rows.append(Row(measure.label, measure.unit, arrow(measure), cells, measure.group))
    return Table(list(theirs), rows)


def reference_sentences(results: Results, found: Sequence[Measure]) -> list[str]:
    """Where a method stands on the other side of the baseline than published, number by number."""
    theirs, baseline = published(results.reference), results.baseline
    if baseline is None or not theirs.get(baseline):
        return []
    said, compared_with = [], 0
    for name, row in theirs.items():
        for key in row.keys() & theirs[baseline].keys() if name != baseline and name in results.methods else ():
            mine, base = _ours(results, key, name), _ours(results, key, baseline)
            if mine is None or base is None or row[key].value == theirs[baseline][key].value:
                continue
            compared_with += 1
            measure = _measure(key, found)
            ahead = measure.goodness(mine) > measure.goodness(base)
            if ahead != (measure.goodness(row[key].value) > measure.goodness(theirs[baseline][key].value)):
                pair = _pair(measure, row[key].value, theirs[baseline][key].value)
                said.append(
                    f"{_name(measure)}: published, {name} is {'behind' if ahead else 'ahead of'} {baseline} ({pair}); here it "
                    f"is {'ahead' if ahead else 'not ahead'} ({_pair(measure, mine, base)}{_chance(results, measure, name)})."
                )
    if compared_with and not said:
        return [f"All {compared_with} orderings against {baseline} are as published."]
    return sorted(said)


def _ours(results: Results, key: str, method: str) -> float | None:
    several = results.methods[method]
    return sum(e.metrics[key] for e in several) / len(several) if all(key in e.metrics for e in several) else None


def _measure(key: str, found: Sequence[Measure]) -> Measure:
    """The measure of a report with this key, or one made from the key's words."""
    for measure in found:
        if measure.key == key:
            return measure
    group, _, last = key.rpartition("/")
    percent = last in PERCENT
    best = "high" if last in HIGHER else "low"
    return Measure(key, last.replace("_", " "), group, best, 100 if percent else 1, 2 if percent else 4, "%" * percent)  # type: ignore[arg-type]


def _text(measure: Measure, number: Published) -> str:
    shown = measure.text(number.value)
    return shown if number.error is None else f"{shown} ± {measure.text(number.error)}"


def _pair(measure: Measure, first: float, second: float) -> str:
    return f"{measure.text(first)} against {measure.text(second)} {measure.unit}".strip()


def _name(measure: Measure) -> str:
    return f"{measure.label}{f', {measure.group}' if measure.group not in ('', 'test') else ''}"


def _chance(results: Results, measure: Measure, name: str) -> str:
    """Whether our difference could be chance, where it can be resampled."""
    if not measure.samples or results.baseline is None:
        return ""
    found = compared(*(resampled(measure, results.methods[each]) for each in (name, results.baseline)))
    if found is None:
        return ""
    return f", {'within chance, ' if found.p_value >= SIGNIFICANT else ''}{p_text(found.p_value)}"
