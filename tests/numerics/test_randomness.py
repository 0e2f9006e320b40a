"""Random streams: draws have generators of their own, and torch's streams are left as found."""

import threading

import pytest
import torch

from dissensus.kernels.weight_cache import _CastCacheMode
from dissensus.numerics.randomness import (
    RandomnessDetector,
    next_seed,
    own_generator,
    preserve_random_state,
    without_advancing,
)

CPU = torch.device("cpu")


def test_the_random_stream_comes_back():
    before = torch.get_rng_state()
    with preserve_random_state(CPU):
        torch.rand(10)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_another_thread_drew_stays_drawn(monkeypatch):
    before = torch.get_rng_state()
    with monkeypatch.context() as alone, preserve_random_state(CPU, mine=lambda: False):
        alone.setattr(threading, "active_count", lambda: 1)  # whatever other tests left
        torch.rand(10)
    assert torch.equal(torch.get_rng_state(), before)  # there is no other thread: it was this one
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    with preserve_random_state(CPU, mine=lambda: False):
        torch.rand(10)
    idle.set()
    thread.join()
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_seed_looked_at_ahead_is_the_one_that_comes_next():
    torch.manual_seed(0)
    with without_advancing():
        ahead = [next_seed(), next_seed()]
    assert ahead == [next_seed()] * 2
    assert next_seed() != ahead[0]


def test_a_generator_follows_the_stream():
    torch.manual_seed(0)
    first = torch.rand(3, generator=own_generator(CPU))
    second = torch.rand(3, generator=own_generator(CPU))
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3, generator=own_generator(CPU)), first)
    assert not torch.equal(first, second)


def test_a_watch_sees_random_operations_only():
    x, layer = torch.ones(3, 4), torch.nn.Linear(4, 4)
    with RandomnessDetector() as watch:
        layer(x).relu()
    assert not watch.has_drawn
    with RandomnessDetector() as watch:
        torch.nn.functional.dropout(x)
    assert watch.has_drawn


@pytest.mark.parametrize("mode", [RandomnessDetector, _CastCacheMode])
def test_modes_do_not_bring_the_compiler_along(mode: type) -> None:
    """torch wraps them by default, and the wrapper imports its compiler at the first operation: a second, at least."""
    assert not hasattr(mode.__torch_dispatch__, "__wrapped__")
