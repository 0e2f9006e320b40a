"""Progress of a long job: a bar on a terminal, one line per epoch otherwise, nothing when not wanted."""

import sys
from types import TracebackType
from typing import Any


class Progress:
    """`step()` after every batch, `epoch(text)` after every epoch; used as a context manager."""

    def __init__(self, epochs: int, steps_per_epoch: int | None, *, title: str, show: bool | str) -> None:
        """`show`: whether to, or under which title in place of `title`."""
        self.epochs = epochs
        self.steps_per_epoch = steps_per_epoch
        self.title = show if isinstance(show, str) else title
        self.lines = bool(show) and not sys.stderr.isatty()
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

    def __enter__(self) -> "Progress":
        if self.bar is not None:
            self.bar.start()
            total = self.epochs * self.steps_per_epoch if self.steps_per_epoch else self.epochs
            self.task = self.bar.add_task(self.title, total=total, text="")
        return self

    def step(self) -> None:
        if self.bar is not None and self.steps_per_epoch:
            self.bar.advance(self.task)

    def epoch(self, number: int, text: str) -> None:
        """To be told after epoch `number` (from 0)."""
        if self.bar is not None:
            done = (number + 1) * (self.steps_per_epoch or 1)
            self.bar.update(self.task, completed=done, text=text)
        if self.lines:
            print(f"{self.title}  epoch {number + 1}/{self.epochs}  {text}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
