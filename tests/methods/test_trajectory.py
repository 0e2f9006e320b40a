"""Counting, when to record, and learning rates for recording."""

import copy

import pytest
import torch

from dissensus.methods.snapshots import Snapshots, cosine_cycles, evenly_spaced
from dissensus.utils.counts import Count
from dissensus.utils.parameter_groups import constant_tail


def test_a_count_is_saved_and_read_back():
    count = Count()
    assert [count.add(), count.add(), int(count)] == [1, 2, 2]
    other = Count()
    assert int(other) == 0
    other.load_state_dict(count.state_dict())
    assert int(other) == 2
    assert other.add() == 3
    assert int(copy.deepcopy(other)) == int(other.value) == 3
    other.reset()
    assert int(other) == int(other.value) == 0


@pytest.mark.parametrize(("steps", "wanted"), [(100, 10), (1000, 40), (97, 7), (8, 40), (1, 3), (3, 1), (4000, 40)])
def test_snapshots_are_spread_over_the_last_quarter_and_end_with_the_run(steps, wanted):
    first, every = evenly_spaced(steps, wanted)
    times = range(first, steps, every)
    tail = max(1, steps - int(0.75 * steps))
    assert len(times) == min(wanted, tail)
    assert times[-1] == steps - 1
    assert times[0] >= steps - tail
    assert every * len(times) <= tail < (every + 1) * len(times)  # no wider even spacing fits


def taken(snapshots: Snapshots, steps: int) -> list[int]:
    return [step for step in range(steps) if snapshots.count_step()]


def test_a_step_to_record_is_known_before_it_is_taken():
    snapshots = Snapshots(3, 4, wanted=9)
    for _ in range(14):
        expected = snapshots.reads_next_step
        assert snapshots.reads_next_step == expected  # asking changes nothing
        assert snapshots.count_step() == expected


def test_given_times_are_counted_from_0():
    assert taken(Snapshots(3, 4, wanted=9), 14) == [3, 7, 11]
    snapshots = Snapshots(3, 4, wanted=9)
    snapshots.begin(1000)
    assert taken(snapshots, 14) == [3, 7, 11]


def test_without_a_known_length_every_step_is_recorded():
    assert taken(Snapshots(None, None, wanted=9), 4) == [0, 1, 2, 3]
    assert taken(Snapshots(2, None, wanted=9), 4) == [2, 3]
    assert taken(Snapshots(None, 2, wanted=9), 5) == [0, 2, 4]


def test_begin_lays_them_out():
    snapshots = Snapshots(None, None, wanted=5)
    snapshots.begin(40)
    assert taken(snapshots, 40) == [31, 33, 35, 37, 39]
    snapshots.taken.add()
    snapshots.begin(20)  # a second run goes on counting, and forgets the first one's snapshots
    assert int(snapshots.taken) == 0
    assert taken(snapshots, 20) == [15, 16, 17, 18, 19]


def test_begin_fills_in_what_was_left_open():
    snapshots = Snapshots(10, None, wanted=5)
    snapshots.begin(40)
    assert taken(snapshots, 40) == [10, 16, 22, 28, 34]
    snapshots = Snapshots(None, 3, wanted=5)
    snapshots.begin(40)
    assert taken(snapshots, 40) == [30, 33, 36, 39]


@pytest.mark.parametrize(("start", "every", "message"), [(-1, 1, "start of at least 0"), (0, 0, "every of at least 1")])
def test_times_that_are_none_are_refused(start, every, message):
    with pytest.raises(ValueError, match=message):
        Snapshots(start, every, wanted=3)


def test_the_constant_tail():
    rates = [constant_tail(t) for t in (0.0, 0.375, 0.525, 0.675, 0.75, 0.99)]
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.5, 0.5])


def test_the_cosine_comes_back_to_its_start_in_every_cycle():
    assert [cosine_cycles(t, cycles=4) for t in (0, 0.25, 0.5, 0.75)] == pytest.approx([1.0] * 4)
    assert cosine_cycles(0.125, cycles=4) == pytest.approx(0.5)
    assert cosine_cycles(0.2499999, cycles=4) == pytest.approx(0.0, abs=1e-6)
    # the mean over a cycle is one half
    mean = torch.tensor([cosine_cycles(i / 1000, cycles=1) for i in range(1000)]).mean()
    assert float(mean) == pytest.approx(0.5, abs=1e-3)
