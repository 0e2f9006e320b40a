"""The width as an axis of a grid: ensembles that share weights beside independent ones, over the width and the number of
members. Answers the task's questions by numbers with intervals, in results.csv, claims.csv, figures and a page.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dissensus.bench.report import comparisons
from dissensus.bench.report.comparisons import Array, Claim, VerdictWords
from dissensus.bench.report.html_report import CellsPage
from dissensus.bench.report.results import table_text
from dissensus.bench.report.tables import Cell, Row, Table
from dissensus.bench.run.jobs import DIVERGED
from dissensus.bench.run.run import Run
from dissensus.bench.run.run_folder import ORIGIN, read_evaluation, read_predictions
from dissensus.bench.task.config import RunConfig, Task, run_config
from dissensus.core.predictive import ClassificationPredictive
from dissensus.metrics import accuracy_values, effective_members
from dissensus.plots.charts import INK, PALETTE, Curve, Panel, curve_figure, marker_style
from dissensus.storage.atomic_files import read_json
from dissensus.theory import largest_eigenvalue
from dissensus.utils.checks import integer, number, one_of

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
class WidthCell:
    """One ensemble to train. `p`: of modulations p + √(1 − p²) N(0, 1); None for the task's modulations."""

    config: RunConfig
    method: str
    factor: float
    units: int
    members: int
    p: float | None = None
    gamma: str = ""  # "M", "1", or "" if weights are not shared


def width_cells(task: Task, seeds: Sequence[int]) -> list[WidthCell]:
    """All ensembles of a task, the slowest to train first; smaller independent ensembles are subsets of the largest."""
    widths, needed = DEFAULTS | task.settings["widths"], ("of", "factors", "members")
    if missing := [key for key in needed if not widths.get(key)]:
        raise ValueError(f"expected widths.{missing[0]} in the task, got none; [widths] needs {', '.join(needed)}")
    for method in task.methods:
        one_of("a method of a task with [widths]", method, (INDEPENDENT, EMBEDDED), hint="it compares these two")
    factors = sorted({float(number("widths.factors", each, above=0)) for each in widths["factors"]})
    sizes = sorted({integer("widths.members", each) for each in widths["members"]})
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


def _cell(config: RunConfig, widths: Any, method: str, factor: float, members: int, *transition: Any) -> WidthCell:
    """The cell at this width with `members` members; `transition`: p, regime and rate that replace the task's."""
    p, regime, rate = transition or (None, None, None)
    of, settings = widths["of"], {**config.settings, "members": members}
    scaled = _scale_units(f"network.{of}, which widths.of names,", config.network.get(of), factor)
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
    return WidthCell(changed, method, factor, units[0], members, p, gamma)


def _scale_units(what: str, value: Any, factor: float) -> Any:
    """A whole number, or a list of them, times the factor, rounded to whole numbers."""
    if isinstance(value, list):
        return [_scale_units(what, each, factor) for each in value]
    scaled = integer(what, value) * factor
    return integer(f"{what} times {factor:g}", int(scaled) if scaled.is_integer() else scaled)


def rows_of_runs(cells: Sequence[WidthCell], runs: Sequence[Run]) -> list[WidthRow]:
    """The rows of finished runs: one for each embedded ensemble, and one for each size of independent ensembles."""
    sizes = sorted({cell.members for cell in cells if cell.method == EMBEDDED})
    pairs = zip(cells, runs, strict=True)
    found = [_row(cell, run, m) for cell, run in pairs for m in ([cell.members] if cell.method == EMBEDDED else sizes)]
    return sorted(found, key=lambda row: [row["p"] is not None, *(row[key] or 0 for key in PLACE)])


