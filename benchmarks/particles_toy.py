"""Collects finished bench runs of the particle tasks: one CSV each for benchmarks/results, and their figures.

    dissensus bench toy-regression --size paper --seeds 5
    dissensus bench toy-classification --size paper --seeds 5
    dissensus bench toy-regression-small --size paper --seeds 5
    dissensus bench toy-classification-small --size paper --seeds 5
    dissensus bench forde-variants --size paper --seeds 5
    dissensus bench lengthscales --size paper --seeds 5
    python benchmarks/particles_toy.py runs/*-paper
    python benchmarks/tables.py

Runs with other settings than the task's are filed under a name of their own (COMMANDS in tables.py says how they are made):

    python benchmarks/particles_toy.py runs/toy-regression-adam --name toy-regression-adam

Tables and sentences in docs/results/particles.md are made from the CSV files alone; figures need the runs' folders.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finished import finished
from rows import write_rows

from dissensus.bench.report import figure_sections
from dissensus.bench.report.prose import question_sentences
from dissensus.bench.report.results import GROUPS, Results, SettingSweep, accuracies
from dissensus.evaluation.evaluation import Evaluation, PredictionKind
from dissensus.plots import charts

ROOT = Path(__file__).parents[1]
ORIGIN = ("task", "size", "method", "seed", "alpha", "commit", "dissensus", "torch", "device")
KEPT = ("region/", "distances/", "cost/", "validation/", "corrupt/severity")
TEST = (
    *("accuracy", "nll", "ece", "rmse", "corrupt/accuracy", "corrupt/nll", "corrupt/ece"),
    *("ood/fashion/auroc", "members/diversity", "members/effective_members"),
)
FOCUS, BASELINE = "forde", "deep_ensemble"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that `dissensus bench` wrote, one per task")
    parser.add_argument("--name", help="what the files of one folder are called; the task's name by default")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the CSV files go")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", help="where the figures go")
    arguments = parser.parse_args()
    if arguments.name is not None and len(arguments.runs) > 1:
        raise SystemExit(f"expected one folder with --name, got {len(arguments.runs)}; name them one by one")
    for folder in (arguments.results, arguments.figures):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in arguments.runs:
        results = finished(folder)
        task = arguments.name or next(iter(results.origins.values()))[0]["task"]
        path = arguments.results / f"{task.replace('-', '_')}.csv"
        write_rows(path, rows_of(results))
        print(path)
        for name, figure in figures_of(results, task).items():
            figure.savefig(arguments.figures / f"{name}.png", dpi=110, facecolor="white")
            print(arguments.figures / f"{name}.png")
        for sentence in question_sentences(results):
            print(f"  {sentence}")


def rows_of(results: Results) -> list[dict[str, Any]]:
    """One row per method and seed: where it comes from, and the numbers that tables and sentences are made of."""
    alphas = {} if results.sweep is None else results.sweep.values
    rows = []
    for origin, evaluation in results.iterate_evaluations():
        kept = {key: f"{value:.6g}" for key, value in evaluation.metrics.items() if key in TEST or key.startswith(KEPT)}
        about = {key: origin.get(key, "") for key in ORIGIN} | {"alpha": alphas.get(origin["method"], "")}
        rows.append(about | kept)
    return rows


def results_of_rows(rows: list[dict[str, str]]) -> Results:
    """What `rows_of` was given, as far as the rows tell: enough for sentences."""
    methods: dict[str, list[Evaluation]] = {}
    origins: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        metrics = {key: float(value) for key, value in row.items() if key not in ORIGIN and value}
        kind: PredictionKind = "regression" if "rmse" in metrics else "classification"
        methods.setdefault(row["method"], []).append(Evaluation(kind, metrics, {}, ""))
        origins.setdefault(row["method"], []).append({"method": row["method"], "seed": int(row["seed"])})
    alphas = {row["method"]: float(row["alpha"]) for row in rows if row["alpha"]}
    return Results(
        title="",
        description="",
        methods=methods,
        origins=origins,
        baseline=BASELINE if BASELINE in methods else None,
        focus=FOCUS if FOCUS in methods else None,
        sweep=SettingSweep("alpha", alphas) if alphas else None,
    )


def sentences(rows: list[dict[str, str]]) -> list[str]:
    """What the numbers of one task say."""
    return question_sentences(results_of_rows(rows))


def grouped_severities(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows with the accuracy of severities 1–3 and of 4–5 as columns of their own."""
    found = []
    for row, several in zip(rows, map(results_of_rows, ([row] for row in rows)), strict=True):
        (evaluation,) = next(iter(several.methods.values()))
        each = accuracies(evaluation) if "accuracy" in evaluation.metrics else {}
        found.append(row | {title: f"{each[title]:.6g}" for title in GROUPS if title in each})
    return found


def figures_of(results: Results, task: str) -> dict[str, Any]:
    """File name -> figure, of the first seed where seeds differ."""
    first = {name: several[0] for name, several in results.methods.items()}
    palette = charts.colours(list(first))
    made = {
        task: figure_sections.prediction_section(first, palette) or figure_sections.sweep_section(results, palette),
        f"{task}-distances": figure_sections.epoch_section(results, palette, "distances"),
    }
    return {name: section[1][0][1] for name, section in made.items() if section is not None}


if __name__ == "__main__":
    main()
