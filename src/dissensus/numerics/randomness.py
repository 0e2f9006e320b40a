"""Random numbers: draws use their own generators, and the state of torch's global ones, which threads share, is restored."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.utils.torch_modes import thread
from dissensus.utils.torch_private import DispatchMode


def next_seed() -> int:
    """A seed from torch's generator on the host; looking `ahead`, the next one, without advancing it."""
    source = None
    if thread.looks_ahead:
        source = torch.Generator()
        source.set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=source))


def own_generator(device: torch.device) -> torch.Generator:
    """A generator for one draw, seeded by torch's generator and independent of other threads."""
    return torch.Generator(device).manual_seed(next_seed())


def chain_generators(seed: int, numbers: Iterable[int], device: torch.device) -> list[torch.Generator]:
    """A generator for each chain, determined by the seed and the chain's number, not by the other chains."""
    states = [np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)[0] for number in numbers]
    return [torch.Generator(device).manual_seed(int(state) >> 1) for state in states]


def generator_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The states of torch's generators, the host's and the device's."""
    return torch.default_generator.get_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore_generators(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Puts torch's generators into these states, that of a GPU only if it has another."""
    host, there = states
    torch.default_generator.set_state(host)  # sooner than to compare them
    if there is not None and not torch.equal(torch.cuda.get_rng_state(device), there):
        torch.cuda.set_rng_state(there, device)


class preserve_random_state:  # not a generator, which takes three times as long
    """Restores the states of torch's generators, the host's and the device's, afterwards, where they have changed.

    `mine`: whether this thread may have drawn from them. If not, and there are other threads, the draws were theirs and the
    state is not restored, because these threads would get the same numbers twice. `ahead`: whether seeds that this thread
    draws by `next_seed` do not advance them.
    """

    def __init__(self, device: torch.device, *, mine: Callable[[], bool] | None = None, ahead: bool = False) -> None:
        self.device, self.mine, self.ahead = device, mine, ahead

    def __enter__(self) -> None:
        self.before, self.looked_ahead = generator_states(self.device), thread.looks_ahead
        thread.looks_ahead = self.looked_ahead or self.ahead

    def __exit__(self, *_: object) -> None:
        thread.looks_ahead = self.looked_ahead
        if self.mine is None or self.mine() or threading.active_count() == 1:
            restore_generators(self.before, self.device)


def save_random_state() -> Callable[[], None]:
    """A function that restores torch's present random state."""
    cpu = torch.get_rng_state()
    cuda = None
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        cuda = torch.cuda.get_rng_state()

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return restore


class RandomnessDetector(DispatchMode):
    """Inside, `drew` becomes true when an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn = self.has_drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
