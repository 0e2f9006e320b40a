"""Random numbers: draws have a generator of their own, and torch's streams, which all threads share, are left as found."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Thread(threading.local):
    looks_ahead = False


_thread = _Thread()


def next_seed() -> int:
    """A seed from torch's stream on the host; within `looking_ahead` the one that would come next, which stays there."""
    source = None
    if _thread.looks_ahead:
        source = torch.Generator()
        source.set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=source))


def own_generator(device: torch.device) -> torch.Generator:
    """A generator for one draw: what it gives depends on torch's stream, and on no other thread."""
    return torch.Generator(device).manual_seed(next_seed())


def chain_generators(seed: int, numbers: Iterable[int], device: torch.device) -> list[torch.Generator]:
    """A generator for each chain: what it gives depends on the seed and the chain's number, not on who else there is."""
    states = [np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)[0] for number in numbers]
    return [torch.Generator(device).manual_seed(int(state) >> 1) for state in states]


@contextmanager
def looking_ahead() -> Iterator[None]:
    """Inside, this thread's draws take no number out of torch's stream."""
    before, _thread.looks_ahead = _thread.looks_ahead, True
    try:
        yield
    finally:
        _thread.looks_ahead = before


@contextmanager
def same_random_state(device: torch.device, *, mine: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """torch's random streams (the host's and the device's) are put back afterwards, where something was drawn from them.

    `mine()`, asked afterwards: whether this thread may have drawn it. If not, and there are other threads, it was theirs and
    stays drawn: put back, their stream would give them the same numbers twice.
    """
    host = torch.get_rng_state()
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        if mine() or threading.active_count() == 1:
            if not torch.equal(torch.get_rng_state(), host):
                torch.set_rng_state(host)
            if there is not None and not torch.equal(torch.cuda.get_rng_state(device), there):
                torch.cuda.set_rng_state(there, device)


def random_state() -> Callable[[], None]:
    """A function that puts torch's random state back to what it is now."""
    cpu = torch.get_rng_state()
    cuda = None
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        cuda = torch.cuda.get_rng_state()

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return restore


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `drew` becomes true when an operation takes random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
