"""Recorded: what SWAG, SWA and snapshot ensembles have in common, a run whose weights are looked at now and then."""

from abc import abstractmethod

import torch
from torch.optim import Optimizer

from dissensus.core.sampled import Sampled
from dissensus.core.trajectory import TAIL, Snapshots


class Recorded(Sampled):
    """A posterior that takes snapshots of the network in training. A method says what it keeps of one (`record`)."""

    snapshots: Snapshots
    tail = TAIL  # share of the run before the first snapshot, where the caller does not say

    @abstractmethod
    def record(self, number: int) -> None:
        """Takes in the weights as they are, the number-th snapshot, counted from 1; called without gradients."""

    @property
    def ready(self) -> bool:
        return int(self.snapshots.taken) > 0

    def begin(self, steps_per_epoch: int, epochs: int) -> None:
        super().begin(steps_per_epoch, epochs)
        self.snapshots.begin(steps_per_epoch * epochs, tail=self.tail)

    @torch.no_grad()
    def observe(self, optimizer: Optimizer) -> None:
        if self.snapshots.upcoming:
            self.check_network()
        super().observe(optimizer)
        if self.snapshots.due():
            self.record(self.snapshots.taken.add())


def nothing_recorded(snapshots: Snapshots) -> ValueError:
    """What to say where functions are asked for before the first snapshot."""
    return ValueError(
        f"expected at least one snapshot of the weights, got none after {int(snapshots.observed)} observed steps; train "
        f"with fit, or call observe(optimizer) after optimizer.step() (the first snapshot is at observe call "
        f"{snapshots.start}, from 0)"
    )
