"""The cost model of docs/results/many-machines.md against closed forms and a second implementation."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import scaling_model as model

QUIET = model.Cluster(excess=0.0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_that_is_walked_through_sends_as_many_bytes(kind, ranks):
    """Every rank passes one part to its neighbour in each round; all end with what the collective promises."""
    parts = 5  # bytes each
    have = [{part: {rank} for part in range(ranks)} for rank in range(ranks)]  # whose summands of each part are here
    if kind == "all_gather":
        have = [{rank: set(range(ranks))} for rank in range(ranks)]
    sent = [0] * ranks

    def rounds(first):
        """`first`: which part a rank passes on in round 0, relative to itself."""
        for step in range(ranks - 1):
            passed = [((rank + first - step) % ranks, rank) for rank in range(ranks)]
            moved = [(part, set(have[rank][part]), (rank + 1) % ranks) for part, rank in passed]
            for part, summands, target in moved:
                have[target][part] = have[target].get(part, set()) | summands
                sent[(target - 1) % ranks] += parts

    if kind != "all_gather":
        rounds(0)  # afterwards rank r has all of part r + 1
        assert all(len(have[rank][(rank + 1) % ranks]) == ranks for rank in range(ranks))
    if kind != "reduce_scatter":
        rounds(0 if kind == "all_gather" else 1)
        assert all(len(each) == ranks and all(len(s) == ranks for s in each.values()) for each in have)
    assert set(sent) == {model.Collective(kind, "data", ranks, parts * ranks).sent}


def test_members_alone_exchange_a_flag_and_data_alone_one_all_reduce():
    work, flag = model.Work("ensemble", members=8, own=1000, batch=64), 2 * 7 / 8 * 4
    assert model.sent(work, model.Layout(8, 1)) == flag
    assert model.sent(work, model.Layout(1, 4)) == 2 * 3 / 4 * 4 * (8 * 1000 + 8)
    assert model.sent(work, model.Layout(8, 4)) == 2 * 3 / 4 * 4 * (1000 + 1) + flag


def test_sharding_over_the_data_axis_divides_what_is_kept_and_sends_half_as_much_again():
    plain, fully = (model.Work("one", 1, own=1000, batch=64, activations=10, fully=each) for each in (False, True))
    layout, activations, losses = model.Layout(1, 4), 16 * 10, 2 * 3 / 4 * 4
    assert model.sent(fully, layout) - losses == 1.5 * (model.sent(plain, layout) - losses)
    assert model.memory(fully, layout) - activations == (model.memory(plain, layout) - activations) / 4


@pytest.mark.parametrize("data", [1, 4, 16])
def test_waiting_for_the_slowest_of_n_follows_the_harmonic_numbers(data):
    """E max of n Exp(1) is H_n, with variance Σ 1/k²."""
    work, cluster = (
        model.Work("one", 1, 10, start=1.0),
        model.Cluster(excess=0.2, latency=0.0, inside=1e30, between=1e30),
    )
    steps = 4000
    seconds, waiting = model.epoch_seconds(work, model.Layout(1, data), cluster, steps, np.random.default_rng(0))
    harmonic = sum(1 / k for k in range(1, data + 1))
    error = 4 * 0.2 * math.sqrt(sum(1 / k**2 for k in range(1, data + 1)) / steps)
    assert seconds / steps == pytest.approx(1 + 0.2 * harmonic, abs=error)
    assert waiting / steps == pytest.approx(0.2 * (harmonic - 1), abs=error)


def test_rows_that_exchange_nothing_wait_once_an_epoch():
    """The largest of n sums of K exponentials: about K + √(2 K ln n), far less than K H_n."""
    work = model.Work("ensemble", 64, 10, start=1.0, agrees=False)
    cluster = model.Cluster(excess=0.1, latency=0.0, inside=1e30, between=1e30)
    steps = 1000
    free, _ = model.epoch_seconds(work, model.Layout(64, 1), cluster, steps, np.random.default_rng(0))
    tied, _ = model.epoch_seconds(
        model.Work("coupled", 64, 10, compared=1, start=1.0), model.Layout(64, 1), cluster, steps,
        np.random.default_rng(0),
    )  # fmt: skip
    assert free / steps - 1 == pytest.approx(0.1 * (1 + math.sqrt(2 * math.log(64) / steps)), rel=0.05)
    assert tied / steps - 1 == pytest.approx(0.1 * sum(1 / k for k in range(1, 65)), rel=0.05)


@pytest.mark.parametrize("rate", [0.0, 1e-3, 1e-2])
def test_simulated_failures_cost_what_the_closed_form_says(rate):
    random = np.random.default_rng(1)
    interval, writing, restart = 100.0, 5.0, 30.0
    runs = np.array([model.run_seconds(interval, interval, writing, rate, restart, random) for _ in range(4000)])
    expected = model.expected_segment(interval + writing, rate, restart)
    assert runs.mean() == pytest.approx(expected, abs=4 * runs.std() / len(runs) ** 0.5 + 1e-9)


def test_youngs_interval_is_near_the_best_by_the_closed_form():
    rate, writing = 1e-5, 10.0

    def cost(interval):
        return model.expected_segment(interval + writing, rate, 0.0) / interval

    best = min(cost(1.05**k) for k in range(40, 250))
    assert cost(model.best_interval(writing, rate)) == pytest.approx(best, rel=1e-3)


def test_one_rank_predicts_itself():
    work = model.Work("one", 4, 1000, start=1e-3, each=1e-6)
    found = model.predicted(work, model.Layout(), model.Cluster(hours=1e12))
    assert found.exchange == 0
    assert found.efficiency == pytest.approx(1.0, abs=2e-2)
    assert found.memory == 4 * 1000 * 4 * 4
