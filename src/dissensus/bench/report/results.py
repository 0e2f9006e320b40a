"""The results behind a report: evaluations by method and seed, their origins, and the sweep of a setting.

A sweep has one variant per value of a setting, named in [evaluation] sweep. The value is chosen on validation rows only, under
the corruptions in [evaluation] choose, and reported on test rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.evaluation.evaluation import Evaluation
from dissensus.methods import METHODS
from dissensus.utils.arrays import as_dataframe
from dissensus.utils.checks import one_of
from dissensus.utils.text import CONTROL as CONTROL

# The beginning of a spreadsheet formula, or of an escaped one; numbers do not match.
FORMULA = re.compile(r"(?![+-]?(?:[\d.]+(?:e[+-]?\d+)?|inf|nan)\Z)'*[=+\-@\t\r]")


class SettingSweep(NamedTuple):
    """A setting in which runs differ, and its value for each method that has it."""

    key: str
    values: dict[str, float]  # method -> value


@dataclass(frozen=True, eq=False)
class Results:
    """Evaluations of several methods on one task."""

    title: str
    description: str
    methods: dict[str, list[Evaluation]]  # one evaluation per seed
    origins: dict[str, list[dict[str, Any]]]  # for each evaluation, the first columns of its row
    baseline: str | None = None
    facts: dict[str, str] = field(default_factory=dict)  # provenance
    reference: dict[str, Any] = field(default_factory=dict)  # published numbers, as in a task
    focus: str | None = None  # the method that sentences on regions are about
    sweep: SettingSweep | None = None
    holm: bool = False  # whether p-values are adjusted for the number of comparisons in a table
    metrics: tuple[str, ...] = ()  # keys of the measures that are shown, in order; () for all
    transpose: bool = False  # whether methods are the rows of tables

    def seeds(self, method: str) -> list[Any]:
        """The seeds of a method's evaluations; 0, 1, … if seeds are unknown."""
        return [origin.get("seed", i) for i, origin in enumerate(self.origins[method])]

    def iterate_evaluations(self) -> Iterator[tuple[dict[str, Any], Evaluation]]:
        """(origin, evaluation) of every method and seed."""
        for name, several in self.methods.items():
            yield from zip(self.origins[name], several, strict=True)

    def methods_with(self, array: str) -> dict[str, list[Evaluation]]:
        """The methods whose evaluations all have this array."""
        return {name: several for name, several in self.methods.items() if all(array in e.arrays for e in several)}

    def with_baseline(self, baseline: str | None = None, *, holm: bool = False) -> Results:
        """The same results with another baseline (None keeps it), and with p-values adjusted or not."""
        if baseline is not None:
            one_of("a method of the report as baseline", baseline, self.methods)
        return replace(self, baseline=self.baseline if baseline is None else baseline, holm=holm)

    def arrange(
        self,
        methods: Sequence[str] = (),
        names: Sequence[str] = (),
        metrics: Sequence[str] = (),
        transpose: bool = False,
    ) -> Results:
        """These methods, with new names ("old=new"), and these metrics, both in this order; all if empty."""
        renamed = dict(each.partition("=")[::2] for each in names)
        for each in (*methods, *renamed):
            one_of("a method of the report", each, self.methods)
        new = {name: renamed.get(name, name) for name in methods or self.methods}
        if len({*filter(None, new.values())}) < len(new):
            raise ValueError(f"expected old=new, each new name once, got {', '.join(names)}; write map=MAP,svgd=SVGD")
        values = {} if self.sweep is None else {new[k]: v for k, v in self.sweep.values.items() if k in new}
        return replace(
            self,
            methods={new[name]: self.methods[name] for name in new},
            origins={new[name]: [each | {"method": new[name]} for each in self.origins[name]] for name in new},
            baseline=new.get(self.baseline or ""),
            focus=new.get(self.focus or ""),
            reference={new.get(name, name): row for name, row in self.reference.items()},
            sweep=self.sweep and self.sweep._replace(values=values),
            metrics=tuple(metrics),
            transpose=transpose,
        )

    def with_class_names(self) -> Results:
        """The same results with the library's methods named by their classes, as in the documentation: NodeBNN."""
        of = {name: METHODS.get(base_method(name)) for name in self.methods if "task" in self.origins[name][0]}
        named = [f"{name}={each.__name__}{name[len(each.name) :]}" for name, each in of.items() if each]
        return self.arrange(names=named, metrics=self.metrics, transpose=self.transpose)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method and seed: its origin, every metric, and warnings if it has some."""
        every = [(origin | e.metrics, " ".join(e.cautions.values())) for origin, e in self.iterate_evaluations()]
        return [row | ({"warnings": text} if text else {}) for row, text in every]

    def to_dataframe(self) -> Any:
        """A pandas.DataFrame: one row per method and seed, every metric a column, as in results.csv."""
        return as_dataframe(self.rows())

    @cached_property
    def near_chance(self) -> set[str]:
        """The methods that are not clearly better than a constant answer (`NEAR_CHANCE`), on average over seeds."""
        every = {name: [_gains_over_constant(each) for each in several] for name, several in self.methods.items()}
        gains = {name: [gain for gain in several if gain is not None] for name, several in every.items()}
        mean = {name: fmean(float(gain.mean()) for gain in several) for name, several in gains.items() if several}
        return {n for n in mean if mean[n] <= 2 * fmean(float(gain.std()) / len(gain) ** 0.5 for gain in gains[n])}

    @cached_property
    def notes(self) -> dict[str, list[str]]:
        """Method -> its warnings, with the number of seeds concerned if there are several, and whether it is near chance."""
        found = {}
        for name, several in self.methods.items():
            every = [caution for each in several for caution in each.cautions.items()]
            counts = Counter(kind for kind, _ in every)
            of = "" if len(several) == 1 else " ({} of " + f"{len(several)} seeds)"
            found[name] = [f"{text.rstrip('.')}{of.format(counts[kind])}." for kind, text in dict(every).items()]
            found[name] += [NEAR_CHANCE] * (name in self.near_chance)
        return found

    @property
    def kind(self) -> str:
        return next(iter(self.methods.values()))[0].kind


def results_of_evaluations(evaluations: Mapping[str, Evaluation | Sequence[Evaluation]], title: str) -> Results:
    """Results from evaluations by name: one Evaluation, or a list with one per seed."""
    if not isinstance(evaluations, Mapping):
        got = type(evaluations).__name__
        raise TypeError(f"expected a dict of name -> Evaluation, got {got}; pass {{'map': evaluate(...), ...}}")
    if not evaluations:
        raise ValueError("expected a dict of name -> Evaluation, got an empty one; pass {'map': evaluate(...), ...}")
    methods: dict[str, list[Evaluation]] = {}
    for name, value in evaluations.items():
        several = [value] if not isinstance(value, Sequence) else list(value)
        if not several or not all(isinstance(each, Evaluation) for each in several):
            raise TypeError(f"expected an Evaluation for {name!r}, got {type(value).__name__}; pass evaluate's result")
        methods[str(name)] = several
    kinds = sorted({each.kind for several in methods.values() for each in several})
    if len(kinds) > 1:
        raise ValueError(f"expected evaluations of one kind, got {' and '.join(kinds)}; make one report for each")
    origins = {name: [{"method": name, "seed": i} for i in range(len(each))] for name, each in methods.items()}
    return Results(title, "", methods, origins)


NEAR_CHANCE = (
    "Near chance: not better than a constant answer (the commonest class, the mean target) by two standard errors over test "
    "examples; nothing of it is marked best or better."
)


def _gains_over_constant(evaluation: Evaluation) -> Tensor | None:
    """(N,) by how much each test example is answered better than by a constant; None if that is unknown."""
    target, arrays = evaluation.arrays.get("test/target"), evaluation.arrays
    if target is not None and evaluation.kind == "regression":
        rows = target.double().reshape(len(target), -1)
        return (rows - rows.mean(0)).square().mean(1) - arrays["test/squared_error"].double()
    if target is None or evaluation.kind not in ("classification", "segmentation"):
        return None
    counts = target.double() if target.ndim == 2 else torch.nn.functional.one_hot(target.long()).double()  # (N, C)
    return arrays["test/correct"].double() - counts[:, counts.sum(0).argmax()] / counts.sum(1).clamp(min=1)


def csv_text(results: Results) -> str:
    """results.csv: one row per method and seed, every metric in full precision, and warnings in the last column."""
    rows = [{key: repr(v) if isinstance(v, float) else v for key, v in row.items()} for row in results.rows()]
    return table_text(list(dict.fromkeys(key for row in rows for key in row)), rows)


def table_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV. A text that a spreadsheet would run, such as "=A1", gets an apostrophe; `table_rows` removes it."""
    text = io.StringIO()
    lines = [columns, *([row.get(key) for key in columns] for row in rows)]
    safe = ([f"'{cell}" if FORMULA.match(str(cell)) else cell for cell in line] for line in lines)
    broken = any("\r" in str(cell) for line in lines for cell in line)  # Python 3.11 quotes no carriage return
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL if broken else csv.QUOTE_MINIMAL).writerows(safe)
    return text.getvalue()