def _row(cell: WidthCell, run: Run, members: int) -> WidthRow:
    row: WidthRow = {**vars(cell), "members": members, "seed": cell.config.seed, "diverged": None, "parameters": 0}
    row |= {key: str(run.provenance.get(key, "")) for key in ORIGIN}
    if (run.folder / DIVERGED).is_file():
        return row | {"diverged": int(read_json(run.folder / DIVERGED)["step"])}
    whole, test = read_evaluation(run.folder).metrics, read_predictions(run.folder / "predictions" / "test.safetensors")
    y, count = test.targets, cell.members // members
    used = test.predictive.log_probs[: count * members].double()
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


class WidthArrays:
    """The rows as arrays over some of their columns."""

    def __init__(self, rows: Sequence[WidthRow]) -> None:
        self.rows = [row | row.get("examples", {}) for row in rows if row["diverged"] is None]
        main = [row for row in self.rows if row["p"] is None]
        self.factors = sorted({row["factor"] for row in main})
        self.sizes = sorted({row["members"] for row in main if row["method"] == EMBEDDED})
        self.names = {row["factor"]: f"{row['factor']:g}× (N = {row['units']})" for row in main}
        self.seeds = sorted({row["seed"] for row in rows})
        self.p = sorted({row["p"] for row in self.rows if row["p"] is not None})

    def main_array(self, name: str) -> Array:
        """(2, F, M, S, n): embedded and independent ensembles, widths, numbers of members, seeds and test examples."""
        axes = {"method": (EMBEDDED, INDEPENDENT), "factor": self.factors, "members": self.sizes, "seed": self.seeds}
        return comparisons.array_over(self.rows, name, p=[None], **axes)[0]

    def transition_array(self, name: str) -> Array:
        """(2, P, S, n) for γ = M and γ = 1."""
        return comparisons.array_over(self.rows, name, gamma=("M", "1"), p=self.p, seed=self.seeds)


FOLLOW = "Do wide embedded ensembles follow independent ones?"
FALL = "Does the accuracy of members fall as M/N grows?"
BEST = "Does the best M grow with the width?"
TRANSITION = "Which γ is better on the way from independent to equal members?"
FAR = ("above by more than a point", "below by more than a point", "inconclusive at ±1 point")
WORDS = {
    FOLLOW: VerdictWords(*FAR, near=0.01, equal="equal within a point"),
    FALL: VerdictWords("no, it grows", "yes", "inconclusive"),
    BEST: VerdictWords("yes", "no, it falls", "inconclusive"),
    TRANSITION: VerdictWords("γ = M", "γ = 1", "neither"),
}
SPOKEN = ("embedded", "the same", "members'", "doublings", "γ")  # beginnings of the claims that sentences use


def width_claims(rows: Sequence[WidthRow]) -> list[Claim]:
    """All numbers, question by question; empty if no seed has all its ensembles."""
    units = dict.fromkeys(WORDS, "points") | {BEST: "doublings"}
    found = _question_values(WidthArrays(rows))
    claims = [comparisons.claim_of(question, about, values, units[question]) for question, about, values in found]
    return [claim for claim in claims if claim.seeds]


def width_verdicts(found: Sequence[Claim]) -> list[str]:
    """A sentence for each question, from its numbers at the largest width and over all widths."""
    spoken = [claim for claim in found if claim.about.startswith(SPOKEN)]
    return comparisons.verdicts(list({claim.about.partition(", width ")[0]: claim for claim in spoken}.values()), WORDS)


QuestionValues = Iterator[tuple[str, str, Array]]  # question, subject, values (S, n)


def _question_values(grid: WidthArrays) -> QuestionValues:
    """The values of all questions. Within a width, M/N varies with M."""
    yield from _follow_values(grid)
    if len(grid.sizes) > 1:
        yield from _fall_values(grid)
        if len(grid.factors) > 1:
            yield from _best_values(grid)
    for p, (summed, averaged) in zip(grid.p, grid.transition_array("accuracy").swapaxes(0, 1), strict=True):
        yield TRANSITION, f"γ = M − γ = 1 at p = {p:g}", summed - averaged


