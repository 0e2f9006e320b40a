"""Clock: how far training is. A posterior's schedules are told how long the run is and count its steps."""

import torch
from torch import Tensor, nn

from dissensus.core.optimisation import check_once


class Clock(nn.Module):
    """The part of a posterior that `fit`, or a loop of one's own, tells of the run: begin once, observe after every step."""

    steps: Tensor  # all there have been, over all runs; saved with the state

    def __init__(self) -> None:
        super().__init__()
        self.steps_per_epoch: int | None = None
        self.epochs: int | None = None
        self.began = 0  # the step at which the run began
        self.batches_per_step = 1  # whose gradients are gathered; `fit` tells

    @property
    def run_length(self) -> int | None:
        """Optimiser steps of the whole run, where `begin` has told."""
        return None if self.steps_per_epoch is None or self.epochs is None else self.steps_per_epoch * self.epochs

    def begin(self, steps_per_epoch: int, epochs: int, *, done: int = 0) -> None:
        """Tells the method how long the whole run is, and how many steps of it are done, so that its schedules know."""
        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs
        self.began = int(self.steps) - done

    def begin_unmeasured(self, epochs: int) -> None:
        """Tells the method that a run begins whose length its first epoch will tell; `begin` follows then."""
        if self.began != int(self.steps):  # what was told is of another run
            self.steps_per_epoch = self.epochs = None
        self.began = int(self.steps)

    def observe(self, optimizer: torch.optim.Optimizer) -> None:
        """The method's clock: to be called after every optimizer.step()."""
        check_once(self, optimizer)
        self.steps += 1