def table_rows(path: Path, texts: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Reads rows written by `table_text`. Cells are text; if `texts` is given, the other columns are numbers or None."""

    def value(key: str, text: str) -> Any:
        if texts is None or key in texts:
            return text
        return (int(text) if text.isdigit() else float(text)) if text else None

    with path.open(newline="", encoding="utf-8") as file:
        lines = [[cell[cell[:1] == "'" and bool(FORMULA.match(cell)) :] for cell in line] for line in csv.reader(file)]
    return [{key: value(key, text) for key, text in zip(lines[0], line, strict=True)} for line in lines[1:]]


def mean_over_seeds(key: str, several: Sequence[Evaluation]) -> float:
    # fmean gives the same digits in every Python; a plain sum does not.
    return fmean(each.metrics[key] for each in several)


def all_have_metric(key: str, several: Sequence[Evaluation]) -> bool:
    """Whether every evaluation has this metric."""
    return all(key in each.metrics for each in several)


def base_method(name: str) -> str:
    """The method behind a name: "tradi" for "tradi" and for its variant "tradi-diagonal"."""
    return name.partition("-")[0]


CRITERION = "validation/corrupt/accuracy"  # a setting is chosen by this, never by test rows
GROUPS = {"severities 1–3": (1, 2, 3), "severities 4–5": (4, 5)}


@dataclass(frozen=True)
class Sweep:
    """Variants of one method, ordered by the value of a setting; `chosen` is best on corrupted validation rows."""

    key: str
    values: dict[str, float]  # method or variant -> value, ascending
    chosen: str

    @property
    def base(self) -> str:
        return base_method(self.chosen)


def sweep_of(results: Results) -> Sweep | None:
    """The sweep of a task's results; None if it has none, or no criterion."""
    if results.sweep is None:
        return None
    ascending = sorted(results.sweep.values.items(), key=lambda item: item[1])
    values = {name: value for name, value in ascending if all_have_metric(CRITERION, results.methods[name])}
    if len(values) < 2:
        return None
    # On ties the smallest value of the setting wins.
    chosen = max(values, key=lambda name: mean_over_seeds(CRITERION, results.methods[name]))
    return Sweep(results.sweep.key, values, chosen)


def accuracies(evaluation: Evaluation) -> dict[str, float]:
    """Clean accuracy, and accuracy of groups of severities (types pooled, severities averaged), as far as measured.

    Clean accuracy is that of the rows that were corrupted, which may be fewer than all test rows.
    """
    found = {"clean": float(evaluation.arrays.get("corrupt/clean/accuracy", evaluation.metrics["accuracy"]))}
    for title, severities in GROUPS.items():
        keys = [f"corrupt/severity{s}/accuracy" for s in severities]
        known = [evaluation.metrics[key] for key in keys if key in evaluation.metrics]
        if known:
            found[title] = fmean(known)
    return found


def sweep_sentence(results: Results, sweep: Sweep) -> str:
    """A sentence on the chosen value and its accuracy on test data, beside the baseline."""
    chosen = results.methods[sweep.chosen]
    text = (
        f"{sweep.base}: {sweep.key} = {sweep.values[sweep.chosen]:g} is chosen of "
        f"{', '.join(f'{value:g}' for value in sweep.values.values())}: the best accuracy on damaged validation images, "
        f"{100 * mean_over_seeds(CRITERION, chosen):.2f} %. On test images it gives {_accuracy_text(chosen)}"
    )
    others = [name for name in results.methods if name not in sweep.values]
    beside = results.baseline if results.baseline in others else next(iter(others), None)
    return f"{text}; {beside} gives {_accuracy_text(results.methods[beside])}." if beside else f"{text}."


def _accuracy_text(several: Sequence[Evaluation]) -> str:
    each = [accuracies(evaluation) for evaluation in several]
    shares = {title: fmean(found[title] for found in each) for title in each[0]}
    return ", ".join(f"{100 * share:.2f} % ({title})" for title, share in shares.items())
