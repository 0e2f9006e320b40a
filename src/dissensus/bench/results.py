"""The results a report is made of: evaluations by method, one per seed, and where they come from."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dissensus.bench.arguments import value_of
from dissensus.bench.names import unknown
from dissensus.bench.run import Run
from dissensus.evaluate import Evaluation


class Swept(NamedTuple):
    """A setting that runs differ in, and its value in those that have it."""

    key: str
    values: dict[str, float]  # method -> value


@dataclass(frozen=True, eq=False)
class Results:
    """Evaluations of several methods on one task."""

    title: str
    description: str
    methods: dict[str, list[Evaluation]]  # one evaluation per seed
    origins: dict[str, list[dict[str, Any]]]  # for each of them, what to write in front of its row
    baseline: str | None = None
    facts: dict[str, str] = field(default_factory=dict)  # provenance
    reference: dict[str, Any] = field(default_factory=dict)  # published numbers, as in a task
    focus: str | None = None  # the method that sentences on regions are about
    sweep: Swept | None = None
    holm: bool = False  # whether p-values are adjusted for the number of comparisons in a table

    def seeds(self, method: str) -> list[Any]:
        """The seeds of its evaluations; their numbers where nobody named seeds."""
        return [origin.get("seed", i) for i, origin in enumerate(self.origins[method])]

    def compared_with(self, baseline: str | None = None, *, holm: bool = False) -> Results:
        """The same with another baseline, where one is given, and with p-values adjusted or not."""
        if baseline is not None and baseline not in self.methods:
            raise unknown("a method of the report as baseline", baseline, self.methods)
        return replace(self, baseline=self.baseline if baseline is None else baseline, holm=holm)

    @property
    def kind(self) -> str:
        return next(iter(self.methods.values()))[0].kind


def results_of_runs(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> Results:
    """Results of run folders of one task."""
    first = runs[0].config
    tasks = {(run.config.task, run.config.size) for run in runs}
    if len(tasks) > 1:
        shown = ", ".join(f"{task} ({size})" for task, size in sorted(tasks))
        raise ValueError(f"expected runs of one task and size in a report, got {shown}; make one report for each")
    methods: dict[str, list[Evaluation]] = {}
    origins: dict[str, list[dict[str, Any]]] = {}
    for run, evaluation in zip(runs, evaluations, strict=True):
        config, made = run.config, run.provenance
        origin = {"task": config.task, "size": config.size, "method": config.method, "seed": config.seed}
        origin |= {key: made.get(key, "") for key in ("commit", "dissensus", "torch", "device")}
        methods.setdefault(config.method, []).append(evaluation)
        origins.setdefault(config.method, []).append(origin)
    made = runs[0].provenance
    seeds = sorted({run.config.seed for run in runs})
    facts = {
        "Task": f"{first.task}, size {first.size}",
        "Seeds": ", ".join(map(str, seeds)),
        "Test examples": f"{len(evaluations[0].arrays['test/nll']):,}",
        **{label: _shared(runs, key) for label, key in FACTS.items()},
    }
    baseline = first.baseline if first.baseline in methods else None
    facts["Started"] = str(made.get("started", ""))
    focus, key = first.evaluation.get("focus"), first.evaluation.get("sweep")
    found = {run.config.method: value_of(run.config.settings, key) for run in runs} if key else {}
    values = {method: float(value) for method, value in found.items() if value is not None}
    return Results(
        title=first.title,
        description=first.description,
        methods=methods,
        origins=origins,
        baseline=baseline,
        facts={k: v for k, v in facts.items() if v},
        reference=first.reference,
        focus=focus if focus in methods else None,
        sweep=Swept(key, values) if key and values else None,
    )


def results_of_evaluations(evaluations: Mapping[str, Evaluation | Sequence[Evaluation]], title: str) -> Results:
    """Results of evaluations by name, each one or several (seeds)."""
    if not isinstance(evaluations, Mapping) or not evaluations:
        raise ValueError("expected a dict of name -> Evaluation, got none; pass {'map': evaluate(...), ...}")
    methods: dict[str, list[Evaluation]] = {}
    for name, value in evaluations.items():
        several = [value] if not isinstance(value, Sequence) else list(value)
        if not several or not all(isinstance(each, Evaluation) for each in several):
            raise TypeError(
                f"expected an Evaluation for {name!r}, got {type(value).__name__}; pass what evaluate returns"
            )
        methods[str(name)] = several
    kinds = sorted({each.kind for several in methods.values() for each in several})
    if len(kinds) > 1:
        raise ValueError(f"expected evaluations of one kind, got {' and '.join(kinds)}; make one report for each")
    origins = {name: [{"method": name, "seed": i} for i in range(len(each))] for name, each in methods.items()}
    return Results(title, "", methods, origins)


def csv_text(results: Results) -> str:
    """results.csv: one row per method and seed, every metric in full precision."""
    rows = [
        origin | {key: repr(value) for key, value in evaluation.metrics.items()}
        for name, several in results.methods.items()
        for origin, evaluation in zip(results.origins[name], several, strict=True)
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


FACTS = {
    "Command": "command",
    "dissensus": "dissensus",
    "Commit": "commit",
    "Python": "python",
    "torch": "torch",
    "numpy": "numpy",
    "Device": "device",
    "Threads": "threads",
    "Platform": "platform",
}


def _shared(runs: Sequence[Run], key: str) -> str:
    """The value all runs have, or all of them."""
    return "; ".join(dict.fromkeys(str(run.provenance.get(key, "")) for run in runs))
