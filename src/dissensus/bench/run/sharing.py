"""What a run must offer to be one of several that share a training: `together` goes by this and knows no more of runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from dissensus.bench.rows.loaders import StandardisedBatches
from dissensus.bench.rows.sets import TaskData
from dissensus.bench.rows.sources import Rows
from dissensus.bench.task.config import RunConfig
from dissensus.core.posterior import Posterior
from dissensus.training.history import Epoch


class SharingRun(Protocol):
    """A run folder whose training may be one with that of others."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> RunConfig: ...

    @property
    def data(self) -> TaskData: ...

    @property
    def folders(self) -> Sequence[Path]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def trained(self) -> bool: ...

    def loader(self, rows: Rows, *, shuffle: bool = False) -> StandardisedBatches: ...

    def prepared(self) -> AbstractContextManager[None]: ...

    def log(self, epoch: Epoch) -> None: ...

    def keep(self, posterior: Posterior, epochs: Sequence[Epoch], **facts: Any) -> None: ...
