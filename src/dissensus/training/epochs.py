"""The epochs of a run: their length, passed to the posterior as soon as it is known, and the part done of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.core.loader import Loader
from dissensus.core.posterior import Posterior
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.progress import Progress


class RunLength:
    """The optimiser steps of an epoch. From a checkpoint: `over`, the epochs done; `done`, their steps; `steps_per_epoch`."""

    def __init__(
        self, posterior: Posterior, loader: Loader, epochs: int, accumulate: int, *, over: int = 0, **told: int | None
    ) -> None:
        self.posterior, self.epochs = posterior, epochs
        self.done, steps_per_epoch = told.get("done") or 0, told.get("steps_per_epoch")
        self.is_unknown = False
        self.first_step = int(posterior.steps)  # first step of the epochs that follow
        if (batches := loader.length) is not None:
            steps_per_epoch = max(1, math.ceil(batches / accumulate))
        if steps_per_epoch is not None:
            posterior.begin(steps_per_epoch, epochs, done=self.done)
        elif over < epochs:
            posterior.begin(None, epochs)
            self.is_unknown = posterior.steps_per_epoch is None  # else the caller has already called `begin`

    def end_epoch(self) -> None:
        """Passes the length to the posterior, if the epoch just trained has shown it."""
        if self.is_unknown:
            self.is_unknown = False
            trained = int(self.posterior.steps) - self.first_step
            self.posterior.begin(max(1, trained), self.epochs, done=trained + self.done)


@dataclass
class PartialEpoch:
    """The first batches of an epoch: number, examples, summed losses (M,), seconds; and the state at the epoch's beginning.

    A run that SIGTERM interrupted continues from it.
    """

    random: Tensor | None = None  # torch's random state at the beginning, on the host and on the GPU
    cuda: Tensor | None = None
    loader: dict[str, Any] | None = None
    batches: int = 0
    examples: int = 0
    total: Tensor | None = None
    seconds: float = 0.0

    @classmethod
    def start_epoch(cls, loader: Loader, device: torch.device) -> PartialEpoch:
        """An empty part of an epoch that begins now."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, loader.state())

    def remaining_batches(self, loader: Iterable[Any], device: torch.device, bar: Progress) -> Iterator[Any]:
        """The loader's batches after this part; the loader is in its state at the beginning of the epoch."""
        if self.random is None or not self.batches:
            return iter(loader)
        with preserve_random_state(device):  # later draws are those that would have followed the last of these batches
            torch.set_rng_state(self.random.cpu())
            if self.cuda is not None and device.type == "cuda":
                torch.cuda.set_rng_state(self.cuda.cpu(), device)
            batches = iter(loader)
            for _ in range(self.batches):
                next(batches)
                bar.step()
        return batches
