"""Recorders: they watch weights in training, and sample weights around them afterwards. What networks are, they do not know."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.core.weights import Weights
from dissensus.numerics.divided import is_divided
from dissensus.numerics.tree import Tensors


class Recorder(nn.Module, ABC):
    """Base class of what watches weights in training and samples weights around them: `observe`, `ready`, `sample`.

    The source is asked again before every step that is recorded: it may have other tensors by then, or refuse the step.
    Keep what is recorded in buffers, so that it moves, is saved and is resumed with the posterior. `docs/guides/composing.md`
    has one.

    Args:
        source: gives the `Weights` to watch, of one network or many; `self.weights.rows()` is name -> (M, ...) as it is
            now. `RecordingPosterior` passes its `recorded`.
    """

    by_parts: ClassVar[bool] = (
        False  # whether it can record weights of which each process has a part (`numerics/divided.py`)
    )

    def __init__(self, source: Callable[[], Weights]) -> None:
        super().__init__()
        self.source = source
        self.weights = source()
        if not self.by_parts and any(map(is_divided, self.weights.stored.values())):
            raise NotImplementedError(
                f"expected weights that lie whole in a process, got divided ones, which {type(self).__name__} cannot record; "
                "leave shard out"
            )

    def with_members(self) -> list[tuple[Tensor, int]]:
        """(buffer, its axis of members), of every buffer that has one: processes that train together divide these.

        Asked of several networks only; without it, these train on a mesh of the data axis alone.
        """
        raise ValueError(
            f"expected a recorder that says which buffers have an axis of members, got {type(self).__name__}; define "
            "with_members, or divide batches alone: mesh(members=1)"
        )

    def begin(self, steps: int, *, done: int = 0) -> None:
        """Called before training: the run has this many optimiser steps, `done` of them are behind (a resumed run)."""

    def begin_unmeasured(self, epochs: int) -> None:
        """Called before a run whose length is unknown; `begin` follows once the first epoch has been counted."""

    @property
    def upcoming(self) -> bool:
        """Whether the next `observe` reads the weights."""
        return True

    def renew(self) -> None:
        """Asks for the weights again, where the next `observe` reads them."""
        if self.upcoming:
            self.weights = self.source()

    @abstractmethod
    def observe(self, optimizer: Optimizer) -> None:
        """Called after every optimiser step, without gradients; reads `self.weights`."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether there is something to sample from."""

    @abstractmethod
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        """Name -> (M, S, ...): S samples of each network's weights.

        Random numbers come from the generator; None is torch's own stream.
        """
