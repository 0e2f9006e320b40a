"""Clock: the length of a training run and the number of steps done, for schedules, recorders and watchers."""

from collections.abc import Iterator
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from dissensus.core.optimisation import has_stepped
from dissensus.core.recorder import Recorder
from dissensus.core.standing import Ground
from dissensus.numerics.checks import one_of


class Watchers(nn.ModuleList):
    """Posteriors that record another one's training, by position or by name of the method."""

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, str):
            return super().__getitem__(which)
        found = {each.name: each for each in reversed(self)}
        return found[one_of("a watcher", which, reversed(found))]

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


class Clock(Ground):
    """Base class of `TrainingRules`. `fit`, or your own loop, calls `begin` once and `observe` after every step.

    Both calls are passed on to the method's recorders (its attributes of class `Recorder`) and to its watchers.
    """

    steps: Tensor  # () optimiser steps so far, over all runs; saved with the state
    watchers: Watchers  # posteriors that record this one's training (`ds.track`)

    def __init__(self) -> None:
        super().__init__()
        self.steps_per_epoch: int | None = None
        self.epochs: int | None = None
        self.began = 0  # `steps` at the beginning of this run
        self.batches_per_step = 1  # batches whose gradients make one step; `fit` sets it to `accumulate`
        self.ranks: Literal["independent"] | None = None  # set if every process of a group trains its own model
        self.mesh: Any = None  # a `ds.distributed.Mesh` of the processes that predict and evaluate together

    @property
    @final
    def run_length(self) -> int | None:
        """Optimiser steps of the whole run; None before `begin`."""
        return None if self.steps_per_epoch is None or self.epochs is None else self.steps_per_epoch * self.epochs

    @property
    @final
    def recorders(self) -> list[Recorder]:
        """The recorders of this method."""
        return [part for part in self._modules.values() if isinstance(part, Recorder)]

    @property
    @final
    def ready(self) -> bool:
        """Whether functions can be drawn yet: recorders must have observed enough steps first."""
        return all(recorder.ready for recorder in self.recorders)

    @property
    @final
    def observes(self) -> bool:
        """Whether `observe` does more than count steps."""
        return bool(self.recorders or len(self.watchers))

    @final
    def begin(self, steps_per_epoch: int, epochs: int, *, done: int = 0) -> None:
        """Sets the length of the whole run, for schedules and recorders; drops the calibration.

        Call it in your own training loop only; `fit` calls it by itself.

        Args:
            steps_per_epoch: optimiser steps in an epoch.
            epochs: epochs of the whole run.
            done: steps of the run that are already done, in a resumed run.
        """
        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs
        self.began = int(self.steps) - done
        self.uncalibrate("training")
        for watcher in self.watchers:
            watcher.begin(steps_per_epoch, epochs, done=done)
        for recorder in self.recorders:
            recorder.begin(steps_per_epoch * epochs, done=done)

    @final
    def begin_unmeasured(self, epochs: int) -> None:
        """Begins a run of this many epochs of unknown length. `begin` is called after the first epoch."""
        if self.began != int(self.steps):  # the length known so far belongs to an earlier run
            self.steps_per_epoch = self.epochs = None
        self.began = int(self.steps)
        self.uncalibrate("training")
        for watcher in self.watchers:
            watcher.begin_unmeasured(epochs)
        for recorder in self.recorders if self.steps_per_epoch is None else ():
            recorder.begin_unmeasured(epochs)

    @final
    def observe(self, optimizer: torch.optim.Optimizer) -> bool:
        """Counts an optimiser step and lets recorders read the weights; returns whether the optimiser has stepped.

        Call it after every `optimizer.step()` in your own training loop; `fit` calls it by itself.

        Args:
            optimizer: the optimiser that trains this posterior.
        """
        if not self.observes:
            return self._count(optimizer)
        recorders = self.recorders
        with torch.no_grad():
            for recorder in recorders:
                recorder.renew()  # first: if it raises, the step is not counted
            for watcher in self.watchers:
                watcher.observe(optimizer)
            stepped = self._count(optimizer)
            for recorder in recorders if stepped else ():
                recorder.observe(optimizer)
        return stepped

    def _count(self, optimizer: torch.optim.Optimizer) -> bool:
        """Counts a step if the optimiser has stepped."""
        stepped = has_stepped(self, optimizer)
        if stepped:
            self.steps.add_(1)
            if self.calibration is not None:  # a user's loop that did not call `begin`
                self.uncalibrate("training")
        return stepped
