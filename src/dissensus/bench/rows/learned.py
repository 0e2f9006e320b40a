"""The rows of a data set: what a task learns, holds out and is tested on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.data.locate import FOLDER_VARIABLE, data_folder

SetKind = Literal["classification", "regression", "segmentation"]
Root = str | Path | None


class TaskRows(NamedTuple):
    """Inputs and targets: images (N, C, H, W) uint8 or rows (N, D); classes (N,), masks (N, H, W) uint8 or values (N, 1)."""

    x: Tensor
    y: Tensor
    true: Tensor | None = None  # the labels before some were made wrong; None where none were

    def at(self, rows: Tensor) -> TaskRows:
        return TaskRows(self.x[rows], self.y[rows], None if self.true is None else self.true[rows])

    def first(self, count: int | None, *, seed: int) -> TaskRows:
        """At most `count` rows, chosen by the seed and kept in order."""
        if count is None or count >= len(self.y):
            return self
        return self.at(torch.randperm(len(self.y), generator=torch.Generator().manual_seed(seed))[:count].sort().values)


class Asked(NamedTuple):
    """What a set of the user's own is asked for."""

    folder: Root  # of the user's data
    beside: str  # the folder of the task file; "" where it is none of the user's
    kind: SetKind
    seed: int  # of what is held out

    def path(self, name: str) -> Path:
        """A file or folder: a whole path, or in the folder of the data, beside the task, or in the current folder."""
        asked = Path(name).expanduser()
        places = [data_folder(self.folder), Path(self.beside) if self.beside else None, Path()]
        tried = [asked] if asked.is_absolute() else [place / asked for place in places if place is not None]
        for path in tried:
            if path.exists():
                return path
        raise FileNotFoundError(
            f"expected {name!r} at {' or '.join(map(str, dict.fromkeys(tried)))}, got nothing there; correct its name in the "
            f"task, or name the folder it is in by --data or {FOLDER_VARIABLE}"
        )


class LearnedRows(NamedTuple):
    """The rows of a set to learn. `validation`: None where it has none of its own; `ood`, `shift`: what comes with it, for a
    segmentation the foreign pixels of its test rows."""

    train: TaskRows
    test: TaskRows
    classes: tuple[str, ...]
    validation: TaskRows | None = None
    ood: Mapping[str, TaskRows] = MappingProxyType({})
    shift: Mapping[str, TaskRows] = MappingProxyType({})
    read: Callable[[str, bool], TaskRows] | None = None  # (file, whether it has targets) -> rows like these
    sorted: bool = False  # whether training rows may come sorted by class
