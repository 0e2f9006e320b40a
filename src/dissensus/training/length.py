"""How long a run is, told to the posterior as soon as it is known: before the first epoch, or after it."""

import math
from collections.abc import Iterable
from typing import Any

from dissensus.core import batch as batches
from dissensus.core.posterior import Posterior


class Length:
    """Batches and optimiser steps of an epoch. `batches`: None where the loader does not know how many it gives.

    `over`: epochs that a checkpoint brought along; `done`: their steps, where it says; `steps_per_epoch`: as it says.
    """

    def __init__(
        self,
        posterior: Posterior,
        loader: Iterable[Any],
        *,
        epochs: int,
        accumulate: int,
        over: int = 0,
        done: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.posterior = posterior
        self.epochs = epochs
        self.over = over
        self.batches = batches.length(loader)
        self.behind = done
        self.unknown = False
        self.first = int(posterior.steps)  # of the epochs that follow
        if self.batches is not None:
            steps_per_epoch = max(1, math.ceil(self.batches / accumulate))
        if steps_per_epoch is not None:
            self._tell(steps_per_epoch, over * steps_per_epoch if done is None else done)
        elif over < epochs:
            posterior.begin_unmeasured(epochs)
            self.unknown = posterior.steps_per_epoch is None  # else the caller has begun the run already

    def epoch_over(self) -> None:
        """Tells the posterior, where the epoch just trained is what the length is known by."""
        if self.unknown:
            trained = int(self.posterior.steps) - self.first
            self._tell(max(1, trained), trained + (self.over * trained if self.behind is None else self.behind))

    def _tell(self, steps_per_epoch: int, done: int) -> None:
        self.unknown = False
        if done:
            self.posterior.begin(steps_per_epoch, self.epochs, done=done)
        else:
            self.posterior.begin(steps_per_epoch, self.epochs)
