"""The main job of a task over widths: all cells trained and measured, then results.csv, claims.csv, figures and a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dissensus.bench.run.jobs import begun, checked_folder, default_folder
from dissensus.bench.run.processes import in_processes
from dissensus.bench.run.run import Tell, silent
from dissensus.bench.task.config import Task
from dissensus.bench.width.claims import Claim, claims, members_of, table_of
from dissensus.bench.width.grid import cells, widths_of
from dissensus.bench.width.rows import ORIGIN, WidthRow, rows_of, write_rows
from dissensus.bench.width.verdicts import verdicts
from dissensus.reporting.results import table_rows, table_text
from dissensus.storage.files import write_bytes, write_text

MAIN = (
    "Accuracy over the number of members: lines for ensembles that share their weights, dashes for independent ones of the "
    "same width; bands are 95 % intervals."
)
SWEPT = (
    "From members that start independent (p = 0) to equal ones (p = 1), with the shared gradient summed (γ = M) or averaged "
    "(γ = 1) over members, each at the learning rate of the task; dashes: as many independent networks."
)


def bench_widths(
    task: Task,
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    source: str | None = None,
    jobs: int = 1,
    tell: Tell = silent,
) -> tuple[list[str], list[Path]]:
    """(sentences, files) of a task over widths; what is done is not done again."""
    widths = widths_of(task)
    if widths is None:
        raise ValueError(f"expected a section [widths] in the task {task.name}, got none; it says what to train")
    if seeds < 1 or jobs < 1:
        raise ValueError(f"expected at least one seed and one job, got {seeds} and {jobs}; pass --seeds 3 for three")
    folder = checked_folder(default_folder(task) if out is None else Path(out))
    asked = cells(task, widths, range(seeds))
    runs = begun(task, [cell.config for cell in asked], folder, source=source)
    in_processes([[run] for run in runs], jobs, source=source, tell=tell, keep_going=True)
    tell("writing the report")
    rows = rows_of(asked, runs, widths)
    return write_page(rows, folder, title=task.title, description=str(task.settings.get("description", "")))


def write_page(rows: Sequence[WidthRow], folder: Path, *, title: str, description: str) -> tuple[list[str], list[Path]]:
    """(sentences, files) of rows: the rows themselves, their claims, two figures, report.md and report.html."""
    found = claims(rows)
    said = [*verdicts(found), *_lost(rows)]
    written = write_rows(rows, folder)
    write_text(folder / "claims.csv", claims_text(found, rows))
    from dissensus.bench.width.figures import transition_figure, width_figure
    from dissensus.reporting.figures import svg  # loads matplotlib
    from dissensus.reporting.report import rendered

    figures = {"widths": (width_figure(rows), MAIN)}
    if any(row.p is not None and row.diverged is None for row in rows):
        figures["transition"] = (transition_figure(rows), SWEPT)
    shown = []
    for i, (name, (figure, text)) in enumerate(figures.items()):
        shown.append({"file": f"{name}.png", "text": text, "svg": svg(figure, f"w{i}")})
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, facecolor="white")
        write_bytes(folder / f"{name}.png", buffer.getvalue())
    content: dict[str, Any] = {
        "title": title, "description": description, "sentences": said, "claims": found, "figures": shown,
        "facts": {key: "; ".join(dict.fromkeys(row.origin.get(key, "") for row in rows)) for key in ORIGIN},
        "seeds": len({row.seed for row in rows}), "cells": accuracies(rows),
    }  # fmt: skip
    for end in ("md", "html"):
        write_text(folder / f"report.{end}", rendered(f"widths.{end}.j2", content))
    names = ["claims.csv", *(f"{name}.png" for name in figures), "report.md", "report.html"]
    return said, [*written, *(folder / name for name in names)]


def accuracies(rows: Sequence[WidthRow]) -> list[list[str]]:
    """A table with a heading: ensemble accuracy, member accuracy in brackets, a line for each kind and width."""
    table = table_of(rows)
    sizes = members_of(table)
    lines = [["width", "members", *(f"M = {members}" for members in sizes)]]
    for factor, units in sorted({(row.factor, row.units) for row in rows}):
        for method, label in (("batch_ensemble", "embedded"), ("deep_ensemble", "independent")):
            cells_ = []
            for members in sizes:
                several = [
                    row for place, by_seed in table.items() for row in by_seed.values()
                    if (place.method, place.factor, place.members, place.p) == (method, factor, members, None)
                ]  # fmt: skip
                cells_.append(_cell(several))
            lines.append([f"{factor:g}× (N = {units})", label, *cells_])
    return lines


def claims_text(found: Sequence[Claim], rows: Sequence[WidthRow]) -> str:
    """claims.csv: every number with its interval and where it comes from."""
    origin = {key: "; ".join(dict.fromkeys(row.origin.get(key, "") for row in rows)) for key in ORIGIN}
    lines = [
        claim._asdict() | {key: f"{getattr(claim, key):.6g}" for key in ("value", "lower", "upper")} | origin
        for claim in found
    ]
    return table_text([*Claim._fields, *ORIGIN], lines)


def read_claims(path: Path) -> list[Claim]:
    """What `claims_text` wrote."""
    kinds = dict(zip(Claim._fields, (str, str, float, float, float, str, int), strict=True))
    return [Claim._make(kind(row[key]) for key, kind in kinds.items()) for row in table_rows(path)]


def _cell(several: Sequence[WidthRow]) -> str:
    if not several:
        return "–"
    mean, alone = (100 * fmean(getattr(row, name) for row in several) for name in ("accuracy", "member_accuracy"))
    return f"{mean:.2f} ({alone:.2f})"


def _lost(rows: Sequence[WidthRow]) -> list[str]:
    lost = [row for row in rows if row.diverged is not None]
    if not lost:
        return []
    named = ", ".join(
        f"{row.method} {row.factor:g}×, M = {row.members}{'' if row.p is None else f', p = {row.p:g}, γ = {row.gamma}'}, "
        f"seed {row.seed}"
        for row in lost
    )
    return [f"{len(lost)} of {len(rows)} ensembles diverged and are left out: {named}."]
