"""The rows of a data set: what a task learns, holds out and is tested on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

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


class LearnedRows(NamedTuple):
    """The rows of a set to learn. `validation`: None where it has none of its own; `ood`: foreign pixels of its test rows."""

    train: TaskRows
    test: TaskRows
    classes: tuple[str, ...]
    validation: TaskRows | None = None
    ood: Mapping[str, TaskRows] = MappingProxyType({})
