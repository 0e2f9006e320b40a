"""Clock: how long a training run is, and how many steps of it are done. A method's schedules read it."""

import logging
from typing import Literal

import torch
from torch import Tensor, nn

from dissensus.core.optimisation import has_stepped

log = logging.getLogger("dissensus")


class Clock(nn.Module):
    """Base class of `TrainingRules`. `fit`, or a loop of one's own, calls `begin` once and `observe` after every step."""

    steps: Tensor  # () optimiser steps so far, over all runs; saved with the state
    temperature: Tensor  # () by which predictions are softened; saved with the state
    ranks: Literal["independent"] | None = None  # set where every process of a group trains its own model

    def __init__(self) -> None:
        super().__init__()
        self.steps_per_epoch: int | None = None
        self.epochs: int | None = None
        self.began = 0  # `steps` at the beginning of this run
        self.batches_per_step = 1  # batches whose gradients make one step; `fit` sets it to `accumulate`

    @property
    def run_length(self) -> int | None:
        """Optimiser steps of the whole run; None before `begin`."""
        return None if self.steps_per_epoch is None or self.epochs is None else self.steps_per_epoch * self.epochs

    def begin(self, steps_per_epoch: int, epochs: int, *, done: int = 0) -> None:
        """Sets the length of the whole run, and how many of its steps are `done` already (a resumed run), for schedules."""
        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs
        self.began = int(self.steps) - done
        self.reset_temperature("training")

    def begin_unmeasured(self, epochs: int) -> None:
        """Begins a run of unknown length. `begin` follows once the first epoch has been counted."""
        if self.began != int(self.steps):  # the length known so far is another run's
            self.steps_per_epoch = self.epochs = None
        self.began = int(self.steps)
        self.reset_temperature("training")

    def reset_temperature(self, change: str) -> None:
        """Sets the temperature to 1, with a warning where it was another: it was fitted to predictions that now change."""
        if (before := float(self.temperature)) != 1.0:
            log.warning(
                "%s sets the temperature back from %.3g to 1; call ds.temperature_scale afterwards", change, before
            )
            self.temperature.fill_(1.0)

    def observe(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimiser has stepped since the last call; if so, counts it, and trackers look at the weights."""
        stepped = has_stepped(self, optimizer)
        self.steps += stepped
        return stepped
