"""The table and sentences of docs/results/embedded.md from what `dissensus bench embedded-width` wrote.

    dissensus bench embedded-width --seeds 3 --jobs 2 --out FOLDER
    python benchmarks/embedded_width.py FOLDER         # into benchmarks/results and docs/figures
    python benchmarks/tables.py

The intervals of claims count test examples, which are not kept here: they are read from the claims as they were written.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rows import markdown, paired, read_rows
from scipy.stats import spearmanr

import dissensus as ds
from dissensus.bench.report.comparisons import Claim
from dissensus.bench.report.results import table_rows
from dissensus.bench.run.run_folder import ORIGIN
from dissensus.bench.width_axis import TEXTS, accuracy_table, width_verdicts

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
ROWS, CLAIMS = RESULTS / "embedded_width.csv", RESULTS / "embedded_width_claims.csv"
FASHION = RESULTS / "embedded_width_fashion.csv"  # results.csv of the task with data.name=fashion_mnist
SIGNS = {"modulation": ds.Modulation.sign(), "form": "talk", "regime": "independent"}  # as in the task
COPIED = {
    "results.csv": ROWS,
    "claims.csv": CLAIMS,
    "widths.png": FIGURES / "embedded-width.png",
    "transition.png": FIGURES / "embedded-transition.png",
}


def page() -> str:
    """Sentences on every question, the accuracies, and where they come from."""
    rows = table_rows(ROWS, TEXTS)
    found = [Claim(*(row[key] for key in Claim._fields)) for row in table_rows(CLAIMS, TEXTS)]
    accuracies = accuracy_table(rows)
    kept = [i for i, name in enumerate(accuracies.columns) if name in ("M = 1", "M = 8", "M = 32")]
    lines = [
        [line.label, line.unit, *(line.cells[i].text for i in kept)]
        for line in accuracies.rows
        if line.label.startswith(("0.25×", "1×", "4×"))
    ]
    table = markdown(["width", "members", *(accuracies.columns[i] for i in kept)], lines)
    seeds = len({row["seed"] for row in rows})
    commit, torch, device, _ = ("; ".join(dict.fromkeys(row[key] for row in rows)) for key in ORIGIN)
    command = f"dissensus bench embedded-width --seeds {seeds} --jobs N"
    said = []
    for question, _, rest in (each.partition("?") for each in width_verdicts(found)):
        first, *others = rest.strip().rstrip(".").split("; ")
        more = f"; {len(others)} more in the file" if others else ""
        said.append(f"- **{question}?** {first}{more}.")
    said.append(facts_of(rows))
    lost = sum(row["diverged"] is not None for row in rows)
    left = f" {lost} of {len(rows)} ensembles diverged and are left out." if lost else ""
    return "\n".join([
        *said,
        "",
        "Accuracy of the ensemble, of a member in brackets, in %:",
        "",
        table,
        "",
        f"*`{command}`: mean over {seeds} seeds; intervals count seeds and test digits, and are "
        f"widened by Holm's adjustment for the claims on a question (`{CLAIMS.name}`).{left} Commit {commit}, torch {torch}, "
        f"{device}.*",
    ])  # fmt: skip


def facts_of(rows: list[dict[str, Any]]) -> str:
    """The most accurate M of every width; and what the widest with the most members costs and could gain."""
    means: dict[tuple[str, int, int], list[float]] = {}
    sizes = {}
    for row in rows:
        if row["p"] is None and row["accuracy"] is not None:
            means.setdefault((row["method"], row["units"], row["members"]), []).append(row["accuracy"])
            sizes[row["method"], row["units"], row["members"]] = row["parameters"]
    found = {key: sum(values) / len(values) for key, values in means.items()}
    widths, most = sorted({units for _, units, _ in found}), max(members for *_, members in found)
    best = [
        max(
            (found["batch_ensemble", n, m], m) for _, n, m in found if ("batch_ensemble", n, m) in found and n == units
        )[1]
        for units in widths
    ]
    shown = ", ".join(f"{m} for N = {units}" for m, units in zip(best, widths, strict=True))
    wide = widths[-1]
    share = sizes["batch_ensemble", wide, most] / sizes["deep_ensemble", wide, most]
    gain = found["deep_ensemble", wide, most] - found["deep_ensemble", wide, 1]
    return (
        f"- **Point estimates, no test:** the most accurate embedded M is {shown}. {most} members of N = {wide} "
        f"have {100 * share:.1f} % of the parameters of {most} networks, whose whole gain over one is {100 * gain:.1f} points."
    )


def verdict_page(path: Path = ROWS) -> str:
    """What `theory.regime` says of every cell before training, beside the points that were lost; and how well the two agree."""
    cells: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {}
    kept = [row for row in read_rows(path) if not row["p"] and row["accuracy"]]
    for row in kept:
        cells.setdefault((int(row["units"]), int(row["members"])), {}).setdefault(row["method"], []).append(row)
    lines, crowding, points, wrong = list[list[str]](), list[float](), dict[tuple[int, int], float](), 0
    for (units, members), found in sorted(cells.items()):
        each = paired(found["batch_ensemble"], found["deep_ensemble"], "accuracy")
        assert each is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = ds.nets.MLP(784, 10, hidden=(units, units), parameterization="ntk")
            said = ds.theory.regime(ds.BatchEnsemble(network, members=members, **SIGNS))
        if members > 1:  # one member shares its weights with nobody
            crowding.append(said.crowding)
            points[units, members] = -each.difference
        wrong += said.kind == "independent" and each.upper < -0.01
        ends = [f"{100 * value:+.2f}".replace("-", "−") for value in (each.difference, each.lower, each.upper)]
        cell = [str(units), str(members), f"{said.crowding:.3f}", str(said.kind), f"{said.effective_members:.1f}"]
        if members in (8, 32) and units in (16, 64, 256):
            lines.append([*cell, f"{ends[0]} ({ends[1]} … {ends[2]})"])
    rank = float(spearmanr(crowding, list(points.values())).statistic)
    same = [(a, b) for a in points for b in points if a[0] < b[0] and a[1] * b[0] == b[1] * a[0]]
    less = sum(points[wide] < points[narrow] for narrow, wide in same)
    table = markdown(["N", "M", "(M − 1)/N", "verdict", "effective members", "points, embedded − independent"], lines)
    seeds = len({row["seed"] for row in kept})
    commits = " and ".join(dict.fromkeys(row["commit"] for row in kept))
    shown = f"{table}\n\n" if path == ROWS else ""
    return (
        f"{shown}The rank correlation of (M − 1)/N and the points lost is {rank:.2f} over the {len(points)} cells with "
        f"M ≥ 2; of cells whose interval (95 %, {seeds} seeds) lies below −1 point, {wrong} are called independent. "
        f"Points lost depend on N beyond that: of two cells with the same M/N the wider loses less in {less} of {len(same)} "
        f"(`{path.name}`, commit {commits}, {kept[0]['device']})."
    )


def main(folder: Path) -> None:
    for name, target in COPIED.items():
        shutil.copyfile(folder / name, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
