"""Random streams, and numbers from hashes: draws have generators of their own, bits are what they have always been."""

import threading

import pytest
import torch

from dissensus.data.image_arithmetic import Draws, image_keys
from dissensus.kernels.weight_cache import _CastCacheMode
from dissensus.methods.parts.repulsion import normal_from_step
from dissensus.numerics.hashing import WEYL, as_signed, mix_bits, shift_right
from dissensus.numerics.randomness import RandomnessDetector, next_seed, own_generator, preserve_random_state

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
    with preserve_random_state(CPU, ahead=True):
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


def test_the_generator_is_splitmix64() -> None:
    # the first outputs for the seed 1234567, as widely published for this algorithm
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    ours = mix_bits(1234567 + torch.arange(1, 6) * WEYL)
    assert [word % 2**64 for word in ours.tolist()] == known


def test_a_word_is_not_changed_where_it_lies() -> None:
    words = torch.tensor([-1, 7])
    mix_bits(words)
    assert words.tolist() == [-1, 7]


def test_shifts_are_logical() -> None:
    assert shift_right(torch.tensor([-1]), 60).tolist() == [15]
    assert [as_signed(word) for word in (2**64 - 1, 2**63, 5)] == [-1, -(2**63), 5]


def test_vmap_gives_each_row_its_own_bits() -> None:
    words = torch.arange(6).reshape(2, 3)
    assert torch.equal(torch.func.vmap(mix_bits)(words), mix_bits(words))


def test_steps_and_images_have_the_numbers_they_always_had() -> None:
    noise = normal_from_step(torch.zeros(3, 2, dtype=torch.float64), torch.tensor(3))
    known = [
        1.3636668920516968, 0.0416016653180122, -1.9225530624389648, -2.5790839195251465, 1.5061448812484741,
        0.5193658471107483,
    ]  # fmt: skip
    torch.testing.assert_close(noise.flatten(), torch.tensor(known, dtype=torch.float64), rtol=0, atol=1e-5)
    uniform = Draws(image_keys(5, 2, torch.arange(4))).uniform(1, 3)
    torch.testing.assert_close(uniform.sum().item(), 5.717126131876382, rtol=0, atol=1e-12)
