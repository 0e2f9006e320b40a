"""The training trajectory of a network: step counts, when snapshots are taken, and learning rate schedules."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.utils.checks import integer

TAIL = 0.75  # recording starts after this share of a run, when training has settled


class HostCopy:
    """A tensor's values on the host. They are read again if the tensor is another one, or was written by others since."""

    def __init__(self) -> None:
        self.known: tuple[Tensor | None, int, Any] = (None, 0, None)

    def read(self, tensor: Tensor) -> Any:
        if self.known[0] is not tensor or self.known[1] != tensor._version:
            self.note(tensor, tensor.tolist())
        return self.known[2]

    def note(self, tensor: Tensor, values: Any) -> None:
        """These are the tensor's values now."""
        self.known = tensor, tensor._version, values


class Count(nn.Module):
    """A count kept as a tensor, which is saved with the state, and as an int, which is read without waiting for a device."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))
        self._host = HostCopy()

    def __int__(self) -> int:
        return self._host.read(self.value)  # type: ignore[no-any-return]

    def add(self) -> int:
        """Adds one and returns the count."""
        number = int(self) + 1
        self._host.note(self.value.add_(1), number)
        return number

    def reset(self) -> None:
        self.value.zero_()


class Snapshots(nn.Module):
    """The times of snapshots: after the observe calls start, start + every, …, counted from 0.

    If one of the two is None, `begin` spreads `wanted` snapshots over the part of the run after the share `tail`, with the
    last one on the last step, and discards those of an earlier run. Without `begin`, every step from the first is recorded.
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

        If the tail has already begun, snapshots are spread over the remaining steps. A second call for the same run, as
        when it is resumed, changes nothing.
        """
        start, every = self.requested.values()
        began, before = int(self.observed) - done, self._read_plan()[2:]
        self._is_waiting = False
        if [began, steps] == before or 0 < steps <= done:
            return
        late = done > 0  # steps already done cannot be recorded any more
        if start is None:
            behind = max(math.floor(self.tail * steps), done if late else 0)
            first, between = evenly_spaced(steps, self.wanted, behind=behind)
            start, every = began + (first if every is None else behind), every or between
            forget = True
        else:
            forget = every is None and late and before[1] == 0  # without a plan every step was recorded
            start = max(start, began + done) if forget else start
            every = every or max(1, (began + steps - start) // self.wanted)
        if forget:
            self.taken.reset()
        self._write_plan(start, every, began, steps)

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
        self.observed.add()
        return due

    def _read_plan(self) -> list[int]:
        return self._host.read(self.plan)  # type: ignore[no-any-return]

    def _write_plan(self, *plan: int) -> None:
        self._host.note(self.plan.copy_(torch.tensor(plan)), list(plan))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._is_waiting = False  # a state is not in the middle of a run
        super()._load_from_state_dict(*args, **kwargs)


def evenly_spaced(steps: int, wanted: int, *, behind: int | None = None) -> tuple[int, int]:
    """(first, every): up to `wanted` steps of a run, evenly spaced after its first `behind` steps, ending with the last.

    `behind` None: the steps before the tail.
    """
    length = max(1, steps - (math.floor(TAIL * steps) if behind is None else behind))
    count = min(wanted, length)
    every = length // count
    return steps - 1 - every * (count - 1), every


def constant_tail(t: float, *, tail: float = TAIL, floor: float = 0.5) -> float:
    """Factor of the learning rate at the share t of a run: 1, then linear to `floor`, then constant.

    As in Maddox et al. 2019: linear between 50 % and 90 % of the time before the tail.
    """
    return 1.0 + (floor - 1.0) * min(max((t / tail - 0.5) / 0.4, 0.0), 1.0)


def cosine_cycles(t: float, *, cycles: int) -> float:
    """Factor of the learning rate at the share t of a run: from 1 down to 0 along a cosine, `cycles` times over.

    Huang et al. 2017, eq. (2).
    """
    return 0.5 * (1.0 + math.cos(math.pi * ((t * cycles) % 1.0)))
