"""The table and sentences of docs/embedded.md from what `dissensus bench embedded-width` wrote.

    dissensus bench embedded-width --seeds 3 --jobs 2 --out FOLDER
    python benchmarks/embedded_width.py FOLDER         # into benchmarks/results and docs/figures
    python benchmarks/tables.py

The intervals of claims count test examples, which are not kept here: they are read from the claims as they were written.
"""

import shutil
import sys
from pathlib import Path

from dissensus.bench.run.provenance import ORIGIN
from dissensus.bench.width.claims import width_verdicts
from dissensus.bench.width.grid import TEXTS
from dissensus.bench.width.report import accuracy_table
from dissensus.reporting.estimates import Claim
from dissensus.reporting.results import table_rows

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
ROWS, CLAIMS = RESULTS / "embedded_width.csv", RESULTS / "embedded_width_claims.csv"
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
    heading = ["width", "members", *accuracies.columns]
    lines = [[line.label, line.unit, *(cell.text for cell in line.cells)] for line in accuracies.rows]
    table = [f"| {' | '.join(heading)} |", "|" + "---|" * len(heading), *(f"| {' | '.join(line)} |" for line in lines)]
    seeds = len({row["seed"] for row in rows})
    commit, torch, device, _ = ("; ".join(dict.fromkeys(row[key] for row in rows)) for key in ORIGIN)
    command = f"dissensus bench embedded-width --seeds {seeds} --jobs N"
    said = [
        f"- **{question}?** {rest.strip()}"
        for question, _, rest in (each.partition("?") for each in width_verdicts(found))
    ]
    lost = sum(row["diverged"] is not None for row in rows)
    left = f" {lost} of {len(rows)} ensembles diverged and are left out." if lost else ""
    return "\n".join([
        *said,
        "",
        "Accuracy of the ensemble, of a member in brackets, in %:",
        "",
        *table,
        "",
        f"*`{command}`: mean over {seeds} seeds; intervals count seeds and test digits.{left} Commit {commit}, torch {torch}, "
        f"{device}.*",
    ])  # fmt: skip


def main(folder: Path) -> None:
    for name, target in COPIED.items():
        shutil.copyfile(folder / name, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
