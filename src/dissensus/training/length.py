"""The length of a run, passed to the posterior as soon as it is known: before the first epoch, or after it."""

import math
from collections.abc import Iterable
from typing import Any

from dissensus.core import batch as batches
from dissensus.core.posterior import Posterior


class Length:
    """Batches and optimiser steps of an epoch. `batches`: None if the loader has no length.

    From a checkpoint: `over`, the epochs done; `done`, their steps; `steps_per_epoch`.
    """

    def __init__(
        self,
        posterior: Posterior,
        loader: Iterable[Any],
        *,
        epochs: int,
        accumulate: int,
        over: int = 0,
        done: int = 0,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.posterior = posterior
        self.epochs = epochs
        self.batches = batches.length(loader)
        self.done = done
        self.unknown = False
        self.first = int(posterior.steps)  # first step of the epochs that follow
        if self.batches is not None:
            steps_per_epoch = max(1, math.ceil(self.batches / accumulate))
        if steps_per_epoch is not None:
            posterior.begin(steps_per_epoch, epochs, done=done)
        elif over < epochs:
            posterior.begin_unmeasured(epochs)
            self.unknown = posterior.steps_per_epoch is None  # else the caller has already called `begin`

    def epoch_over(self) -> None:
        """Passes the length to the posterior, if the epoch just trained has shown it."""
        if self.unknown:
            self.unknown = False
            trained = int(self.posterior.steps) - self.first
            self.posterior.begin(max(1, trained), self.epochs, done=trained + self.done)
