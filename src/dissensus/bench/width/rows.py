"""The numbers of a task over widths: one row for every ensemble and seed, and arrays over the columns of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dissensus.bench.run.processes import DIVERGED
from dissensus.bench.run.provenance import ORIGIN
from dissensus.bench.run.records import read_evaluation, read_predictions
from dissensus.bench.run.run import Run
from dissensus.bench.width.grid import EMBEDDED, INDEPENDENT, GridCell
from dissensus.core.predictive import ClassificationPredictive
from dissensus.metrics import accuracy_values, effective_members
from dissensus.reporting.estimates import Array, array_over
from dissensus.storage.files import read_json

PLACE = ("method", "factor", "units", "members", "p", "gamma", "seed")
NUMBERS = ("parameters", "diverged", "accuracy", "member_accuracy", "train_member_accuracy", "effective")
COLUMNS = (*PLACE, *NUMBERS, *ORIGIN)
TEXTS = ("method", "gamma", "question", "about", "unit", *ORIGIN)  # columns, also of claims

# One ensemble with one seed; of independent ones, the mean over the disjoint subsets of that size. `diverged`: the step at
# which a loss was no longer finite, after which there are no numbers. "examples": name of a number -> (n,), not in a file.
WidthRow = dict[str, Any]


def rows_of_runs(cells: Sequence[GridCell], runs: Sequence[Run]) -> list[WidthRow]:
    """The rows of runs that are over, one for each embedded ensemble and one for each size of independent ones."""
    sizes = sorted({cell.members for cell in cells if cell.method == EMBEDDED})
    found = [
        _row(cell, run, members)
        for cell, run in zip(cells, runs, strict=True)
        for members in ([cell.members] if cell.method == EMBEDDED else sizes)
    ]
    return sorted(found, key=lambda row: [row["p"] is not None, *(row[key] or 0 for key in PLACE)])


def _row(cell: GridCell, run: Run, members: int) -> WidthRow:
    row: WidthRow = {**vars(cell), "members": members, "seed": cell.config.seed, "diverged": None, "parameters": 0}
    row |= {key: str(run.provenance.get(key, "")) for key in ORIGIN}
    if (run.folder / DIVERGED).is_file():
        return row | {"diverged": int(read_json(run.folder / DIVERGED)["step"])}
    whole, test = read_evaluation(run.folder).metrics, read_predictions(run.folder / "predictions" / "test.safetensors")
    y, count = test.targets, cell.members // members
    used = test.predictive.members[: count * members].double()
    subsets = used.view(count, members, *used.shape[1:])  # disjoint, (M, n, C) each
    examples = {
        "accuracy": torch.stack([accuracy_values(ClassificationPredictive(each).mean, y) for each in subsets]).mean(0),
        "member_accuracy": torch.stack([accuracy_values(each.exp(), y) for each in used]).mean(0),
    }
    effective = [float(effective_members(each, y)) if members > 1 else 1.0 for each in subsets]
    trained = whole.get("train/members/accuracy", whole.get("train/accuracy", math.nan))  # of every member there is
    row |= {"train_member_accuracy": trained, "effective": sum(effective) / count, "examples": examples}
    row |= {name: float(each.mean()) for name, each in examples.items()}
    return row | {"parameters": round(whole["cost/parameters"] * members / cell.members)}


class Grid:
    """The rows as arrays over some of their columns."""

    def __init__(self, rows: Sequence[WidthRow]) -> None:
        self.rows = [row | row.get("examples", {}) for row in rows if row["diverged"] is None]
        main = [row for row in self.rows if row["p"] is None]
        self.factors = sorted({row["factor"] for row in main})
        self.sizes = sorted({row["members"] for row in main if row["method"] == EMBEDDED})
        self.names = {row["factor"]: f"{row['factor']:g}× (N = {row['units']})" for row in main}
        self.seeds = sorted({row["seed"] for row in rows})
        self.p = sorted({row["p"] for row in self.rows if row["p"] is not None})

    def main(self, name: str) -> Array:
        """(2, F, M, S, n) of embedded and independent ensembles, widths, numbers of members, seeds and test examples."""
        axes = {"method": (EMBEDDED, INDEPENDENT), "factor": self.factors, "members": self.sizes, "seed": self.seeds}
        return array_over(self.rows, name, p=[None], **axes)[0]

    def swept(self, name: str) -> Array:
        """(2, P, S, n) of γ = M and γ = 1."""
        return array_over(self.rows, name, gamma=("M", "1"), p=self.p, seed=self.seeds)


def means(values: Array) -> Array:
    """Of numbers (…, S, n) over the seeds that have them; NaN where none has."""
    return np.ma.masked_invalid(values).mean((-2, -1)).filled(math.nan)
