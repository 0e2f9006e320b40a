"""report: evaluations as a table, a text and a page."""

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
    """The files written: results.csv, report.md and report.html in the folder `path`, or the one its suffix names.

    Intervals and p-values count the test examples and, where there are several, the seeds. The page is one
    self-contained file.

    Args:
        evaluations: name -> `Evaluation`, or a list of them from different seeds; the i-th evaluations of two methods
            are compared with each other.
        path: a folder, made if need be, or a file ending in .csv, .md, .html or .tex (its tables).
        title: heading of the page.
        baseline: the name the others are compared with; None takes the first.
        holm: adjusts the p-values of each table, and its intervals with them, for the number of its comparisons.

    Returns:
        Paths of the files written.
    """
    from dissensus.reporting.report import write_report  # matplotlib and jinja2 are loaded only by who wants a report
    from dissensus.reporting.results import results_of_evaluations

    return write_report(results_of_evaluations(evaluations, title).compared_with(baseline, holm=holm), Path(path))
