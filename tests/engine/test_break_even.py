"""When a run prepares the fast way: laws of the rule, with a clock that is set by hand."""

import contextlib
import os

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.engine import break_even, build_step, strategies
from dissensus.engine.break_even import MEASURED, BreakEven, Pace, decide_by_count, known_pace
from dissensus.engine.strategies import Plan
from dissensus.kernels.fused_norm import can_fuse_layers

CPU = torch.device("cpu")


def run_calls(
    monkeypatch, count: int, *, told: bool, fast: float, preparation: float, pace: Pace | None = None
) -> float:
    """Seconds of a run of so many calls of one second, or of `fast` once the fast way was prepared."""
    clock = tiny.FakeClock(monkeypatch)
    way = BreakEven(pace or Pace(), CPU, count if told else None)
    prepared = False
    for _ in range(count):
        if way.begin_call():
            clock.now += preparation
            prepared = True
        clock.now += fast if prepared else 1.0
        way.end_call(fast=prepared)
    return clock.now


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates that come true where the fast way takes a third of a call and is prepared in ten."""
    monkeypatch.setattr(break_even, "CAPTURE", 10)
    monkeypatch.setattr(break_even, "seconds_of_loading", lambda: 0.0)


@pytest.mark.usefixtures("estimates")
@pytest.mark.parametrize("count", [1, 2, 5, 10, 15, 18, 20, 30, 100, 1000])
def test_a_run_of_known_length_takes_the_shorter_way(count: int, monkeypatch) -> None:
    taken = run_calls(monkeypatch, count, told=True, fast=1 / 3, preparation=10.0)
    fastest = min(count, MEASURED + 10 + (count - MEASURED) / 3)  # a new posterior measures some plain calls first
    assert taken == pytest.approx(fastest)


@pytest.mark.usefixtures("estimates")
@pytest.mark.parametrize("fast", [0.01, 1 / 3, 0.9])
@pytest.mark.parametrize("count", [1, 3, 7, 14, 15, 16, 17, 18, 31, 100, 1000])
def test_a_run_of_unknown_length_takes_at_most_about_twice_as_long(count: int, fast: float, monkeypatch) -> None:
    preparation = (1 - fast) * 15  # what the estimate calls for
    taken = run_calls(monkeypatch, count, told=False, fast=fast, preparation=preparation)
    assert taken <= 2 * min(count, preparation + fast * count) + MEASURED


@pytest.mark.usefixtures("estimates")
def test_what_was_measured_decides_in_the_next_run(monkeypatch) -> None:
    pace = Pace()
    run_calls(monkeypatch, 100, told=True, fast=0.1, preparation=2.0, pace=pace)
    assert (pace.plain, pace.launched) == (1.0, 1.0)
    assert pace.fast == pytest.approx(0.1)
    assert pace.preparation == pytest.approx(2.1)
    assert pace.is_known
    # From the first call on: 2 + 10 × 0.1 rather than 10.
    assert run_calls(monkeypatch, 10, told=True, fast=0.1, preparation=2.0, pace=pace) == pytest.approx(3.0)
    assert run_calls(monkeypatch, 2, told=True, fast=0.1, preparation=2.0, pace=pace) == pytest.approx(2.0)


@pytest.mark.usefixtures("estimates")
def test_what_is_loaded_once_pays_in_short_runs_that_recur(monkeypatch) -> None:
    """Where a graph takes 2 and the first of the process 10 more, two thirds of 9 calls pay in the third run."""
    monkeypatch.setattr(break_even, "_loaded", set())
    monkeypatch.setattr(break_even, "CAPTURE", 2)
    monkeypatch.setattr(break_even, "FIRST", 10.0)
    pace = Pace(plain=1.0, launched=1.0)
    seconds = [run_calls(monkeypatch, 9, told=True, fast=1 / 3, preparation=2.0, pace=pace) for _ in range(3)]
    assert seconds == pytest.approx([9.0, 9.0, 5.0])
    assert "graphs" in break_even._loaded
    alone = Pace(plain=1.0, launched=1.0)  # of which none comes again
    assert run_calls(monkeypatch, 2, told=True, fast=1 / 3, preparation=2.0, pace=alone) == 2.0


@pytest.mark.usefixtures("estimates")
def test_what_a_preparation_loads_once_is_not_expected_of_the_next(monkeypatch) -> None:
    """A first graph that takes 30, of which 20 load kernels, does not keep later runs of 40 calls from theirs of 10."""
    monkeypatch.setattr(break_even, "_loaded", set())
    pace = Pace(plain=1.0, launched=1.0, fusing=0.1)
    assert run_calls(monkeypatch, 100, told=True, fast=0.5, preparation=30.0, pace=pace) == pytest.approx(80.0)
    for _ in range(2):
        assert run_calls(monkeypatch, 40, told=True, fast=0.5, preparation=10.0, pace=pace) == pytest.approx(30.0)


def test_a_device_that_is_busy_all_the_time_gains_little_from_a_graph() -> None:
    waiting, busy = Pace(plain=1.0, launched=0.95), Pace(plain=1.0, launched=0.3)
    assert waiting.estimate()[0] > 3 * busy.estimate()[0]
    assert waiting.estimate()[1] > busy.estimate()[1]  # a capture launches, too


@pytest.mark.parametrize(("loads", "counts", "fused"), [
    (False, [30], [False]), (True, [30], [False]), (True, [60], [True]), (True, [30, 30], [False, True]),
    (True, [None], [True]),
])  # fmt: skip
def test_layers_are_fused_where_loading_their_kernels_pays_or_runs_recur(loads, counts, fused, monkeypatch) -> None:
    monkeypatch.setattr(break_even, "_loaded", set())
    monkeypatch.setattr(break_even, "seconds_of_loading", lambda: 5.0)  # of which a tenth of 50 calls pays
    found, pace = [], Pace(plain=1.0, launched=1.0, fusing=0.1 * loads)
    for count in counts:
        way = BreakEven(pace, CPU, count)
        while not way.begin_call():
            way.end_call(fast=False)
        way.end_call(fast=True)
        found.append(way.fused)
    assert found == fused
    assert ("fused layers" in break_even._loaded) == (loads and fused[-1])


def test_a_busy_device_gains_nothing_from_a_graph_of_layers_one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(break_even, "_loaded", {"graphs"})
    monkeypatch.setattr(break_even, "seconds_of_loading", lambda: 5.0)
    for count, prepares in ((40, False), (60, True)):  # a tenth of 59 calls, less the capture, pays for the kernels
        way = BreakEven(Pace(plain=1.0, launched=0.1, fusing=0.1), CPU, count, first=1)
        assert [way.begin_call(), way.begin_call()] == [False, prepares]
        assert way.fused or not prepares


@pytest.mark.parametrize(("make", "fuses"), [(lambda: ds.nets.MLP(4, 3), False), (lambda: ds.nets.ResNet(8), True)])
@pytest.mark.parametrize("method", [ds.MAP, ds.DeepEnsemble])
def test_only_batch_norm_is_fused(method, make, fuses) -> None:
    posterior = method(make()) if method is ds.MAP else method([make(), make()])
    assert can_fuse_layers(posterior.particles.templates) == fuses
    assert can_fuse_layers(posterior.draw().particles.templates) == fuses


def test_a_way_that_is_slower_never_pays_again(monkeypatch) -> None:
    pace = Pace(plain=1.0, launched=1.0, fast=1.2, preparation=0.1)
    assert run_calls(monkeypatch, 1000, told=True, fast=1.2, preparation=0.1, pace=pace) == 1000.0
    assert not pace.saves


def test_kernels_of_another_process_are_not_loaded_here(monkeypatch) -> None:
    pace = Pace(plain=1.0, launched=1.0, fast=0.2, preparation=0.1)
    assert pace.is_known
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not pace.is_known


def test_compiling_costs_the_same_in_every_run() -> None:
    plans: dict = {}
    pace = known_pace(plans, "key", compiles=True)
    assert pace is known_pace(plans, "key", compiles=True)
    assert pace is not known_pace(plans, "key")
    pace.plain, pace.fast, pace.preparation = 1.0, 0.5, 0.001
    assert pace.estimate() == (0.5, break_even.COMPILING)


@pytest.mark.parametrize("deterministic", [False, True])
def test_where_runs_must_be_equal_the_number_of_calls_decides_and_no_time(deterministic, monkeypatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with contextlib.nullcontext() if deterministic else decide_by_count():
        for count, prepared_at in ((4, None), (5, 2), (None, 2), (1000, 2)):
            way = BreakEven(Pace(plain=1e-9, launched=1e-9, fast=1.0, preparation=1e9), CPU, count, first=1)
            for _ in range(4):
                way.begin_call()
                way.end_call(fast=way.prepared_at is not None)
            assert (way.prepared_at, way.is_settled) == (prepared_at, prepared_at is not None)
        assert not BreakEven(Pace(compiles=True), CPU, 1000).by_count
    if not deterministic:
        assert not BreakEven(Pace(), CPU, 1000).by_count


class Switching:
    """An adaptive step on a CPU that goes from the loop to vmap before batch 5, as it would to a graph on a GPU."""

    def __init__(
        self, posterior: ds.Posterior, optimizer: torch.optim.Optimizer, batch: Batch, *, slower: bool
    ) -> None:
        self.step = build_step("auto", posterior, optimizer, batch, count=20)
        self.step._use(Plan("loop"))
        pace = Pace(plain=1e-9 if slower else 1e9)
        way = BreakEven(pace, CPU, 20, first=4)
        way._pays_now = lambda: way.calls > 4
        self.step.ways = [(way, lambda *_: self.step._use(Plan("vectorised")))]
        self.step._find_run()


def train(engine: str, *, dtype: torch.dtype = torch.float64, slower: bool = False) -> tuple[ds.Posterior, str]:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([tiny.mlp() for _ in range(3)]).to(dtype).train()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.05, momentum=0.9)
    x, y = tiny.points(40)
    batches = [Batch(x[i : i + 8].to(dtype), y[i : i + 8]) for i in range(0, 40, 8)] * 4
    if engine == "switching":
        step = Switching(posterior, optimizer, batches[0], slower=slower).step
    else:
        step = build_step(engine, posterior, optimizer, batches[0], count=20)
    for batch in batches:
        step(batch)
    step.finish()
    step.check()
    step.close()
    return posterior, step.engine_name


def test_a_run_that_changes_its_way_gives_what_one_gives_that_does_not() -> None:
    expected, name = train("loop")
    assert name == "loop"
    got, name = train("switching")
    assert name.startswith("vectorised (since batch 5: plain ")
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(got.state_dict()[key], tensor, rtol=0, atol=1e-10, msg=key)


def test_a_way_that_proves_slower_is_left() -> None:
    assert train("switching", slower=True)[1] == "loop"


def test_a_short_run_on_a_cpu_prepares_nothing_and_a_long_one_may_compile(monkeypatch) -> None:
    prepared = []
    monkeypatch.setattr(
        "dissensus.engine.adaptive_step.compiled_plan", lambda plan, *_, **__: prepared.append(1) or plan
    )
    clock, (x, y) = tiny.FakeClock(monkeypatch), tiny.points(8)
    for count, each, expected in ((50, 1.0, 0), (1000, 1.0, 1), (1000, 0.01, 0), (None, 1.0, 0)):
        prepared.clear()
        posterior = ds.DeepEnsemble([tiny.mlp() for _ in range(2)]).double()
        batch = Batch(x, y)
        step = build_step("auto", posterior, torch.optim.SGD(posterior.parameters(), lr=0.1), batch, count=count)
        run = step.eager.__call__
        step.captured = lambda batch, run=run, each=each: (run(batch), setattr(clock, "now", clock.now + each))[0]
        step.captured.failed, step.captured.close = True, lambda: None
        for _ in range(6):
            step(batch)
        assert len(prepared) == expected, (count, each)
    conv = ds.DeepEnsemble([nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten()) for _ in range(2)])
    assert not strategies.may_compile(conv)  # convolutions on a CPU are library calls


def test_kernels_that_triton_has_not_kept_on_disk_take_longer_to_load(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kept, seconds in ((False, break_even.BUILDING), (True, break_even.LOADING)):
        if kept:
            (tmp_path / "ABC").mkdir()
            (tmp_path / "ABC" / "normalise_rows.json").touch()
        break_even.seconds_of_loading.cache_clear()
        assert break_even.seconds_of_loading() == seconds
    break_even.seconds_of_loading.cache_clear()
