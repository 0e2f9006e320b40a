"""Numbers and comparisons of finished tasks as CSV in benchmarks/results/tasks, their figures, and what they say.

    dissensus bench standard --seeds 5 --jobs 2            # and so on: COMMANDS below has one for each task
    python benchmarks/task_results.py runs/standard-short runs/label-noise-short
    python benchmarks/tables.py

Every method is compared with the task's baseline on the seeds and test examples that both have, by the report's own
statistics, with Holm's adjustment for all comparisons of the task that are shown. Pages are made from the CSV files alone.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from finished import comparison_rows, finished
from rows import Row, markdown, origins_of, read_rows, seeds_of, write_rows

from dissensus.bench.report.comparisons import (
    SIGNIFICANT,
    MethodComparison,
    compare_methods,
    comparison_family,
    spread_of,
)
from dissensus.bench.report.results import Results
from dissensus.bench.report.tables import measures_and_draws, p_text
from dissensus.bench.run.jobs import results_of_runs
from dissensus.bench.run.run import Run
from dissensus.bench.run_grid import begin_cells, cells_of
from dissensus.bench.task.config import load_task, read_task

HERE = Path(__file__).parent
FOLDER = HERE / "results" / "tasks"
FIGURES = HERE.parent / "docs" / "figures"
ORIGIN = ("task", "size", "method", "seed", "commit", "dissensus", "torch", "device")


class Column(NamedTuple):
    title: str
    factor: float = 1.0
    digits: int = 3


PERCENT = {"accuracy": "accuracy %", "ece": "ECE %", "coverage90": "coverage of 90 %, %"}
CLASSES = {key: Column(title, 100, 1) for key, title in PERCENT.items() if key != "coverage90"} | {"nll": Column("NLL")}
SECONDS = {"cost/train_seconds": Column("training, s", 1, 0)}
NEAR = {
    "against/total_variation": Column("total variation"),
    "against/agreement": Column("agreement %", 100, 1),
    "against/halves/total_variation": Column("halves of the chains"),
    "against/rhat": Column("R̂", 1, 2),
}
SHOWN: dict[str, dict[str, Column]] = {
    "standard": CLASSES | {"ood/fashion/auroc": Column("AUROC %, clothes", 100, 1)} | SECONDS,
    "standard-uci": {
        "rmse": Column("RMSE", 1, 2),
        "nll": Column("NLL"),
        "crps": Column("CRPS", 1, 2),
        "coverage90": Column("coverage of 90 %, %", 100, 1),
        **SECONDS,
    },
    "reference-posterior": NEAR | {"nll": Column("NLL")},
    "reference-uci": NEAR | {"nll": Column("NLL")},
    "reference-digits": NEAR | {"nll": Column("NLL")},
    "bimodal": NEAR | {"nll": Column("NLL")},
    "adversarial": {  # means over ε, then at single ones
        "accuracy": Column("accuracy %", 100, 1),
        "attack/fgsm/accuracy": Column("FGSM", 100, 1),
        "attack/pgd/accuracy": Column("PGD", 100, 1),
        "attack/transfer/accuracy": Column("PGD on one member", 100, 1),
        "attack/pgd/nll": Column("NLL, PGD"),
        "attack/pgd/ece": Column("ECE %, PGD", 100, 1),
        **{f"attack/pgd/{e}/accuracy": Column(f"PGD, ε = {e}", 100, 1) for e in ("0.02", "0.05", "0.1")},
        "attack/pgd/0.05/total": Column("entropy, PGD, ε = 0.05"),
        "fool/confidence": Column("confidence on fooling inputs %", 100, 1),
    },
    "label-noise": {
        "accuracy": Column("accuracy %", 100, 1),
        "nll": Column("NLL"),
        "noise/memorised": Column("wrong labels memorised %", 100, 1),
        "noise/recovered": Column("right class recovered %", 100, 1),
    },
    "data-size": CLASSES,
    "cold-posterior": CLASSES,
}
HIDDEN = {  # columns that are in the files alone
    **dict.fromkeys(
        ("reference-posterior", "reference-uci", "reference-digits", "bimodal"),
        ("against/agreement", "against/halves/total_variation", "against/rhat"),
    ),
    "standard-uci": ("crps", *SECONDS),
    "label-noise": ("nll", "noise/recovered"),
    "data-size": ("ece",),
    "cold-posterior": ("accuracy",),
    "adversarial": (
        *("attack/fgsm/accuracy", "attack/pgd/nll", "attack/pgd/0.05/total", "fool/confidence"),
        *(f"attack/pgd/{e}/accuracy" for e in ("0.02", "0.05", "0.1")),
    ),
}
PLACES = {
    "label-noise": ("0.2", "0.8"),
    "data-size": ("250", "2000"),
    "cold-posterior": ("0.1", "1", "10"),
}  # of the first axis
FOLDED = (  # rows within chance of the baseline are left out
    *("standard", "standard-uci", "reference-posterior", "reference-uci", "reference-digits", "adversarial"),
    *("label-noise", "data-size", "cold-posterior"),
)
UNCOMPARED = (*SECONDS, *(key for key in NEAR if key != "against/total_variation"))
COMMANDS = {
    name: f"dissensus bench {name} --seeds {seeds}{data}"
    for name, seeds, data in (
        ("standard", 5, ""),
        ("standard-uci", 5, " --data FOLDER"),
        ("reference-posterior", 5, ""),
        ("reference-uci", 5, " --data FOLDER"),
        ("reference-digits", 3, ""),
        ("bimodal", 5, ""),
        ("adversarial", 5, ""),
        ("label-noise", 3, ""),
        ("data-size", 3, ""),
        ("cold-posterior", 3, ""),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders that `dissensus bench` wrote, one per task")
    parser.add_argument("--data", help="folder of the user's data sets")
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    given = parser.parse_args()
    for folder in given.runs:
        first = runs_in(folder)[0]
        name = first.config.task
        cells = list(results_of_cells(folder, name, first.config.size, given.data))
        write_rows(
            given.results / f"{name}.csv", [row for at, results in cells for row in number_rows(name, at, results)]
        )
        write_rows(given.results / f"{name}-pairs.csv", pair_rows(name, cells))
        for figure in ("grid", "curves"):
            if (drawn := folder / f"{figure}.png").exists():
                shutil.copy(drawn, given.figures / f"{name}-{figure}.png")
        print(given.results / f"{name}.csv")


def runs_in(folder: Path) -> list[Run]:
    """Of a grid, those of all cells."""
    found = [Run.open(path.parent) for path in sorted(folder.rglob("config.toml"))]
    if not found:
        raise SystemExit(f"expected runs in {folder}, got none; run `dissensus bench` first")
    return found


def results_of_cells(
    folder: Path, name: str, size: str, source: str | None
) -> Iterator[tuple[dict[str, float], Results]]:
    """Of a task over a grid, every cell with its place; of any other, one without a place."""
    task = load_task(name, size=size)
    if not task.settings.get("grid"):
        yield {}, finished(folder)
        return
    runs = runs_in(folder)
    seeds = sorted({run.config.seed for run in runs})
    methods = [method for method in task.methods if any(run.config.method == method for run in runs)]
    cells = cells_of(task, methods)
    for cell, several in zip(cells, begin_cells(cells, methods, seeds, folder, source=source), strict=True):
        yield cell.axis_values, results_of_runs(several, [run.measure() for run in several])


def number_rows(name: str, at: dict[str, float], results: Results) -> list[Row]:
    return [
        {**at, **{key: origin.get(key, "") for key in ORIGIN}}
        | {key: f"{evaluation.metrics[key]:.6g}" for key in SHOWN[name] if key in evaluation.metrics}
        for origin, evaluation in results.iterate_evaluations()
    ]


def pair_rows(name: str, cells: list[tuple[dict[str, float], Results]]) -> list[Row]:
    """Every method minus the baseline in every cell, one family."""
    found: dict[tuple[str, ...], MethodComparison | None] = {}
    wanted = [key for key in SHOWN[name] if key not in UNCOMPARED]
    for number, (_, results) in enumerate(cells):
        _, draws = measures_and_draws(results, wanted)
        for key, each in draws.items():
            for method in each:
                if method != (baseline := results.baseline or "") and baseline in each:
                    found[str(number), key, method] = compare_methods(each[method], each[baseline], seeds_alone=True)
    every = comparison_family(found, holm=True)
    rows = []
    for (number, *_), row in comparison_rows(every):
        at, results = cells[int(number)]
        rows.append({**at, "baseline": results.baseline, **row})
    return rows


def pages() -> Iterator[tuple[str, str]]:
    """(task, its table and what it says) of every task that has a file."""
    for name in SHOWN:
        if rows := read_rows(FOLDER / f"{name}.csv"):
            yield name, page(name, rows, read_rows(FOLDER / f"{name}-pairs.csv"))


def page(name: str, rows: list[Row], pairs: list[Row]) -> str:
    axes = {axis: str(table.get("label", axis)) for axis, table in read_task(name).get("grid", {}).items()}
    shown = {key: column for key, column in SHOWN[name].items() if key not in HIDDEN.get(name, ())}
    columns = {key: column for key, column in shown.items() if any(row.get(key) for row in rows)}
    bold = {cell_of(row, axes): row for row in pairs if float(row["p_value"]) < SIGNIFICANT}
    kept = {"map", *(row["baseline"] for row in pairs)}
    lines, folded, last = [], list[str](), dict[str, list[str]]()
    for place in dict.fromkeys(tuple(row[axis] for axis in axes) for row in rows):
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if row["method"] == method and tuple(row[axis] for axis in axes) == place]
            sure = [(*place, key, method) in bold for key in columns]
            cells = [marked(number(mine, key, columns[key]), yes) for key, yes in zip(columns, sure, strict=True)]
            there = name not in PLACES or f"{float(place[0]):g}" in PLACES[name]
            telling = any(sure) or (method in kept and last.get(method) != cells) or name not in FOLDED
            if mine and there and telling:
                last[method] = cells
                lines.append([*(f"{float(value):g}" for value in place), method, *cells])
            else:
                folded += [method] if mine else []
    table = markdown([*axes.values(), "method", *(column.title for column in columns.values())], lines)
    drawn = [
        f"![{text}](figures/{name}-{figure}.png)"
        for figure, text in (
            ("grid", f"{name}: quality over the setting"),
            ("curves", f"{name}: what is learned with every epoch"),
        )
        if (FIGURES / f"{name}-{figure}.png").exists()
    ]
    said = [*sentence(pairs, columns, axes), *chain_sentence(rows)]
    if folded:
        said.append(f"{len(folded)} more rows are in the file." if axes else f"No bold number: {', '.join(folded)}.")
    facts = f"{seeds_of(unique(rows), {})}; {origins_of(rows)}; `tasks/{name}.csv`"
    return "\n\n".join([table, " ".join(said), *drawn, f"*`{COMMANDS[name]}`; {facts}.*"])


def chain_sentence(rows: list[Row]) -> list[str]:
    """How far the halves of the reference's chains are apart, and whether the chains have mixed."""
    mine = [row for row in rows if row.get("against/rhat")]
    if not mine:
        return []
    halves, rhat = (number(mine, key, NEAR[key]) for key in ("against/halves/total_variation", "against/rhat"))
    return [f"Halves of the chains of HMC: total variation {halves}; R̂ {rhat}."]


