"""Recording: posteriors that train networks as ever and sample from what a recorder has kept of the run."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from dissensus.core.functions import DrawnFunctions
from dissensus.core.recorder import Recorder
from dissensus.core.weights import Weights
from dissensus.methods.parts.sampling import SamplingPosterior
from dissensus.methods.parts.trajectory import Snapshots, constant_tail
from dissensus.numerics.tree import Tensors


class RecordingPosterior(SamplingPosterior):
    """Base class of methods with a `recorder`, which a subclass builds on `self.recorded`.

        class Mine(RecordingPosterior):
            name = "mine"

            def __init__(self, networks, *, samples=20, likelihood=None, **prior):
                super().__init__(networks, samples=samples, likelihood=likelihood, **prior)
                self.recorder = MyRecorder(self.recorded)

    Args:
        networks: one module, held and not copied, or a list of M.
        samples: functions per network and draw.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    recorder: Recorder
    by_parts = True  # where the recorder can
    floor: ClassVar[float] = 0.5  # of the rate in the default schedule's tail
    judged_by: ClassVar[Literal["current", "draw"] | None] = None  # what is recorded in a run belongs together

    def recorded(self) -> Weights:
        """The weights to record, as they are now; raises where the network has others than when this was built."""
        self.check_network()
        return self.trained

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """Constant, linear to `floor`, constant over the last quarter: the weights must not come to rest."""
        return lambda epoch: constant_tail(epoch / max(epochs, 1), floor=self.floor)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        return self.recorder.sample(samples, generator)

    def look(self, loader: Iterable[Any]) -> DrawnFunctions:
        """Sampled networks, as they would be drawn at the end, but with batch statistics of these inputs.

        Of the validation inputs: a pass over the training set for each look would cost more than the training. Statistics of
        the network itself will not do: on validation rows of digits TRADI then has an NLL of 0.73, where those of the training
        rows give 0.186 and those of the validation rows 0.185.
        """
        return self.functions_of(self.drawn(loader))

    def sampled_names(self) -> list[str]:
        return list(self.recorder.weights.stored)


class SnapshotRecorder(Recorder):
    """Base class of recorders that look at the weights now and then; `record` says what is kept of a snapshot."""

    def __init__(self, source: Callable[[], Weights], snapshots: Snapshots) -> None:
        super().__init__(source)
        self.snapshots = snapshots

    @abstractmethod
    def record(self, number: int) -> None:
        """Takes in the weights as they are, the number-th snapshot, counted from 1; called without gradients."""

    @property
    def upcoming(self) -> bool:
        return self.snapshots.upcoming

    @property
    def ready(self) -> bool:
        return int(self.snapshots.taken) > 0

    def begin(self, steps: int, *, done: int = 0) -> None:
        self.snapshots.begin(steps, done=done)

    def begin_unmeasured(self, epochs: int) -> None:
        if None not in self.snapshots.given.values():
            return
        if epochs == 1:
            raise ValueError(
                "expected start and every in one epoch of unknown length, got None: when to take snapshots would be known "
                "when it is over; pass both, or call begin(steps_per_epoch, 1) first"
            )
        self.snapshots.wait()

    def observe(self, optimizer: Optimizer) -> None:
        if self.snapshots.due():
            self.record(self.snapshots.taken.add())

    def taken(self) -> int:
        """Snapshots so far; raises where there are none."""
        if not self.ready:
            raise ValueError(
                f"expected at least one snapshot of the weights, got none after {int(self.snapshots.observed)} observed "
                "steps; train with fit, or call observe(optimizer) after optimizer.step() (the first snapshot is at observe "
                f"call {self.snapshots.start}, from 0)"
            )
        return int(self.snapshots.taken)
