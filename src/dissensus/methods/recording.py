"""Recording: what SWAG, SWA and snapshot ensembles have in common, a run whose weights are looked at now and then."""

from abc import abstractmethod

import torch
from torch.optim import Optimizer

from dissensus.methods.sampling import SamplingPosterior
from dissensus.methods.trajectory import TAIL, Snapshots


class RecordingPosterior(SamplingPosterior):
    """Base class of methods that take snapshots of the network in training; `record` says what is kept of one."""

    snapshots: Snapshots
    keeps_best = False  # the snapshots of a run belong together
    tail = TAIL  # share of the run before the first snapshot, where the caller does not say

    @abstractmethod
    def record(self, number: int) -> None:
        """Takes in the weights as they are, the number-th snapshot, counted from 1; called without gradients."""

    @property
    def ready(self) -> bool:
        return int(self.snapshots.taken) > 0

    def begin(self, steps_per_epoch: int, epochs: int, *, done: int = 0) -> None:
        super().begin(steps_per_epoch, epochs, done=done)
        self.snapshots.begin(steps_per_epoch * epochs, tail=self.tail, done=done)

    def begin_unmeasured(self, epochs: int) -> None:
        super().begin_unmeasured(epochs)
        if self.steps_per_epoch is not None or None not in self.snapshots.given:
            return
        if epochs == 1:
            raise ValueError(
                f"expected start and every for {type(self).__name__} in one epoch of unknown length, got None: when to take "
                "snapshots would be known when it is over; pass both, or call begin(steps_per_epoch, 1) first"
            )
        self.snapshots.wait()

    @torch.no_grad()
    def observe(self, optimizer: Optimizer) -> bool:
        if self.snapshots.upcoming:
            self.check_network()
        stepped = super().observe(optimizer)
        if stepped and self.snapshots.due():
            self.record(self.snapshots.taken.add())
        return stepped


def nothing_recorded(snapshots: Snapshots) -> ValueError:
    """What to say where functions are asked for before the first snapshot."""
    return ValueError(
        f"expected at least one snapshot of the weights, got none after {int(snapshots.observed)} observed steps; train "
        f"with fit, or call observe(optimizer) after optimizer.step() (the first snapshot is at observe call "
        f"{snapshots.start}, from 0)"
    )
