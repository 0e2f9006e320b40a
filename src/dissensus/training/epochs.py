"""The epochs of a run: its length, passed to the posterior as soon as it is known, and the epochs that validation may keep."""

import math
from collections.abc import Iterable
from typing import Any

from dissensus.core import batch as batches
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.posterior import Posterior, inference_context
from dissensus.methods.parts.sampling_posterior import RecordingPosterior
from dissensus.methods.parts.trajectory import evenly_spaced


class RunLength:
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
        self.posterior, self.epochs = posterior, epochs
        self.batches = batches.count_batches(loader)
        self.done = done
        self.is_unknown = False
        self.first_step = int(posterior.steps)  # first step of the epochs that follow
        if self.batches is not None:
            steps_per_epoch = max(1, math.ceil(self.batches / accumulate))
        if steps_per_epoch is not None:
            posterior.begin(steps_per_epoch, epochs, done=done)
        elif over < epochs:
            posterior.begin(None, epochs)
            self.is_unknown = posterior.steps_per_epoch is None  # else the caller has already called `begin`

    def end_epoch(self) -> None:
        """Passes the length to the posterior, if the epoch just trained has shown it."""
        if self.is_unknown:
            self.is_unknown = False
            trained = int(self.posterior.steps) - self.first_step
            self.posterior.begin(max(1, trained), self.epochs, done=trained + self.done)


LOOKS = 10  # most looks in a run: a look costs a draw


def can_keep_epoch(posterior: Posterior, epoch: int, epochs: int) -> bool:
    """Whether validation may keep the state after this epoch, counted from 0.

    No epoch of a trajectory; if functions are drawn, up to ten evenly spaced ones of the last quarter, including the last.
    """
    first, every = evenly_spaced(epochs, LOOKS) if posterior.judged_by == "draw" else (0, 1)
    return posterior.judged_by is not None and posterior.ready and epoch >= first and (epoch - first) % every == 0


def draw_for_validation(
    posterior: Posterior, epoch: int, epochs: int, validation: Iterable[Any]
) -> DrawnFunctions | None:
    """The functions drawn to evaluate this epoch; None if the networks in training are evaluated, or nothing is."""
    drawn = posterior.judged_by == "draw" and can_keep_epoch(posterior, epoch, epochs)
    if drawn and isinstance(posterior, RecordingPosterior):
        with inference_context(posterior):
            return posterior.draw_for_validation(validation)
    return None