def unique(rows: list[Row]) -> list[Row]:
    """One row for each method and seed."""
    return list({(row["method"], row["seed"]): row for row in rows}.values())


def cell_of(row: Row, axes: dict[str, str]) -> tuple[str, ...]:
    return (*(row[axis] for axis in axes), row["metric"], row["method"])


def marked(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def number(rows: list[Row], key: str, column: Column) -> str:
    values = [column.factor * float(row[key]) for row in rows if row.get(key)]
    if not values:
        return "–"
    half = f" ± {rounded(spread_of(values, 0.0).half_width(), column.digits)}" if len(set(values)) > 1 else ""
    return f"{rounded(math.fsum(values) / len(values), column.digits)}{half}"


def rounded(value: float, digits: int) -> str:
    """Halves away from zero, though the last bit of a sum may be another elsewhere."""
    return f"{value * (1 + 1e-9):.{digits}f}"


def sentence(pairs: list[Row], columns: dict[str, Column], axes: dict[str, str]) -> list[str]:
    """What the bold numbers are, and the smallest and largest differences among them."""
    if not pairs:
        return []
    baseline, count = pairs[0]["baseline"], pairs[0]["comparisons"]
    sure = [row for row in pairs if float(row["p_value"]) < SIGNIFICANT]
    counted = " or ".join(dict.fromkeys(row["counted"] for row in pairs))
    how = f"(p < {SIGNIFICANT} by Holm, counting {counted})"
    first = f"Bold: differs from {baseline}, {len(sure)} of {count} comparisons {how}."
    if not sure:
        least = min(pairs, key=lambda row: float(row["p_value"]))
        column = columns[least["metric"]]
        return [f"{first} The nearest to it: {least['method']} in {column.title} ({p_text(float(least['p_value']))})."]
    return [first]


if __name__ == "__main__":
    main()
