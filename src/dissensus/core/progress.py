"""Progress of a long job in one line: a bar on a terminal, a line that is written over in a notebook; nothing when not wanted.

In a file, a line for the first epoch, for the last, and between them where ten seconds went by without one. Of processes that
work together only the first shows it, logs, and writes reports (`speaks`).
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

SECONDS = 10.0  # without a line, after which an epoch that still runs gets one

_asked: list[Callable[[], bool]] = []  # whether this process speaks, where a mesh was made in it


def speaks() -> bool:
    """Whether this process shows progress, logs and writes reports: on a mesh the first one does, for all."""
    return all(ask() for ask in _asked)


def ask_before_speaking(ask: Callable[[], bool]) -> None:
    """Called where a mesh is made: `ask` says whether this process is its first one, or it is no more."""
    _asked[:] = [ask]


logging.getLogger("dissensus").addFilter(lambda record: speaks())


class Progress:
    """`step()` after every batch, `epoch(text)` after every epoch; used as a context manager."""

    def __init__(self, epochs: int, steps_per_epoch: int | None, *, title: str, show: bool | str) -> None:
        """`show`: whether to, or under which title in place of `title`."""
        self.epochs = epochs
        self.steps_per_epoch = steps_per_epoch
        self.title = show if isinstance(show, str) else title
        show = speaks() and show
        self.lines = bool(show) and not sys.stderr.isatty()
        self.done, self.steps, self.told = (
            0,
            0,
            time.monotonic(),
        )  # epochs, steps of this one, when the last line was printed
        self.rewrites = "ipykernel" in sys.modules  # a notebook goes back to the start of its line
        self.last = ""  # of an epoch, where it was not printed
        self.bar: Any = None
        self.task: Any = None
        if show and sys.stderr.isatty():
            from rich.console import Console  # imported here: only a terminal needs it
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}", markup=False),  # a name may hold what rich takes for markup
                BarColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(),
            )
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
            self._tell(f"epoch {self.done + 1}/{self.epochs}  batch {self.steps}{of_all}")

    def epoch(self, number: int, text: str) -> None:
        """To be told after epoch `number` (from 0)."""
        if self.bar is not None:
            done = (number + 1) * (self.steps_per_epoch or 1)
            self.bar.update(self.task, completed=done, text=text)
        self.done, self.steps = number + 1, 0
        self.last = f"epoch {number + 1}/{self.epochs}  {text}"
        due = number == 0 or number + 1 == self.epochs or time.monotonic() - self.told > SECONDS
        if self.lines and (due or self.rewrites):
            self._tell(self.last)

    def _tell(self, text: str) -> None:
        line = f"{self.title}  {text}"
        print(
            f"\r{line:<79}" if self.rewrites else line, file=sys.stderr, flush=True, end="" if self.rewrites else "\n"
        )
        self.last, self.told = "", time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.lines:
            if self.last:  # stopped before the last epoch
                self._tell(self.last)
            if self.rewrites:
                print(file=sys.stderr)


class LoaderProgress(Progress):
    """Progress over several loaders by name: a bar on a terminal; otherwise a line where one takes long."""

    def __init__(self, loaders: int, *, title: str, show: bool | str) -> None:
        super().__init__(loaders, None, title=title, show=show)

    def over(self, loader: Iterable[Any], name: str, count: int | None) -> Iterator[Any]:
        """The batches of a loader of so many."""
        of_all = "" if count is None else f"/{count}"
        for number, batch in enumerate(loader, start=1):
            yield batch
            text = f"{name}  batch {number}{of_all}"
            if self.bar is not None:
                self.bar.update(self.task, text=text)
            elif self.lines and time.monotonic() - self.told > SECONDS:
                self._tell(text)
        if self.bar is not None:
            self.bar.advance(self.task)
