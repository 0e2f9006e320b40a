"""Figures of docs/results/papers.md from the kept runs of papers.py: errors over the severity of corruptions, and reliability.

    python benchmarks/papers_figures.py                                 # docs/figures/papers-TASK.png
    python benchmarks/papers_figures.py --kept FOLDER --out FOLDER --size smoke

Lines are means over seeds; hollow marks are published numbers. Reliability: the share of right answers by confidence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from papers_page import RESULTS, figure_of, load, read_kept
from rows import Row, by_key, read_rows, summary

from dissensus.bench.report.published_numbers import published_numbers
from dissensus.bench.task.config import Task
from dissensus.plots import charts

SEVERE = ("cifar100-node", "cifar100-node-vgg")  # tasks whose figure is over the severity
RELIABLE = ("cifar100-reliability",)
MEASURES = {"accuracy": "error", "nll": "NLL (nats)", "ece": "ECE"}
BINS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, default=RESULTS, help="folder of papers.csv and the kept runs")
    parser.add_argument("--out", type=Path, default=figure_of("").parent)
    parser.add_argument("--size", default="short")
    given = parser.parse_args()
    rows = [row for row in read_rows(given.kept / "papers.csv") if row["size"] == given.size]
    for name, found in by_key(rows, "task").items():
        task = load(name, given.size)
        if name in SEVERE:
            panels = severity_panels(task, found)
        elif name in RELIABLE:
            panels = reliability_panels(task, given.kept / f"{name}-{given.size}")
        else:
            continue
        figure = charts.curve_figure(panels, size=(4.0 * len(panels), charts.HEIGHT))
        path = given.out / figure_of(name).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(charts.png_bytes(figure))
        print(path)


def severity_panels(task: Task, rows: list[Row]) -> list[charts.Panel]:
    """Error, NLL and ECE over the severity, 0 for clean images, of each method that was run, and the published numbers."""
    theirs, palette = published_numbers(task.settings["reference"]), charts.colours(task.methods)
    severities = [int(each) for each in rows[0]["severities"].split()]
    panels = []
    for key, label in MEASURES.items():
        names = {0: key} | {severity: f"corrupt/severity{severity}/{key}" for severity in severities}
        curves = []
        found = by_key(rows, "method")
        for i, method in enumerate(each for each in task.methods if each in found):
            runs = found[method]
            means = [shown(key, summary(row[name] for row in runs)[0]) for name in names.values()]
            look = {"color": palette[method], **charts.marker_style(i)}
            curves.append(charts.Curve([*names], means, method, look))
        for method, numbers in theirs.items():
            there = {severity: numbers[name] for severity, name in names.items() if name in numbers}
            published = [shown(key, each.value) for each in there.values()]
            look = {"color": palette[method], "linestyle": ":", "marker": "o", "markerfacecolor": "none"}
            curves.append(charts.Curve([*there], published, f"{method}, published", look))
        axes = {"xlabel": "severity (0: clean)", "ylabel": label, "title": label}
        panels.append(charts.Panel(curves, axes, percent="" if key == "nll" else "y", ticks=[*names]))
    return panels


def shown(key: str, value: float) -> float:
    return 1 - value if key == "accuracy" else value


def reliability_panels(task: Task, folder: Path) -> list[charts.Panel]:
    """The share of right answers by confidence, in bins, of each network of the first seed."""
    panels = []
    edges = np.linspace(0, 1, BINS + 1)
    for method in task.methods:
        if not (path := folder / f"{method}-seed0.npz").is_file():
            continue
        confidence, correct = read_kept(path)
        place = np.clip(np.digitize(confidence, edges, right=True) - 1, 0, BINS - 1)
        held = [i for i in range(BINS) if (place == i).any()]
        means = [[float(each[place == i].mean()) for i in held] for each in (confidence, correct)]
        look = {"color": charts.PALETTE[0], "marker": "o"}
        title = f"{method}: says {confidence.mean():.0%}, right {correct.mean():.0%}"
        axes = {"xlabel": "confidence", "ylabel": "right", "title": title, "xlim": (0, 1), "ylim": (0, 1)}
        panels.append(charts.Panel([charts.DIAGONAL, charts.Curve(*means, "_", look)], axes, percent="xy"))
    return panels


if __name__ == "__main__":
    main()
