"""Snapshot ensembles: members are networks saved at several times of one training run.

Huang, Li, Pleiss, Liu, Hopcroft & Weinberger, "Snapshot ensembles: train 1, get M for free", ICLR 2017.
"""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.core.networks import MethodKeywords, Networks
from dissensus.core.weights import Recorder, Weights
from dissensus.methods.parts.sampling_posterior import RecordingPosterior
from dissensus.utils.checks import integer
from dissensus.utils.counts import Count, HostCopy
from dissensus.utils.parameter_groups import TAIL
from dissensus.utils.tensor_tree import Tensors, TensorTree

log = logging.getLogger("dissensus")


@final
class SnapshotEnsemble(RecordingPosterior):
    """An ensemble of the last `members` snapshots of one training run, with their batch statistics and learned noise.

    `fit` divides the run into `members` equal cycles; in each, the learning rate follows a cosine to 0.

    Args:
        networks: one module, not copied, or a list of M; each network gives `members` functions.
        members: snapshots kept of each network.
        start, every: the optimiser steps (observe calls, from 0) that become snapshots; None takes the ends of cycles.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "snapshot_ensemble"
    random = False
    records_all = True
    recorder: "LastSnapshots"

    def __init__(
        self,
        networks: Networks,
        *,
        members: int = 5,
        start: int | None = None,
        every: int | None = None,
        **prior: Unpack[MethodKeywords],
    ) -> None:
        super().__init__(networks, samples=integer("members", members), **prior)
        self.members, self.start, self.every = members, start, every
        snapshots = Snapshots(start, every, wanted=members, tail=0.0)
        self.recorder = LastSnapshots(self.recorded_weights, snapshots, kept=members)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """A cosine from 1 to 0 in each of `members` equal cycles."""
        return lambda epoch: cosine_cycles(epoch / max(epochs, 1), cycles=self.samples)


class Snapshots(nn.Module):
    """The times of snapshots: after the observe calls start, start + every, …, counted from 0.

    If one of the two is None, `begin` spreads `wanted` snapshots over the part of the run after the share `tail`, with the
    last one on the last step, and discards those of an earlier run. Without `begin`, every step is recorded, with a warning.
    The plan is saved with the state, so a resumed run continues with it.
    """

    plan: Tensor

    def __init__(self, start: int | None, every: int | None, wanted: int, *, tail: float = TAIL) -> None:
        super().__init__()
        if start is not None:
            integer("start", start, least=0, hint="it counts observe calls from 0")
        if every is not None:
            integer("every", every, hint="it counts observe calls between snapshots")
        self.requested = {"start": start, "every": every}
        self.wanted, self.tail = wanted, tail
        self.observed = Count()
        self.taken = Count()
        # start, every, and the run they were planned for: its first observe call and its number of steps, 0 for none
        self.register_buffer("plan", torch.tensor([start or 0, every or 1, 0, 0]))
        self._host = HostCopy()
        self._is_waiting = False  # for `begin`, in a run whose length is known after its first epoch

    @property
    def start(self) -> int:
        return self._read_plan()[0]

    @property
    def every(self) -> int:
        return self._read_plan()[1]

    def begin(self, steps: int, *, done: int = 0) -> None:
        """Plans the snapshots over the tail of a run of `steps` steps, of which `done` are already done.

        If the tail has begun, snapshots are spread over the remaining steps. A second call for a resumed run changes nothing.
        """
        start, every = self.requested.values()
        began, before = int(self.observed) - done, self._read_plan()[2:]
        self._is_waiting = False
        if [began, steps] == before or 0 < steps <= done:
            return
        if start is None:
            behind = max(math.floor(self.tail * steps), done)  # steps already done cannot be recorded any more
            first, between = evenly_spaced(steps, self.wanted, behind=behind)
            start, every = began + (first if every is None else behind), every or between
            forget = True
        else:
            forget = every is None and done > 0 and before[1] == 0  # without a plan every step was recorded
            start = max(start, began + done) if forget else start
            every = every or max(1, (began + steps - start) // self.wanted)
        if forget:
            self.taken.reset()
        plan = [start, every, began, steps]
        self._host.note(self.plan.copy_(torch.tensor(plan)), plan)

    def wait(self) -> None:
        """Stops recording until `begin`, if the plan depends on the length of the run."""
        self._is_waiting = None in self.requested.values()

    @property
    def reads_next_step(self) -> bool:
        """Whether the next step will be recorded."""
        if self._is_waiting:
            return False
        since = int(self.observed) - self.start
        return since >= 0 and since % self.every == 0

    def count_step(self) -> bool:
        """Whether to record the step just taken; call it once per step."""
        due = self.reads_next_step
        first, advice = self.observed.add() == 1, "use ds.watching, or call begin(steps, 1) first"
        if first and None in self.requested.values() and not (self._is_waiting or self._read_plan()[3]):
            log.warning("run of unknown length: every step is a snapshot; %s", advice)
        return due

    def _read_plan(self) -> list[int]:
        return self._host.read(self.plan)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._is_waiting = False  # a state is not in the middle of a run
        super()._load_from_state_dict(*args, **kwargs)


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
            advice = "train with fit, pass ds.watching the run's steps=, or call observe(optimizer) after each step"
            raise ValueError(f"expected at least one snapshot of the weights, got {got}; {advice}")
        return int(self.snapshots.taken)


class LastSnapshots(SnapshotRecorder):
    """Keeps the last `kept` snapshots of the weights."""

    def __init__(self, source: Callable[[], Weights], snapshots: Snapshots, *, kept: int) -> None:
        super().__init__(source, snapshots)
        self.kept = kept
        self.recorded = TensorTree()
        for name, rows in self.weights.rows().items():
            self.recorded.add_tensor(name, rows.new_zeros(len(rows), kept, *rows.shape[1:]))  # (M, K, ...)

    def with_members(self) -> list[tuple[Tensor, int]]:
        return [(tensor, 0) for tensor in self.recorded.buffers()]

    def record(self, number: int) -> None:
        recorded, row = dict(self.recorded.named_buffers()), (number - 1) % self.kept
        for name, rows in self.weights.rows().items():
            recorded[name][:, row] = rows

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        taken = self.snapshot_count()
        held = torch.arange(max(0, taken - self.kept), taken) % self.kept  # in the order of the run
        return {name: rows[:, held] for name, rows in self.recorded.named_buffers()}


def evenly_spaced(steps: int, wanted: int, *, behind: int | None = None) -> tuple[int, int]:
    """(first, every): up to `wanted` steps up to the last, evenly spaced after the first `behind`; None: before the tail."""
    length = max(1, steps - (math.floor(TAIL * steps) if behind is None else behind))
    count = min(wanted, length)
    every = length // count
    return steps - 1 - every * (count - 1), every


def cosine_cycles(t: float, *, cycles: int) -> float:
    """Factor of the rate at the share t of a run: a cosine from 1 to 0, `cycles` times over (Huang et al. 2017, eq. (2))."""
    return 0.5 * (1.0 + math.cos(math.pi * ((t * cycles) % 1.0)))
