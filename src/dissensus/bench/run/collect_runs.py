"""Collects run folders into the results of a report."""

from collections.abc import Sequence
from typing import Any

from dissensus.bench.report.results import Results, SettingSweep
from dissensus.bench.run.extra_measures import with_reference, with_reference_halves
from dissensus.bench.run.run import Run
from dissensus.bench.task.objects import setting_value
from dissensus.evaluation.evaluation import Evaluation

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


def results_of_runs(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> Results:
    """Results of run folders of one task."""
    first = runs[0].config
    tasks = {(run.config.task, run.config.size) for run in runs}
    if len(tasks) > 1:
        shown = ", ".join(f"{task} ({size})" for task, size in sorted(tasks))
        raise ValueError(f"expected runs of one task and size in a report, got {shown}; make one report for each")
    evaluations = compare_with_reference(runs, evaluations)
    methods: dict[str, list[Evaluation]] = {}
    origins: dict[str, list[dict[str, Any]]] = {}
    seen: dict[tuple[str, int], Run] = {}
    for run, evaluation in zip(runs, evaluations, strict=True):
        config, made = run.config, run.provenance
        other = seen.setdefault((config.method, config.seed), run)
        if other is not run:  # it is unclear which of them counts
            what = f"{config.method} with seed {config.seed} in {other.folder} and in {run.folder}"
            raise ValueError(f"expected one run of each method and seed in a report, got {what}; name one of them")
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
        **{label: _common_value(runs, key) for label, key in FACTS.items()},
        # A name that appears twice was changed between runs.
        "Own code and rows": ", ".join(
            dict.fromkeys(" ".join(part) for run in runs for part in run.provenance.get("code", {}).items())
        ),
    }
    baseline = first.baseline if first.baseline in methods else None
    facts["Started"] = str(made.get("started", ""))
    focus, key = first.evaluation.get("focus"), first.evaluation.get("sweep")
    found = {run.config.method: setting_value(run.config.settings, key) for run in runs} if key else {}
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
        sweep=SettingSweep(key, values) if key and values else None,
    )


def compare_with_reference(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The evaluations; with against/NAME, seed by seed, if the task names a reference method."""
    name = runs[0].config.evaluation.get("against")
    if name is None:
        return list(evaluations)
    references = {run.config.seed: run.predictions() for run in runs if run.config.method == name}
    if missing := {run.config.seed for run in runs} - references.keys():
        raise ValueError(f"expected {name} among the runs of seed {min(missing)}, got only others; run it too")
    return [
        with_reference_halves(evaluation, references[run.config.seed])
        if run.config.method == name
        else with_reference(evaluation, run.predictions(), references[run.config.seed])
        for run, evaluation in zip(runs, evaluations, strict=True)
    ]


def _common_value(runs: Sequence[Run], key: str) -> str:
    """The common value of all runs, or all values."""
    return "; ".join(dict.fromkeys(str(run.provenance.get(key, "")) for run in runs))
