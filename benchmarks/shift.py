"""Collects finished bench runs of the tasks on damaged inputs: one CSV each for benchmarks/results, and their figures.

    dissensus bench node-corruptions --seeds 10 --jobs 16
    dissensus bench remedies --seeds 10 --jobs 16
    python benchmarks/shift.py runs/node-corruptions-short runs/remedies-short
    python benchmarks/tables.py

Tables in docs/results/covariate-shift.md are made from the CSV files alone; figures need the runs' folders.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from finished import finished
from rows import Row, write_rows

from dissensus.bench.report import figure_sections
from dissensus.bench.report.report_figures import write_png
from dissensus.bench.report.results import Results
from dissensus.plots import charts

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
SEVERITIES = (1, 2, 3, 4, 5)
ORIGIN = ("task", "size", "method", "seed", "commit", "dissensus", "torch", "device")
TEST = ("accuracy", "nll", "ece", "brier", "corrupt/accuracy", "corrupt/nll", "corrupt/ece")
KEPT = (*TEST, "validation/corrupt/accuracy", "implicit/distance", "implicit/explained", "cost/train_seconds")
KEPT += tuple(f"corrupt/severity{s}/{key}" for key in ("accuracy", "nll", "ece") for s in SEVERITIES)
ROBUST = {
    "accuracy": "accuracy", "nll": "NLL", "ece": "ECE",
    "corrupt/accuracy": "accuracy, damaged", "corrupt/nll": "NLL, damaged", "corrupt/ece": "ECE, damaged",
}  # fmt: skip
COLUMNS = {
    "node-corruptions": ROBUST | {"corrupt/severity5/accuracy": "accuracy, severity 5"},
    "remedies": {key: title for key, title in ROBUST.items() if key != "corrupt/nll"},
}
PAIRS = {  # beside the comparisons with the plain network: a title, and (method, what it is compared with)
    "node-corruptions": (
        "What a hotter posterior changes",
        [(f"node_bnn-gamma{gamma}", "node_bnn") for gamma in (4, 16, 64)],
    ),
    "remedies": (
        "All four beside all but one",
        [
            ("mc_dropout-all", name)
            for name in (
                "mc_dropout-no_augment",
                "deep_ensemble-no_dropout",
                "mc_dropout-no_ensemble",
                "mc_dropout-no_skip",
            )
        ],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that `dissensus bench` wrote, one per task")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the CSV files go")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="where the figures go")
    arguments = parser.parse_args()
    for folder in arguments.runs:
        results = finished(folder)
        task = next(iter(results.origins.values()))[0]["task"]
        path = arguments.results / f"{task.replace('-', '_')}.csv"
        write_rows(path, rows_of(results))
        print(path)
        write_figures(results, task, arguments.figures)


def rows_of(results: Results) -> list[Row]:
    return [
        {key: origin[key] for key in ORIGIN} | {key: repr(evaluation.metrics[key]) for key in KEPT if key in evaluation.metrics}
        for origin, evaluation in results.iterate_evaluations()
    ]  # fmt: skip


def write_figures(results: Results, task: str, folder: Path) -> None:
    """Error and NLL against severity, means over seeds; and what the latents of the first seed do to images."""
    palette = charts.colours(list(results.methods))
    for key, label in (("accuracy", "Error"), ("nll", "NLL (nats)")):
        values = {}
        for name, several in results.methods.items():
            found = [(e.arrays[f"corrupt/clean/{key}"], e.arrays[f"corrupt/by_severity/{key}"]) for e in several]
            clean, damaged = (np.mean([each.numpy() for each in part], axis=0) for part in zip(*found, strict=True))
            values[name] = (1 - clean, 1 - damaged) if key == "accuracy" else (clean, damaged)
        severities = next(iter(results.methods.values()))[0].severities
        figure = charts.corruption_curves(severities, values, label=label, percent=key == "accuracy", palette=palette)
        write_png(figure, folder / f"{task}-{'error' if key == 'accuracy' else key}.png")
    made = figure_sections.implicit_section({name: several[0] for name, several in results.methods.items()})
    for title, figure in made[1] if made else ():
        write_png(figure, folder / f"{task}-{title.rsplit(' ', 1)[1]}.png")


def shown(task: str, methods: Sequence[str]) -> list[str]:
    """Markdown of the figures that are there."""
    titles = {"error": "Error against severity, means over seeds", "nll": "NLL against severity, means over seeds"}
    titles |= {name: f"Images as functions of {name} see them" for name in methods}
    files = {f"{task}-{name}.png": title for name, title in titles.items()}
    return [f"![{title}](figures/{file})" for file, title in files.items() if (FIGURES / file).exists()]


if __name__ == "__main__":
    main()
