"""The main job of a task over widths: all cells trained and measured, then results.csv, claims.csv, figures and a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from dissensus.bench.run.jobs import begun, checked_folder, default_folder
from dissensus.bench.run.processes import in_processes
from dissensus.bench.run.run import Tell, silent
from dissensus.bench.task.config import Task
from dissensus.bench.width.claims import Claim, WidthTable, claims_text, origin_of, width_claims
from dissensus.bench.width.grid import EMBEDDED, INDEPENDENT, cells, widths_of
from dissensus.bench.width.rows import Place, WidthRow, rows_of_runs, rows_text
from dissensus.bench.width.verdicts import verdicts
from dissensus.numerics.checks import whole
from dissensus.reporting.tables import Cell, Row, Table
from dissensus.storage.files import write_text

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
    asked = cells(task, widths, range(whole("seeds", seeds)))
    whole("jobs", jobs)
    folder = checked_folder(default_folder(task) if out is None else Path(out))
    runs = begun(task, [cell.config for cell in asked], folder, source=source)
    in_processes([[run] for run in runs], jobs, source=source, tell=tell, keep_going=True)
    tell("writing the report")
    rows = rows_of_runs(asked, runs, widths)
    return write_page(rows, folder, title=task.title, description=str(task.settings.get("description", "")))


def write_page(rows: Sequence[WidthRow], folder: Path, *, title: str, description: str) -> tuple[list[str], list[Path]]:
    """(sentences, files) of rows: the rows themselves, their claims, two figures, report.md and report.html."""
    from dissensus.bench.width.figures import transition_figure, width_figure
    from dissensus.reporting.figures import svg, write_png  # loads matplotlib
    from dissensus.reporting.report import rendered

    found = width_claims(rows)
    said = [*verdicts(found), *_lost(rows)]
    write_text(folder / "results.csv", rows_text(rows))
    write_text(folder / "claims.csv", claims_text(found, rows))
    figures = {"widths.png": (width_figure(rows), MAIN)}
    if any(row.p is not None and row.diverged is None for row in rows):
        figures["transition.png"] = (transition_figure(rows), SWEPT)
    for name, (figure, _) in figures.items():
        write_png(figure, folder / name)
    content = {
        "title": title, "description": description, "sentences": said, "facts": origin_of(rows),
        "seeds": len({row.seed for row in rows}), "accuracies": accuracy_table(rows), "claims": claim_table(found),
        "figures": [(name, text, svg(figure, name[0])) for name, (figure, text) in figures.items()],
    }  # fmt: skip
    for end in ("md", "html"):
        write_text(folder / f"report.{end}", rendered(f"widths.{end}.j2", content))
    return said, [folder / name for name in ("results.csv", "claims.csv", *figures, "report.md", "report.html")]


def accuracy_table(rows: Sequence[WidthRow]) -> Table:
    """Ensemble accuracy, member accuracy in brackets, a row for each width and kind (where a unit stands)."""
    table = WidthTable(rows)

    def cell(place: Place) -> Cell:
        if place not in table.rows:
            return Cell("–")
        return Cell(f"{100 * table.mean(place, 'accuracy'):.2f} ({100 * table.mean(place, 'member_accuracy'):.2f})")

    lines = [
        Row(f"{factor:g}× (N = {units})", kind, "", [cell(Place(method, factor, members)) for members in table.sizes])
        for (factor, units), (method, kind) in product(
            sorted({(row.factor, row.units) for row in rows}),
            ((EMBEDDED, "embedded"), (INDEPENDENT, "independent")),
        )
    ]
    return Table([f"M = {members}" for members in table.sizes], lines)


def claim_table(found: Sequence[Claim]) -> Table:
    """Every number, grouped by question."""
    return Table(["estimate"], [Row(each.about, each.unit, "", [Cell(each.text)], each.question) for each in found])


def _lost(rows: Sequence[WidthRow]) -> list[str]:
    lost = [row for row in rows if row.diverged is not None]
    named = ", ".join(
        f"{row.method} {row.factor:g}×, M = {row.members}{'' if row.p is None else f', p = {row.p:g}, γ = {row.gamma}'}, "
        f"seed {row.seed}"
        for row in lost
    )
    return [f"{len(lost)} of {len(rows)} ensembles diverged and are left out: {named}."] if lost else []
