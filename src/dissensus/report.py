"""report: writes evaluations as a table, a text and a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dissensus.evaluation.evaluation import Evaluation


def report(
    evaluations: Mapping[str, Evaluation | Sequence[Evaluation]],
    path: str | os.PathLike[str],
    *,
    title: str = "Uncertainty report",
    baseline: str | None = None,
    holm: bool = False,
) -> list[Path]:
    """Writes evaluations as results.csv, report.md and report.html to a folder, or as one file; returns their paths.

    Intervals and p-values reflect the number of test examples and, if there are several, of seeds. The page is one file.

    Args:
        evaluations: name -> `Evaluation`, or a list of them from different seeds; the i-th ones of two names are compared.
        path: a folder, created if missing, or a file ending in .csv, .md, .html or .tex (only the tables).
        title: heading of the page.
        baseline: name that the others are compared with; None is the first.
        holm: whether to adjust p-values and intervals for the number of comparisons in each table.
    """
    # Here, so that matplotlib and jinja2 are loaded only for a report.
    from dissensus.bench.report.html_report import write_report
    from dissensus.bench.report.results import results_of_evaluations

    return write_report(results_of_evaluations(evaluations, title).with_baseline(baseline, holm=holm), Path(path))
