"""Tasks over widths: ensembles that share weights beside independent ones, over the width and the number of members.

The section [widths] of a task defines the cells; each is a run with its own folder, a variant of its method. Finished runs give
rows, one for every ensemble and seed; rows give arrays over their columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dissensus.bench.run.processes import DIVERGED
from dissensus.bench.run.provenance import ORIGIN
from dissensus.bench.run.records import read_evaluation, read_predictions
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import RunConfig, Task, run_config
from dissensus.core.predictive import ClassificationPredictive
from dissensus.metrics import accuracy_values, effective_members
from dissensus.numerics.checks import number, one_of, whole
from dissensus.reporting.estimates import Array, array_over
from dissensus.storage.files import read_json
from dissensus.theory import largest_eigenvalue

INDEPENDENT, EMBEDDED = "deep_ensemble", "batch_ensemble"
REGIMES = {"independent": "M", "collective": "1"}  # regime -> γ
DEFAULTS: dict[str, Any] = {"p": [], "p_members": 8, "p_factor": 1.0, "p_rates": {}, "rate": "fixed"}
PLACE = ("method", "factor", "units", "members", "p", "gamma", "seed")
NUMBERS = ("parameters", "diverged", "accuracy", "member_accuracy", "train_member_accuracy", "effective")
COLUMNS = (*PLACE, *NUMBERS, *ORIGIN)
TEXTS = ("method", "gamma", "question", "about", "unit", *ORIGIN)  # columns, also of claims

# One ensemble with one seed; for independent ensembles, the mean over disjoint subsets of that size. `diverged`: the step at
# which the loss became NaN or infinite; other numbers are then missing. "examples": name of a number -> (n,), not in a file.
WidthRow = dict[str, Any]


@dataclass(frozen=True)
class GridCell:
    """One ensemble to train. `p`: of modulations p + √(1 − p²) N(0, 1); None for the task's modulations."""

    config: RunConfig
    method: str
    factor: float
    units: int
    members: int
    p: float | None = None
    gamma: str = ""  # "M", "1", or "" if weights are not shared


def cells(task: Task, seeds: Sequence[int]) -> list[GridCell]:
    """All ensembles of a task, the slowest to train first; smaller independent ensembles are subsets of the largest."""
    widths, needed = DEFAULTS | task.settings["widths"], ("of", "factors", "members")
    if missing := [key for key in needed if not widths.get(key)]:
        raise ValueError(f"expected widths.{missing[0]} in the task, got none; [widths] needs {', '.join(needed)}")
    for method in task.methods:
        one_of("a method of a task with [widths]", method, (INDEPENDENT, EMBEDDED), hint="it compares these two")
    one_of("widths.rate", widths["rate"], ("fixed", "sharing"))
    factors = sorted({float(number("widths.factors", each, above=0)) for each in widths["factors"]})
    sizes = sorted({whole("widths.members", each) for each in widths["members"]})
    swept = [float(number("widths.p", each)) for each in dict.fromkeys(widths["p"])]
    for regime, rates in widths["p_rates"].items():
        one_of("a regime of widths.p_rates", regime, REGIMES)
        one_of(f"the number of rates in widths.p_rates.{regime}", len(rates), [len(swept)], hint="give one for each p")
    asked: list[tuple[Any, ...]] = [(INDEPENDENT, factor, max(*sizes, widths["p_members"])) for factor in factors[::-1]]
    asked += [(EMBEDDED, factor, members) for factor in factors[::-1] for members in sizes[::-1]]
    for i, p in enumerate(swept):
        factor = one_of("widths.p_factor", float(widths["p_factor"]), factors)
        rates = {regime: each[i] for regime, each in widths["p_rates"].items()}
        asked += [(EMBEDDED, factor, widths["p_members"], p, regime, rates.get(regime)) for regime in REGIMES]
    return [_cell(run_config(task, each[0], seed), widths, *each) for each in asked for seed in seeds]


def _cell(config: RunConfig, widths: Any, method: str, factor: float, members: int, *transition: Any) -> GridCell:
    """The cell at this width with `members` members; `transition`: p, regime and rate that replace the task's."""
    p, regime, rate = transition or (None, None, None)
    of, settings = widths["of"], {**config.settings, "members": members}
    scaled = _scaled(f"network.{of}, which widths.of names,", config.network.get(of), factor)
    units = scaled if isinstance(scaled, list) else [scaled]
    name, gamma = f"{method}-N{units[0]}", ""
    if method == EMBEDDED:
        name += f"-M{members}"
        if transition:
            settings |= {"modulation": {"between": p}, "regime": regime}
            name += f"-p{p:g}-{regime}".replace(".", "_")
        gamma = REGIMES[one_of(f"method.{EMBEDDED}.regime", str(settings.get("regime")), REGIMES)]
        if rate is None and widths["rate"] == "sharing":
            lr: Any = number('training.lr, which widths.rate = "sharing" lowers,', config.training.get("lr"))
            rate = lr / largest_eigenvalue(members, min(units), p=0.0)  # of the kernel of M members over N shared units
    training = config.training if rate is None else {**config.training, "lr": number("widths.p_rates", rate)}
    changed = replace(config, method=name, network={**config.network, of: scaled}, settings=settings, training=training)
    return GridCell(changed, method, factor, units[0], members, p, gamma)


def _scaled(what: str, value: Any, factor: float) -> Any:
    """A whole number, or a list of them, times the factor, rounded to whole numbers."""
    if isinstance(value, list):
        return [_scaled(what, each, factor) for each in value]
    scaled = whole(what, value) * factor
    return whole(f"{what} times {factor:g}", int(scaled) if scaled.is_integer() else scaled)


def rows_of_runs(cells: Sequence[GridCell], runs: Sequence[Run]) -> list[WidthRow]:
    """The rows of finished runs: one for each embedded ensemble, and one for each size of independent ensembles."""
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
    trained = whole.get("train/members/accuracy", whole.get("train/accuracy", math.nan))  # of all members
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
        """(2, F, M, S, n): embedded and independent ensembles, widths, numbers of members, seeds and test examples."""
        axes = {"method": (EMBEDDED, INDEPENDENT), "factor": self.factors, "members": self.sizes, "seed": self.seeds}
        return array_over(self.rows, name, p=[None], **axes)[0]

    def swept(self, name: str) -> Array:
        """(2, P, S, n) for γ = M and γ = 1."""
        return array_over(self.rows, name, gamma=("M", "1"), p=self.p, seed=self.seeds)
