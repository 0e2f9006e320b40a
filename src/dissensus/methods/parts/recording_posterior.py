"""Recording: posteriors that train networks as usual and sample from the statistics that a recorder kept."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.recorder import Recorder
from dissensus.core.weights import Weights
from dissensus.methods.parts.sampling_posterior import SamplingPosterior
from dissensus.methods.parts.trajectory import Snapshots, constant_tail
from dissensus.utils.tensor_tree import Tensors


class RecordingPosterior(SamplingPosterior):
    """Base class of methods that record the weights during training and sample from the record.

    A subclass builds its `recorder` on `self.recorded`:

        class Mine(RecordingPosterior):
            name = "mine"

            def __init__(self, networks, *, samples=20, likelihood=None, **prior):
                super().__init__(networks, samples=samples, likelihood=likelihood, **prior)
                self.recorder = MyRecorder(self.recorded)

    Args:
        networks: one module, not copied, or a list of M.
        samples: functions per network and draw.
        latents: a module with extra trained tensors; None has none.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    recorder: Recorder
    can_shard = True  # if the recorder can
    floor: ClassVar[float] = 0.5  # factor of the rate at the end of the default schedule
    judged_by: ClassVar[Literal["current", "draw"] | None] = None  # a record belongs to a whole run, not to an epoch

    def recorded_weights(self) -> Weights:
        """The weights to record; raises if the network's parameters have changed since the posterior was built."""
        self.check_network()
        return self.trained

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """Constant, then linear to `floor`, then constant over the last quarter, so that the weights keep moving."""
        return lambda epoch: constant_tail(epoch / max(epochs, 1), floor=self.floor)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        return self.recorder.sample(samples, generator)

    def draw_for_validation(self, loader: Iterable[Any]) -> DrawnFunctions:
        """Sampled networks, as they would be drawn at the end, but with batch statistics of these (validation) inputs.

        A pass over the training set for each look would cost more than the training. The network's own statistics are not
        good enough: on validation rows of digits TRADI then has an NLL of 0.73, against 0.186 with statistics of the
        training rows and 0.185 with those of the validation rows.
        """
        return self.make_functions(self.sample_families(loader))

    def sampled_names(self) -> list[str]:
        return list(self.recorder.weights.stored)


class SnapshotRecorder(Recorder):
    """Base class of recorders that take snapshots of the weights; `record` decides what to keep of each."""

    def __init__(self, source: Callable[[], Weights], snapshots: Snapshots) -> None:
        super().__init__(source)
        self.snapshots = snapshots

    @abstractmethod
    def record(self, number: int) -> None:
        """Records the present weights as snapshot `number`, counted from 1; called under no_grad."""

    @property
    def reads_next_step(self) -> bool:
        return self.snapshots.reads_next_step

    @property
    def ready(self) -> bool:
        return int(self.snapshots.taken) > 0

    def begin(self, steps: int, *, done: int = 0) -> None:
        self.snapshots.begin(steps, done=done)

    def begin_unmeasured(self, epochs: int) -> None:
        if None not in self.snapshots.requested.values():
            return
        if epochs == 1:
            advice = "pass both, or call begin(steps_per_epoch, 1) first"
            raise ValueError(f"expected start and every for one epoch of unknown length, got None; {advice}")
        self.snapshots.wait()

    def observe(self, optimizer: Optimizer) -> None:
        if self.snapshots.count_step():
            self.record(self.snapshots.taken.add())

    def snapshot_count(self) -> int:
        """Number of snapshots so far; raises if there are none."""
        if not self.ready:
            got = f"none after {int(self.snapshots.observed)} observed steps (the first is at call {self.snapshots.start})"
            advice = "train with fit, or call observe(optimizer) after optimizer.step()"
            raise ValueError(f"expected at least one snapshot of the weights, got {got}; {advice}")
        return int(self.snapshots.taken)
