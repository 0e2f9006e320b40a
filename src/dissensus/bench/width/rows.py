"""The numbers of a task over widths: one row for every ensemble and seed, and what was right for every test example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.bench.run.processes import DIVERGED
from dissensus.bench.run.records import read_evaluation, read_predictions
from dissensus.bench.run.run import Run
from dissensus.bench.width.grid import EMBEDDED, GridCell
from dissensus.core.predictive import ClassificationPredictive, Predictive
from dissensus.reporting.results import table_rows
from dissensus.storage.files import read_json

ORIGIN = ("commit", "torch", "device", "command")
NUMBERS = ("accuracy", "nll", "member_accuracy", "member_nll", "train_accuracy", "train_member_accuracy", "effective")
COLUMNS = ("method", "factor", "units", "members", "p", "gamma", "seed", "parameters", "diverged", *NUMBERS, "seconds",
           "subsets", *ORIGIN)  # fmt: skip

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
    keys = ("method", "factor", "p", "gamma", "members", "seed")
    return sorted(found, key=lambda row: [row["p"] is not None, *(row[key] or 0 for key in keys)])


def _row(cell: GridCell, run: Run, members: int) -> WidthRow:
    row: WidthRow = {**vars(cell), "members": members, "seed": cell.config.seed, "diverged": None, "parameters": 0}
    row |= {key: str(run.provenance.get(key, "")) for key in ORIGIN}
    if (run.folder / DIVERGED).is_file():
        return row | {"diverged": int(read_json(run.folder / DIVERGED)["step"])}
    cost, share = read_evaluation(run.folder).metrics, members / cell.members
    test, train = (read_predictions(run.folder / "predictions" / f"{name}.safetensors") for name in ("test", "train"))
    count = cell.members // members
    subsets = torch.arange(count * members).view(count, members)  # disjoint
    tested, trained = (
        [_measured(rows.predictive, rows.targets, subset) for subset in subsets] for rows in (test, train)
    )
    means = {name: torch.stack([each[name] for each in tested]).mean(0) for name in tested[0]}
    row |= {name: float(torch.stack([each[name].mean() for each in tested]).mean()) for name in tested[0]}
    row |= {f"train_{n}": float(torch.stack([each[n].mean() for each in trained]).mean()) for n in tested[0]}
    row |= {
        "parameters": round(cost["cost/parameters"] * share),
        "seconds": round(cost["cost/train_seconds"] * share, 3),
    }
    return row | {"subsets": count, "examples": {name: each for name, each in means.items() if each.ndim}}


def _measured(predictive: Predictive, y: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """(n,) or () numbers of the mixture of some members."""
    assert isinstance(predictive, ClassificationPredictive)
    members = predictive.members[chosen].double()  # (M, n, C)
    mixture = torch.logsumexp(members, 0) - torch.tensor(float(len(members))).log()
    return {
        "accuracy": (mixture.argmax(-1) == y).double(),
        "nll": metrics.nll(mixture, y),
        "member_accuracy": (members.argmax(-1) == y).double().mean(0),
        "member_nll": torch.stack([metrics.nll(each, y) for each in members]).mean(),
        "effective": metrics.effective_members(members, y) if len(members) > 1 else torch.ones(()),
    }


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of results.csv or claims.csv, without what was right for every example."""
    texts = ("method", "gamma", "question", "about", "unit", *ORIGIN)

    def value(key: str, text: str) -> Any:
        return text if key in texts else (int(text) if text.isdigit() else float(text)) if text else None

    return [{key: value(key, text) for key, text in line.items()} for line in table_rows(path)]
