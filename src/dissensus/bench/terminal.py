"""Results on a terminal."""

import logging
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid
from rich.text import Text

from dissensus.bench.report.prose import cautions, few_examples_caution, question_sentences, test_set_sentences
from dissensus.bench.report.results import CONTROL, Results
from dissensus.bench.report.tables import Table, main_table, measures_and_draws
from dissensus.evaluation.evaluation import Evaluation, metric_text


def safe_markup(text: str) -> str:
    """A title or a name as safe markup, without control characters."""
    return escape(text.translate(CONTROL))


def wide_console() -> Console:
    """A console that does not truncate tables if the output is not a terminal."""
    wide = None if sys.stdout.isatty() else max(shutil.get_terminal_size().columns, 160)
    return Console(width=wide, highlight=False)


def print_before_and_after(before: Evaluation, after: Evaluation) -> None:
    """Prints test metrics before and after calibration, without those of members and cost."""
    grid = Grid("", "before", "after")
    for key, value in after.metrics.items():
        if not key.startswith(("members/", "networks/", "cost/")):
            found = before.metrics.get(key)
            grid.add_row(safe_markup(key), "" if found is None else metric_text(found), metric_text(value))
    wide_console().print(grid)


def print_results(results: Results) -> None:
    """Prints a report's main table, the reasons why methods are not compared, and the sentences on the task's question."""
    found, draws = measures_and_draws(results)
    table: Table = main_table(results, found, draws)
    title = Text(results.title.translate(CONTROL))
    grid = Grid("", *map(safe_markup, table.headings), title=title, title_justify="left")
    group = ""
    for row in table.rows:
        if row.group != group:
            group = row.group
            grid.add_section()
            grid.add_row(f"[dim]{safe_markup(group)}[/dim]", *[""] * len(row.cells))
        label = f"{row.label}{f', {row.unit}' if row.unit else ''} {row.arrow}".strip()
        cells = [
            f"[bold]{safe_markup(cell.text)}[/bold]"
            if cell.best
            else f"{safe_markup(cell.text)}{' ≈' if cell.equal else ''}"
            for cell in row.cells
        ]
        grid.add_row(safe_markup(label), *cells)
    console = wide_console()
    console.print(grid)
    console.print("bold: best   ≈: not distinguishable from the best (p ≥ 0.05)   ↑ ↓: higher or lower is better")
    if all(len(several) == 1 for several in results.methods.values()):
        console.print("one seed: p-values count test examples only; --seeds 5 counts training variation too")
    few = few_examples_caution(draws)
    for sentence in (*test_set_sentences(draws["nll"]), *few, *question_sentences(results), *cautions(results)):
        console.print(safe_markup(sentence))


@contextmanager
def log_to_stderr(level: int = logging.INFO) -> Iterator[None]:
    """Context that prints log messages of this level or above to stderr."""
    log, shown = logging.getLogger("dissensus"), logging.StreamHandler()
    shown.setFormatter(logging.Formatter("dissensus: %(message)s"))
    before = log.level
    log.addHandler(shown)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(shown)
        log.setLevel(before)


def print_each(several: Iterable[str | Path]) -> None:
    """Prints one line for each."""
    for each in several:
        print(each)
