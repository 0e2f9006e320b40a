"""Recorders: they observe weights during training and sample weights afterwards, without knowing the networks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.core.weights import Weights
from dissensus.utils.dtensor import is_divided
from dissensus.utils.tensor_tree import Tensors


class Recorder(nn.Module, ABC):
    """Base class of recorders: they observe weights during training and sample weights afterwards.

    Subclasses define `observe`, `ready` and `sample`. Keep the record in buffers, so that it is moved, saved and resumed with
    the posterior. `docs/guides/composing.md` has an example.

    Args:
        source: a function that returns the `Weights` to observe, of one network or many; it is called again before every
            recorded step, and may raise. `self.weights.rows()` is name -> (M, ...), the present values.
            `RecordingPosterior` passes its `recorded`.
    """

    # Whether it can record weights of which each process has a part (`utils/dtensor.py`).
    can_shard: ClassVar[bool] = False

    def __init__(self, source: Callable[[], Weights]) -> None:
        super().__init__()
        self.source = source
        self.weights = source()
        if not self.can_shard and any(map(is_divided, self.weights.stored.values())):
            kind = type(self).__name__
            raise NotImplementedError(f"expected whole weights for {kind}, got divided ones; leave shard out")

    def with_members(self) -> list[tuple[Tensor, int]]:
        """(buffer, its member axis) for every buffer that has one; processes that train together divide these.

        Needed only to divide several networks over processes; without it, only batches can be divided.
        """
        kind = type(self).__name__
        raise ValueError(f"expected a recorder with with_members, got {kind}; define it, or use mesh(members=1)")

    def begin(self, steps: int, *, done: int = 0) -> None:
        """Called before training: the run has `steps` optimiser steps, of which `done` are already done (a resumed run)."""

    def begin_unmeasured(self, epochs: int) -> None:
        """Called before a run of unknown length; `begin` is called after the first epoch."""

    @property
    def reads_next_step(self) -> bool:
        """Whether the next `observe` reads the weights."""
        return True

    def renew_weights(self) -> None:
        """Gets the weights from the source again, if the next `observe` reads them."""
        if self.reads_next_step:
            self.weights = self.source()

    @abstractmethod
    def observe(self, optimizer: Optimizer) -> None:
        """Called after every optimiser step, under no_grad; reads `self.weights`."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether there is something to sample from."""

    @abstractmethod
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        """Name -> (M, S, ...): S samples of each network's weights.

        Random numbers come from `generator`; None is torch's global one.
        """
