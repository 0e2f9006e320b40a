"""Results and checks that the host reads late, so that a GPU never waits for it.

A read of a value makes the host wait for the device, and the device then wait for its next batch. Values are copied while the
device goes on, and read when it has the batch after theirs, or, where nobody sees results before the end, a few batches more.
So few batches are under way at a time.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs

Item = TypeVar("Item")
MOST = 2**28  # bytes of inputs on a device whose checks are waited for


class AsyncHostCopy:
    """Tensors on their way to the host; `read()` waits for them, but not for what the device got to do afterwards."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        # Without waiting only from a CUDA device, where the copy goes to pinned memory and an event shows its end.
        self._tensors = [tensor.to("cpu", non_blocking=tensor.device.type == "cuda") for tensor in tensors]
        self._event = None
        if device is not None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def read(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
            # Pinned memory is slow to get and is not given back: the next batches use it again.
            self._event, self._tensors = None, [tensor.clone() for tensor in self._tensors]
        return self._tensors


class LateChecks:
    """Checks in a run over batches, of values that the device computes: done late, those of the first batch at once.

    Args:
        at_once: all of them at once, as where values are on the host, or where several processes must raise together.
        behind: batches by which they are late, fewer if inputs are large. With several, the device still has work while the
            host prepares a batch that takes it longer, such as a smaller last one, which has no graph.
    """

    def __init__(self, *, at_once: bool, behind: int = 1) -> None:
        self.at_once, self.delay = at_once, behind
        self._new: list[tuple[Tensor, Callable[[Tensor], object]]] = []
        self._pending: deque[tuple[AsyncHostCopy, list[Callable[[Tensor], object]]]] = deque()
        self._first = True

    def add(self, values: Tensor, check: Callable[[Tensor], object]) -> None:
        """Calls check(values), which raises if they are bad."""
        if self.at_once:
            check(values)
        else:
            self._new.append((values, check))

    def add_input_check(self, x: Inputs) -> None:
        """Checks that x is finite, unless `at_once`: then the loader's batches are checked when they are read."""
        size = sum(each.nbytes for each in batches.input_tensors(x) if each.device.type != "cpu")
        if not self.at_once and size:
            self.delay = max(1, min(self.delay, MOST // size))
            self.add(largest_input(x), lambda values: check_input_values(values, x))

    def end_batch(self) -> None:
        """To be called after every batch."""
        if self.at_once:
            return
        self._start_copy()
        self._run_checks(0 if self._first else self.delay)
        self._first = False

    def finish(self) -> None:
        """Does all checks that are left."""
        self._start_copy()
        self._run_checks(0)

    def _start_copy(self) -> None:
        if self._new:
            values, checks = zip(*self._new, strict=True)
            self._new = []
            self._pending.append((AsyncHostCopy(values), [*checks]))

    def _run_checks(self, left: int) -> None:
        """Does the checks of all but so many batches."""
        while len(self._pending) > left:
            arriving, checks = self._pending.popleft()
            for values, check in zip(arriving.read(), checks, strict=True):
                check(values)


class Timer:
    """Measures the time from its making to `stop`, on a CUDA device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._end = self._now()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        self._end = self._now()

    def seconds(self) -> float:
        """The time between; waits until it is known."""
        if self._device.type != "cuda":
            return float(self._end - self._start)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000


def delay_by_one(items: Iterable[Item]) -> Iterator[Item]:
    """The items, each when the next one has been made; the first at once."""
    waiting: list[Item] = []
    for number, item in enumerate(items):
        yield from waiting
        waiting = [item]
        if number == 0:
            yield waiting.pop()
    yield from waiting


def check_input_values(found: Tensor, x: Inputs) -> None:
    """Raises if what `largest` found in the inputs is not finite, if possible with their row."""
    if not float(found) < math.inf:
        batches.check_finite(x, anywhere=True)
        what = "NaN or infinity in a batch that has been overwritten since"
        raise ValueError(f"expected finite inputs, got {what}; clean the data (−inf is allowed, for masks)")


def largest_input(x: Inputs) -> Tensor:
    """() the largest entry of x on a device other than the host, NaN if there is one; what is on the host counts as 0."""
    given = [each for each in batches.input_tensors(x) if each.device.type != "cpu" and each.is_floating_point()]
    found = [tensor.amax() for tensor in given if tensor.numel()]
    if len(found) == 1:
        return found[0]
    return torch.stack([each.double() for each in found]).amax() if found else torch.zeros(())
