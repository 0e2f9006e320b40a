"""report: evaluations as a table, a text and a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dissensus.evaluate import Evaluation


def report(
    evaluations: Mapping[str, Evaluation | Sequence[Evaluation]],
    path: str | os.PathLike[str],
    *,
    title: str = "Uncertainty report",
) -> list[Path]:
    """The files written: results.csv, report.md and report.html in the folder `path`, or the one its suffix names.

    `evaluations`: name -> Evaluation, or several of them from different seeds. The first one is what the others are
    compared with. The page is one file that needs nothing else and asks for nothing from the network.
    """
    from dissensus.bench.report import write_report  # matplotlib and jinja2 are loaded only by who wants a report
    from dissensus.bench.results import results_of_evaluations

    return write_report(results_of_evaluations(evaluations, title), Path(path))
