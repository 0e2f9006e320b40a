"""The numbers of a task over widths: one row for every ensemble and seed, and what was right for every test example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.bench.run.processes import DIVERGED
from dissensus.bench.run.records import read_evaluation, read_predictions
from dissensus.bench.run.run import Run
from dissensus.bench.width.grid import EMBEDDED, INDEPENDENT, Cell, Widths
from dissensus.core.predictive import ClassificationPredictive, Predictive
from dissensus.reporting.results import table_rows, table_text
from dissensus.storage.files import read_json, read_tensors, write_tensors, write_text

ROWS, EXAMPLES = "results.csv", "examples.safetensors"
ORIGIN = ("commit", "torch", "device", "command")
NUMBERS = ("accuracy", "nll", "member_accuracy", "member_nll", "train_accuracy", "train_member_accuracy", "effective")


@dataclass(frozen=True)
class WidthRow:
    """One ensemble with one seed; of independent ones, the mean over the subsets of that size."""

    method: str
    factor: float
    units: int
    members: int
    p: float | None
    gamma: str
    seed: int
    parameters: int
    diverged: int | None  # the step at which a loss was no longer finite; there are no numbers then
    accuracy: float | None = None
    nll: float | None = None
    member_accuracy: float | None = None
    member_nll: float | None = None
    train_accuracy: float | None = None
    train_member_accuracy: float | None = None
    effective: float | None = None  # members with independent errors that the mixture is worth
    seconds: float | None = None
    subsets: int = 1
    origin: dict[str, str] = field(default_factory=dict, compare=False)
    examples: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)  # name of a number -> (n,)

    @property
    def place(self) -> Place:
        return Place(self.method, self.factor, self.members, self.p, self.gamma)


@dataclass(frozen=True)
class Place:
    """What seeds are repetitions of."""

    method: str
    factor: float
    members: int
    p: float | None
    gamma: str


def rows_of(cells: Sequence[Cell], runs: Sequence[Run], widths: Widths) -> list[WidthRow]:
    """The rows of runs that are over, one for each embedded ensemble and one for each size of independent ones."""
    found: list[WidthRow] = []
    sizes = sorted({*widths.members, *([widths.p_members] if widths.p else [])})
    for cell, run in zip(cells, runs, strict=True):
        shared = cell.method == EMBEDDED
        for members in [cell.members] if shared else sizes:
            found.append(_row(cell, run, members))
    order = {EMBEDDED: 1, INDEPENDENT: 0}
    key = lambda row: (row.p is not None, order[row.method], row.factor, row.p or 0.0, row.gamma, row.members, row.seed)  # noqa: E731
    return sorted(found, key=key)


def _row(cell: Cell, run: Run, members: int) -> WidthRow:
    facts: dict[str, Any] = {
        "method": cell.method, "factor": cell.factor, "units": cell.units, "members": members, "p": cell.p,
        "gamma": cell.gamma, "seed": cell.config.seed, "origin": {key: str(run.provenance.get(key, "")) for key in ORIGIN},
    }  # fmt: skip
    if (run.folder / DIVERGED).is_file():
        return WidthRow(**facts, parameters=0, diverged=int(read_json(run.folder / DIVERGED)["step"]))
    evaluation = read_evaluation(run.folder).metrics
    test, train = (read_predictions(run.folder / "predictions" / f"{name}.safetensors") for name in ("test", "train"))
    count = cell.members // members
    subsets = list(torch.arange(count * members).view(count, members))  # disjoint
    tested = [_measured(test.predictive, test.targets, each) for each in subsets]
    trained = [_measured(train.predictive, train.targets, each) for each in subsets]
    examples = {name: torch.stack([each[name] for each in tested]).mean(0) for name in ("accuracy", "member_accuracy")}
    facts |= {name: _mean(tested, name) for name in ("accuracy", "nll", "member_accuracy", "member_nll", "effective")}
    facts |= {f"train_{name}": _mean(trained, name) for name in ("accuracy", "member_accuracy")}
    return WidthRow(
        **facts,
        parameters=round(evaluation["cost/parameters"] * members / cell.members),
        diverged=None,
        seconds=round(evaluation["cost/train_seconds"] * members / cell.members, 3),
        subsets=len(subsets),
        examples=examples,
    )


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


def _mean(several: Sequence[dict[str, Tensor]], name: str) -> float:
    return float(torch.stack([each[name].mean() for each in several]).mean())


def write_rows(rows: Sequence[WidthRow], folder: Path) -> list[Path]:
    """results.csv with the numbers, and what was right for every example beside it."""
    columns = [each.name for each in fields(WidthRow) if each.name not in ("origin", "examples")]
    write_text(folder / ROWS, table_text([*columns, *ORIGIN], [asdict(row) | row.origin for row in rows]))
    arrays = {f"{_key(row)}/{name}": value.float() for row in rows for name, value in row.examples.items()}
    write_tensors(folder / EXAMPLES, arrays, {})
    return [folder / ROWS, folder / EXAMPLES]


def read_rows(table: Path, examples: Path | None = None) -> list[WidthRow]:
    """The rows that `write_rows` wrote; without their examples where no file of them is named."""
    arrays = read_tensors(examples)[0] if examples is not None else {}
    found = []
    for line in table_rows(table):
        origin = {key: line[key] for key in ORIGIN}
        values: dict[str, Any] = {key: line[key] for key in ("method", "gamma")}
        for key in ("units", "members", "seed", "parameters", "subsets"):
            values[key] = int(line[key])
        for key in ("factor", "p", "diverged", "seconds", *NUMBERS):
            values[key] = float(line[key]) if line[key] else None
        if values["diverged"] is not None:
            values["diverged"] = int(values["diverged"])
        row = WidthRow(**values, origin=origin)
        mine = {name: arrays[f"{_key(row)}/{name}"].double() for name in _names(arrays, row)}
        found.append(WidthRow(**values, origin=origin, examples=mine))
    return found


def _names(arrays: dict[str, Tensor], row: WidthRow) -> list[str]:
    return [name for name in ("accuracy", "member_accuracy") if f"{_key(row)}/{name}" in arrays]


def _key(row: WidthRow) -> str:
    law = "" if row.p is None else f"-p{row.p:g}-{row.gamma}"
    return f"{row.method}-{row.factor:g}-M{row.members}{law}-seed{row.seed}"
