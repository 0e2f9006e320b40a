"""The division of `fit` for one process, which has all members and all rows."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dissensus.core.batch import Batch
from dissensus.core.loader import Loader
from dissensus.core.posterior import Posterior


class TrainingPartition:
    """Training on one process. `is_first`: whether it writes and prints; `mine`: which members lie here."""

    is_first = True
    mesh: Any = None
    active_mesh: Any = None  # the mesh, where there are several processes
    member_slice: slice = slice(None)
    loader_count = 1  # whose batches make a whole one

    def begin(self) -> None:
        """Before anything trains."""

    def local_state(self, optimizer: Optimizer, batch: Batch) -> AbstractContextManager[object]:
        """Around the steps of an epoch."""
        return nullcontext()

    def full_optimizer_state(self, optimizer: Optimizer) -> AbstractContextManager[object]:
        """Around what reads or writes the optimiser's state for a file."""
        return nullcontext()

    def choose_engine(self, engine: str) -> str:
        """How members run."""
        return engine

    def training_loader(self, loader: Loader) -> Any:
        """What training reads from a loader."""
        return loader

    def complete_loader(self, loader: Loader) -> Loader:
        """The loader's batches, whole: for what is measured on all rows."""
        return loader

    def begin_epoch(self, loader: Loader, index: int) -> None:
        """Before an epoch of this number."""

    def take_local_rows(self, batch: Batch) -> Batch:
        """The rows of a batch that lie here."""
        return batch

    def gather_losses(self, losses: Tensor) -> Tensor:
        """(M,) losses, of those that lie here."""
        return losses

    def assigned_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches that this process looks at where each is looked at by one."""
        return iter(batches)

    def end(self, posterior: Posterior) -> None:
        """After training: processes that trained together also predict together."""
        for each in (posterior, *posterior.watchers):
            each.mesh = self.mesh

    def broadcast_object(self, value: Any) -> Any:
        """What the first process says."""
        return value
