"""Runs a task over widths: trains and measures all cells, then writes results.csv, claims.csv, figures and a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dissensus.bench.run.jobs import begun, default_folder
from dissensus.bench.run.processes import in_processes
from dissensus.bench.run.provenance import ORIGIN
from dissensus.bench.run.run import Tell, silent
from dissensus.bench.task.config import Task
from dissensus.bench.width.claims import width_claims, width_verdicts
from dissensus.bench.width.grid import COLUMNS, INDEPENDENT, PLACE, Grid, WidthRow, cells, rows_of_runs
from dissensus.drawing.plots import INK, PALETTE, Curve, Panel, curve_figure, marked
from dissensus.numerics.checks import whole
from dissensus.reporting.estimates import Array, Claim, array_over, mean_interval, means
from dissensus.reporting.figures import svg, write_files
from dissensus.reporting.report import rendered
from dissensus.reporting.results import table_text
from dissensus.reporting.tables import Cell, Row, Table

PANELS = (
    ("accuracy", "ensemble, test rows", "members"),
    ("member_accuracy", "a member, test rows (mean)", "members"),
    ("train_member_accuracy", "a member, training rows (mean)", "members"),
    ("accuracy", "ensemble, over its parameters", "parameters"),
)
DASHED = {"color": INK, "linestyle": "--"}
KINDS = (Curve([], [], "embedded", {"color": INK}), Curve([], [], "independent", DASHED))
MAIN = "Lines: ensembles that share their weights; dashes: independent ones of the same width; bands: 95 % intervals."
SWEPT = "From independent members (p = 0) to equal ones (p = 1), γ = M and γ = 1 at their rates; dashes: independent networks."


def bench_widths(
    task: Task,
    *,
    seeds: int = 1,
    out: Path | None = None,
    source: str | None = None,
    jobs: int = 1,
    tell: Tell = silent,
) -> tuple[list[str], list[Path]]:
    """(sentences, files) of a task over widths; finished stages are not repeated."""
    asked = cells(task, range(whole("--seeds", seeds)))
    folder = out or default_folder(task)
    runs = begun(task, [cell.config for cell in asked], folder, source=source)
    in_processes([[run] for run in runs], whole("--jobs", jobs), source=source, tell=tell, keep_going=True)
    tell("writing the report")
    return write_page(rows_of_runs(asked, runs), folder, task.title, str(task.settings.get("description", "")))


def write_page(rows: Sequence[WidthRow], folder: Path, title: str, description: str) -> tuple[list[str], list[Path]]:
    """Writes rows, claims, two figures, report.md and report.html; returns (sentences, files)."""
    found, grid = width_claims(rows), Grid(rows)
    origin = {key: "; ".join(dict.fromkeys(row[key] for row in rows)) for key in ORIGIN}
    said, lost = width_verdicts(found), [row for row in rows if row["diverged"] is not None]
    if lost:
        named = (", ".join(f"{key} {row[key]}" for key in PLACE if row[key] not in (None, "")) for row in lost)
        said.append(f"{len(lost)} of {len(rows)} ensembles diverged and are left out: {'; '.join(named)}.")
    drawn = {"widths.png": curve_figure(width_panels(grid), size=(10.4, 7.0), rows=2)}
    if grid.p:
        drawn["transition.png"] = curve_figure(transition_panels(grid), size=(10.4, 3.2))
    content = {
        "title": title,
        "description": description,
        "sentences": said,
        "facts": origin,
        "seeds": len({row["seed"] for row in rows}),
        "accuracies": accuracy_table(rows),
        "claims": Table(
            ["estimate"], [Row(each.about, each.unit, "", [Cell(each.text)], each.question) for each in found]
        ),
        "figures": [(n, text, svg(drawn[n], n[0])) for n, text in zip(drawn, (MAIN, SWEPT), strict=False)],
    }
    texts = {f"report.{end}": rendered(f"widths.{end}.j2", content) for end in ("md", "html")}
    texts["results.csv"] = table_text(COLUMNS, rows)
    texts["claims.csv"] = table_text([*Claim._fields, *ORIGIN], [claim._asdict() | origin for claim in found])
    return said, write_files(folder, drawn, texts)


def accuracy_table(rows: Sequence[WidthRow]) -> Table:
    """Ensemble accuracy with member accuracy in brackets, one row per width and kind (in the column of units)."""
    grid = Grid(rows)
    shares = 100 * np.stack([means(grid.main(name)) for name in ("accuracy", "member_accuracy")], -1)  # (2, F, M, 2)
    lines = []
    for f, factor in enumerate(grid.factors):
        for kind, found in zip(("embedded", "independent"), shares[:, f], strict=True):
            cells = [Cell("–" if np.isnan(pair).any() else "{:.2f} ({:.2f})".format(*pair)) for pair in found]
            lines.append(Row(grid.names[factor], kind, "", cells))
    return Table([f"M = {members}" for members in grid.sizes], lines)


def width_panels(grid: Grid) -> list[Panel]:
    """Accuracy over M for every width: of ensembles, of members, of members on training rows; and over parameters."""
    panels = []
    for name, title, over in PANELS:
        x, values, curves = means(grid.main(over)), grid.main(name), []
        for f, factor in enumerate(grid.factors):
            colour = {"color": PALETTE[f % len(PALETTE)]}
            curves.append(_curve(x[0, f], values[0, f], grid.names[factor], colour | marked(f)))
            curves.append(_curve(x[1, f], values[1, f], "", colour | {"linestyle": "--"}))
        axes = {"xscale": "log", "xlabel": over, "ylabel": "accuracy", "title": title}
        panels.append(Panel([*curves, *KINDS], axes, percent="y", ticks=grid.sizes if over == "members" else ()))
    return panels


def transition_panels(grid: Grid) -> list[Panel]:
    """Accuracy of ensemble and members, and effective members, over p for both γ, at one width and M."""
    law, panels = next(row for row in grid.rows if row["p"] is not None), []
    alone = {"method": [INDEPENDENT], "factor": [law["factor"]], "members": [law["members"]], "seed": grid.seeds}
    for name, title, _ in (*PANELS[:2], ("effective", "effective members", "")):
        share = name != "effective"
        beside = array_over(grid.rows, name, **alone)[0, 0].repeat(len(grid.p), 0)  # (P, S, n)
        curves = [_curve(grid.p, beside, "independent networks", DASHED, share=share)]
        for i, (gamma, values) in enumerate(zip(("M", "1"), grid.swept(name), strict=True)):
            curves.append(_curve(grid.p, values, f"γ = {gamma}", {"color": PALETTE[i], **marked(i)}, share=share))
        axes = {"xlabel": "p: modulations p + √(1 − p²) N(0, 1)", "title": f"{title}, M = {law['members']}"}
        panels.append(Panel(curves, {**axes, "ylabel": "accuracy" * share}, percent="y" * share))
    return panels


def _curve(x: Any, values: Array, label: str, look: Mapping[str, Any], *, share: bool = True) -> Curve:
    """A curve of numbers (X, S, n) with intervals; intervals of accuracies are clipped at 1."""
    mean, lower, upper, _ = np.array([mean_interval(each) for each in values]).T
    return Curve(x, mean, label, look, band=(lower.clip(0), upper.clip(0, 1 if share else None)))
