"""Progress of a long job in one line: a bar on a terminal if rich is installed, a line that is overwritten in a notebook.

Elsewhere it prints a line for the first and the last epoch, and between them at most every ten seconds. If processes work
together, only the first one shows progress, logs, and writes reports (`is_reporting_process`).
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from dissensus.utils.extras import is_installed

SECONDS = 10.0  # time without a line after which the next one is printed

_asked: list[Callable[[], bool]] = []  # whether this process speaks, once a mesh was made in it


def is_reporting_process() -> bool:
    """Whether this process shows progress, logs and writes reports: on a mesh, only the first one does."""
    return all(ask() for ask in _asked)


def set_reporting_check(ask: Callable[[], bool]) -> None:
    """Called when a mesh is made; `ask` returns whether this process is its first, or the mesh no longer exists."""
    _asked[:] = [ask]


logging.getLogger("dissensus").addFilter(lambda record: is_reporting_process())


class Progress:
    """`step()` after every batch, `end_epoch(number, text)` after every epoch; used as a context manager."""

    def __init__(self, epochs: int, steps_per_epoch: int | None = None, *, title: str, show: bool | str) -> None:
        """`show`: whether to show progress, or a title to show instead of `title`."""
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        self.title = show if isinstance(show, str) else title
        show = is_reporting_process() and show
        bar = bool(show) and sys.stderr.isatty() and is_installed("rich")
        self.lines = bool(show) and not bar
        self.done, self.steps = 0, 0  # epochs, steps of this one
        self.told = time.monotonic()  # when the last line was printed
        self.rewrites = "ipykernel" in sys.modules  # a notebook can overwrite its line, and shows stderr in red
        self.stream, self.width = sys.stdout if self.rewrites else sys.stderr, 0
        self.last = ""  # the last epoch's line, if it was not printed
        self.bar: Any = None
        self.task: Any = None
        if bar:
            from rich.console import Console  # imported here: only a terminal needs it
            from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn

            name = TextColumn("{task.description}", markup=False)  # a name may contain rich's markup
            columns = (name, BarColumn(), TextColumn("{task.fields[text]}", markup=False), TimeRemainingColumn())
            self.bar = Bar(*columns, console=Console(stderr=True), transient=False)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
            total = self.epochs * self.steps_per_epoch if self.steps_per_epoch else self.epochs
            self.task = self.bar.add_task(self.title, total=total, text="")
        return self

    def step(self) -> None:
        if self.bar is not None and self.steps_per_epoch:
            self.bar.advance(self.task)
        self.steps += 1
        if self.lines and time.monotonic() - self.told > SECONDS:
            of_all = f"/{self.steps_per_epoch}" if self.steps_per_epoch else ""
            self._print_line(f"epoch {self.done + 1}/{self.epochs}  batch {self.steps}{of_all}")

    def end_epoch(self, number: int, text: str) -> None:
        """Call it after epoch `number` (from 1)."""
        if self.bar is not None:
            self.bar.update(self.task, completed=number * (self.steps_per_epoch or 1), text=text)
        self.done, self.steps = number, 0
        self.last = f"epoch {number}/{self.epochs}  {text}"
        due = number in (1, self.epochs) or time.monotonic() - self.told > SECONDS
        if self.lines and (due or self.rewrites):
            self._print_line(self.last)

    def note(self, *texts: str) -> None:
        """Prints each text, unless it is empty, as a line that stays, or logs it where no progress is shown."""
        for text in filter(None, texts):
            if self.bar is None and not self.lines:
                logging.getLogger("dissensus").info("%s", text)
            else:
                print(f"{self.title}  {text}", file=sys.stderr, flush=True)

    def _print_line(self, text: str) -> None:
        line = f"{self.title}  {text}"
        text, end = (f"\r{line:<{self.width}}", "") if self.rewrites else (line, "\n")
        self.width = max(self.width, len(line))  # of the longest line, to be overwritten
        print(text, file=self.stream, flush=True, end=end)
        self.last, self.told = "", time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.lines:
            if self.last:  # stopped before the last epoch
                self._print_line(self.last)
            if self.rewrites and self.width:
                print(file=self.stream)


class LoaderProgress(Progress):
    """Progress over so many named loaders: a bar on a terminal, otherwise a line if one takes long."""

    def track_batches(self, loader: Iterable[Any], name: str, count: int | None) -> Iterator[Any]:
        """The loader's batches, with progress; `count`: their number, if known."""
        of_all = "" if count is None else f"/{count}"
        for number, batch in enumerate(loader, start=1):
            yield batch
            text = f"{name}  batch {number}{of_all}"
            if self.bar is not None:
                self.bar.update(self.task, text=text)
            elif self.lines and time.monotonic() - self.told > SECONDS:
                self._print_line(text)
        if self.bar is not None:
            self.bar.advance(self.task)