def _by_width(question: str, about: str, grid: WidthArrays, values: Array) -> QuestionValues:
    for factor, each in zip(grid.factors, values, strict=True):
        yield question, f"{about}, width {factor:g}×", each


def _follow_values(grid: WidthArrays) -> QuestionValues:
    factors, several = grid.factors, [i for i, m in enumerate(grid.sizes) if m > 1]
    if not several:
        return
    accuracy, members = grid.main_array("accuracy"), grid.main_array("member_accuracy")
    gap, apart = accuracy[0] - accuracy[1], members[0] - members[1]  # (F, M, S, n)
    for i in dict.fromkeys((several[len(several) // 2], several[-1])):
        size = f"M = {grid.sizes[i]}"
        yield from _by_width(FOLLOW, f"embedded − independent, {size}", grid, gap[:, i])
        if len(factors) > 1:
            yield FOLLOW, f"the same at {factors[-1]:g}× minus at {factors[0]:g}×, {size}", gap[-1, i] - gap[0, i]
    about = f"a member's accuracy, embedded − independent, M = {grid.sizes[-1]}"
    yield from _by_width(FOLLOW, about, grid, apart[:, -1])


def _fall_values(grid: WidthArrays) -> QuestionValues:
    for name, what in (("member_accuracy", "test"), ("train_member_accuracy", "training")):
        slopes = np.einsum("m,fmsn->fsn", comparisons.slope_weights(grid.sizes), grid.main_array(name)[0])
        about = f"members' {what} accuracy for every doubling of M"
        yield from _by_width(FALL, about, grid, slopes)
        if len(grid.factors) > 1:
            yield FALL, f"{about}, mean", slopes.mean(0)


def _best_values(grid: WidthArrays) -> QuestionValues:
    right = grid.main_array("accuracy")[0].mean(-1, keepdims=True)  # (F, M, S, 1)
    best = np.where(np.isnan(right).any(1), math.nan, np.log2(grid.sizes)[right.argmax(1)])
    yield from _by_width(BEST, "log₂ of the best M", grid, best)
    growth = np.einsum("f,fsn->sn", comparisons.slope_weights(grid.factors), best)
    yield BEST, "doublings of the best M for every doubling of the width", growth


PANELS = (
    ("accuracy", "ensemble, test rows", "members"),
    ("member_accuracy", "a member, test rows (mean)", "members"),
    ("train_member_accuracy", "a member, training rows (mean)", "members"),
    ("accuracy", "ensemble, over its parameters", "parameters"),
)
DASHED = {"color": INK, "linestyle": "--"}
KINDS = (Curve([], [], "embedded", {"color": INK}), Curve([], [], "independent", DASHED))
MAIN = "Lines: ensembles that share their weights; dashes: independent ones of the same width; bands: 95 % intervals."
INTERVALS = "They count seeds (Student's t) and test examples. Smaller ensembles are subsets of an independent one."
SWEPT = "From independent members (p = 0) to equal ones (p = 1), γ = M and γ = 1 at their rates; dashes: independent networks."


def width_page(rows: Sequence[WidthRow], title: str, description: str) -> CellsPage:
    """The page of a task over widths: rows, claims and two figures."""
    found, grid = width_claims(rows), WidthArrays(rows)
    origin = {key: "; ".join(dict.fromkeys(row[key] for row in rows)) for key in ORIGIN}
    said, lost = width_verdicts(found), [row for row in rows if row["diverged"] is not None]
    if lost:
        named = (", ".join(f"{key} {row[key]}" for key in PLACE if row[key] not in (None, "")) for row in lost)
        said.append(f"{len(lost)} of {len(rows)} ensembles diverged and are left out: {'; '.join(named)}.")
    figures = {"widths.png": (curve_figure(width_panels(grid), size=(10.4, 7.0), rows=2), MAIN)}
    if grid.p:
        figures["transition.png"] = (curve_figure(transition_panels(grid), size=(10.4, 3.2)), SWEPT)
    claims = [Row(each.about, each.unit, "", [Cell(each.text)], each.question) for each in found]
    tables = [
        ("Accuracy of ensembles (of a member)", f"In %, means over seeds: {len(grid.seeds)}.", accuracy_table(rows)),
        ("Numbers with 95 % intervals", INTERVALS, Table(["estimate"], claims)),
    ]
    texts = {
        "results.csv": table_text(COLUMNS, rows),
        "claims.csv": table_text([*Claim._fields, *ORIGIN], [claim._asdict() | origin for claim in found]),
    }
    return CellsPage(title, description, said, origin, tables, figures, texts)


def accuracy_table(rows: Sequence[WidthRow]) -> Table:
    """Ensemble accuracy with member accuracy in brackets, one row per width and kind (in the column of units)."""
    grid = WidthArrays(rows)
    both = [comparisons.seed_means(grid.main_array(name)) for name in ("accuracy", "member_accuracy")]
    shares = 100 * np.stack(both, -1)  # (2, F, M, 2)
    lines = []
    for f, factor in enumerate(grid.factors):
        for kind, found in zip(("embedded", "independent"), shares[:, f], strict=True):
            cells = [Cell("–" if np.isnan(pair).any() else "{:.2f} ({:.2f})".format(*pair)) for pair in found]
            lines.append(Row(grid.names[factor], kind, "", cells))
    return Table([f"M = {members}" for members in grid.sizes], lines)


def width_panels(grid: WidthArrays) -> list[Panel]:
    """Accuracy over M for every width: of ensembles, of members, of members on training rows; and over parameters."""
    panels = []
    for name, title, over in PANELS:
        x, values, curves = comparisons.seed_means(grid.main_array(over)), grid.main_array(name), []
        for f, factor in enumerate(grid.factors):
            colour = {"color": PALETTE[f % len(PALETTE)]}
            curves.append(_curve(x[0, f], values[0, f], grid.names[factor], colour | marker_style(f)))
            curves.append(_curve(x[1, f], values[1, f], "", colour | {"linestyle": "--"}))
        axes = {"xscale": "log", "xlabel": over, "ylabel": "accuracy", "title": title}
        panels.append(Panel([*curves, *KINDS], axes, percent="y", ticks=grid.sizes if over == "members" else ()))
    return panels


def transition_panels(grid: WidthArrays) -> list[Panel]:
    """Accuracy of ensemble and members, and effective members, over p for both γ, at one width and M."""
    law, panels = next(row for row in grid.rows if row["p"] is not None), []
    alone = {"method": [INDEPENDENT], "factor": [law["factor"]], "members": [law["members"]], "seed": grid.seeds}
    for name, title, _ in (*PANELS[:2], ("effective", "effective members", "")):
        share = name != "effective"
        beside = comparisons.array_over(grid.rows, name, **alone)[0, 0].repeat(len(grid.p), 0)  # (P, S, n)
        curves = [_curve(grid.p, beside, "independent networks", DASHED, share=share)]
        for i, (gamma, values) in enumerate(zip(("M", "1"), grid.transition_array(name), strict=True)):
            curves.append(_curve(grid.p, values, f"γ = {gamma}", {"color": PALETTE[i], **marker_style(i)}, share=share))
        axes = {"xlabel": "p: modulations p + √(1 − p²) N(0, 1)", "title": f"{title}, M = {law['members']}"}
        panels.append(Panel(curves, {**axes, "ylabel": "accuracy" * share}, percent="y" * share))
    return panels


def _curve(x: Any, values: Array, label: str, look: Mapping[str, Any], *, share: bool = True) -> Curve:
    """A curve of numbers (X, S, n) with intervals; intervals of accuracies are clipped at 1."""
    mean, lower, upper, _ = np.array([comparisons.mean_interval(each) for each in values]).T
    return Curve(x, mean, label, look, band=(lower.clip(0), upper.clip(0, 1 if share else None)))
