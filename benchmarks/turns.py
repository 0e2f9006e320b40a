"""Sides of a comparison timed in turns in one process, so that what else the machine does falls on all of them."""

import time
from collections.abc import Callable

import torch


def in_turns(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    *,
    uncounted: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every side in every round, in an order that alternates; the first `uncounted` rounds are left out."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(uncounted + rounds):
        for name in sides if number % 2 else reversed(sides):
            wait()
            start = clock()
            sides[name]()
            wait()
            times[name].append(clock() - start)
    return {name: found[uncounted:] for name, found in times.items()}


def wait() -> None:
    """Until a GPU that is in use has finished."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
