"""The numbers of a task over widths: one row for every ensemble and seed, and what was right for every test example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.bench.run.processes import DIVERGED
from dissensus.bench.run.records import read_evaluation, read_predictions
from dissensus.bench.run.run import Run
from dissensus.bench.width.grid import EMBEDDED, GridCell, Widths
from dissensus.core.predictive import ClassificationPredictive, Predictive
from dissensus.reporting.results import table_rows, table_text
from dissensus.storage.files import read_json

ORIGIN = ("commit", "torch", "device", "command")


class Place(NamedTuple):
    """What seeds are repetitions of. `p` and `gamma` only in the transition: the rest of a task has one γ."""

    method: str
    factor: float
    members: int
    p: float | None = None
    gamma: str = ""


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
        gamma = "" if self.p is None else self.gamma
        return Place(self.method, self.factor, self.members, self.p, gamma)


def rows_of_runs(cells: Sequence[GridCell], runs: Sequence[Run], widths: Widths) -> list[WidthRow]:
    """The rows of runs that are over, one for each embedded ensemble and one for each size of independent ones."""
    sizes = sorted({*widths.members, *([widths.p_members] if widths.p else [])})
    found = [
        _row(cell, run, members)
        for cell, run in zip(cells, runs, strict=True)
        for members in ([cell.members] if cell.method == EMBEDDED else sizes)
    ]

    def order(row: WidthRow) -> tuple[Any, ...]:
        return row.p is not None, row.method == EMBEDDED, row.factor, row.p or 0.0, row.gamma, row.members, row.seed

    return sorted(found, key=order)


def _row(cell: GridCell, run: Run, members: int) -> WidthRow:
    facts: dict[str, Any] = {
        "method": cell.method, "factor": cell.factor, "units": cell.units, "members": members, "p": cell.p,
        "gamma": cell.gamma, "seed": cell.config.seed, "origin": {key: str(run.provenance.get(key, "")) for key in ORIGIN},
    }  # fmt: skip
    if (run.folder / DIVERGED).is_file():
        return WidthRow(**facts, parameters=0, diverged=int(read_json(run.folder / DIVERGED)["step"]))
    cost = read_evaluation(run.folder).metrics
    test, train = (read_predictions(run.folder / "predictions" / f"{name}.safetensors") for name in ("test", "train"))
    count = cell.members // members
    subsets = torch.arange(count * members).view(count, members)  # disjoint
    tested = [_measured(test.predictive, test.targets, each) for each in subsets]
    trained = [_measured(train.predictive, train.targets, each) for each in subsets]
    facts |= {name: _mean(tested, name) for name in tested[0]}
    facts |= {f"train_{name}": _mean(trained, name) for name in ("accuracy", "member_accuracy")}
    return WidthRow(
        **facts,
        parameters=round(cost["cost/parameters"] * members / cell.members),
        diverged=None,
        seconds=round(cost["cost/train_seconds"] * members / cell.members, 3),
        subsets=count,
        examples={name: torch.stack([e[name] for e in tested]).mean(0) for name in ("accuracy", "member_accuracy")},
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


def rows_text(rows: Sequence[WidthRow]) -> str:
    """results.csv: every number and where it comes from."""
    columns = [each.name for each in fields(WidthRow) if each.name not in ("origin", "examples")]
    return table_text([*columns, *ORIGIN], [asdict(row) | row.origin for row in rows])


def read_rows(path: Path) -> list[WidthRow]:
    """The rows that `rows_text` wrote, without what was right for every example."""
    found = []
    for line in table_rows(path):
        origin, texts = ({key: line.pop(key) for key in keys} for keys in (ORIGIN, ("method", "gamma")))
        numbers = {key: (int(t) if t.isdigit() else float(t)) if t else None for key, t in line.items()}
        found.append(WidthRow(**texts, **numbers, origin=origin))  # type: ignore[arg-type]
    return found
