"""Values that are read late: in order, one batch behind, and never a result without its check."""

import logging

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.engine import prediction_loop
from dissensus.engine.prediction_loop import AsyncHostCopy, LateChecks, Timer, delay_by_one, largest_input

CPU = torch.device("cpu")


def test_items_come_when_the_next_has_been_made_and_the_first_at_once():
    happened = []

    def made():
        for i in range(4):
            happened.append(("made", i))
            yield i

    for i in delay_by_one(made()):
        happened.append(("read", i))
    order = [("made", 0), ("read", 0), ("made", 1), ("made", 2), ("read", 1), ("made", 3), ("read", 2), ("read", 3)]
    assert happened == order
    assert list(delay_by_one([])) == []
    assert list(delay_by_one([1])) == [1]


def test_checks_are_one_batch_late_but_for_the_first_and_those_at_once():
    done = []
    late = LateChecks(at_once=False)
    for batch in range(4):
        late.add(torch.tensor(batch), lambda value: done.append(int(value)))
        late.add(torch.tensor(10 + batch), lambda value: done.append(int(value)))
        late.end_batch()
        assert done == [each for b in range(max(batch, 1)) for each in (b, 10 + b)]
    late.finish()
    assert done[-2:] == [3, 13]
    late.finish()
    assert len(done) == 8
    at_once = LateChecks(at_once=True, behind=3)
    at_once.add(torch.tensor(20), lambda value: done.append(int(value)))
    assert done[-1] == 20


def test_checks_may_be_several_batches_late_but_few_if_inputs_are_large(monkeypatch: pytest.MonkeyPatch):
    done: list[int] = []
    late = LateChecks(at_once=False, behind=3)
    for batch in range(6):
        late.add(torch.tensor(batch), lambda value: done.append(int(value)))
        late.end_batch()
        assert done == list(range(max(1, batch - 2)))  # the first at once
    late.finish()
    assert done == list(range(6))
    x = torch.zeros(5, device="meta")  # 20 bytes on a device other than the host
    monkeypatch.setattr(prediction_loop, "MOST", 45)
    late.add_input_check(torch.zeros(5))
    assert late.delay == 3
    late.add_input_check(x)
    assert late.delay == 2
    monkeypatch.setattr(prediction_loop, "MOST", 1)
    late.add_input_check(x)
    assert late.delay == 1


def test_inputs_that_were_not_finite_raise_also_if_they_have_been_overwritten():
    x = torch.zeros(3, 2)
    prediction_loop.check_input_values(torch.tensor(1.0), x)
    with pytest.raises(ValueError, match="overwritten"):
        prediction_loop.check_input_values(torch.tensor(float("nan")), x)
    x[1] = float("inf")
    with pytest.raises(ValueError, match="row 1"):
        prediction_loop.check_input_values(torch.tensor(float("inf")), x)


def test_on_the_host_everything_is_there_already():
    x = torch.randn(3)
    assert AsyncHostCopy([x]).read()[0] is x
    assert float(largest_input(torch.tensor([float("nan")]))) == 0  # was checked when it was read
    timer = Timer(CPU)
    timer.stop()
    assert 0 <= timer.seconds() < 1


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks are late from now on, as with a posterior on a GPU."""
    monkeypatch.setattr(
        "dissensus.engine.prediction_loop.LateChecks", lambda at_once, behind: LateChecks(at_once=False, behind=behind)
    )


class HostReads(TorchDispatchMode):
    """Notes operations after which the host knows a value, for which it would have to wait for a device."""

    READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        indexed = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.READS or indexed:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", [ds.predict, ds.summarise, lambda p, d: list(ds.predict_batches(p, d))])
@pytest.mark.parametrize(
    "make", [tiny.mlp, lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten())]
)
def test_between_two_batches_the_host_reads_nothing(call, make, monkeypatch):
    """As on a GPU: checks are late, and what they do with values that have arrived is left out here."""
    posterior = ds.DeepEnsemble([make().float() for _ in range(3)])
    posterior.temperature.fill_(2.0)
    reads, due, lists = HostReads(), [], []
    late(monkeypatch)
    monkeypatch.setattr(LateChecks, "_run_checks", lambda checks, left: due.append(len(checks._pending)))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor))
    # Random states are compared on the host, where they are.
    monkeypatch.setattr(torch, "equal", lambda a, b: a.dtype == torch.uint8 or reads.found.append("equal"))

    def loader():
        for i in range(6):
            reads.found = [] if i == 2 else reads.found  # the first batches look at the network and its inputs
            yield Batch(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))

    with reads:
        call(posterior, loader())
    assert reads.found == []
    assert lists == []
    assert due[-1] >= 6


def test_a_member_that_predicts_nan_late_is_named_by_every_verb(monkeypatch):
    """With late checks, as on a GPU: with the next batch, or at the end."""

    posterior = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(2)])
    with torch.no_grad():
        posterior.particles.own_parameters()["network.weight"][1] = 1e38  # inf − inf where inputs are not 0
    late(monkeypatch)
    x, y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for bad in (0, 2, 3):
        loader = [(x + 9 * (i == bad), y) for i in range(4)]
        for call in (ds.predict, ds.summarise, lambda p, d: list(ds.predict_batches(p, d))):
            with pytest.raises(ds.Diverged, match="a prediction that is not finite in member 1"):
                call(posterior, loader)
    stream = ds.predict_batches(posterior, [(x + 9 * (i == 1), y) for i in range(4)])
    assert [bool(next(stream)[0].mean.isnan().any()) for _ in range(2)] == [False, True]
    with pytest.raises(ds.Diverged):
        next(stream)


def test_results_are_the_same_whether_checks_are_late_or_not(monkeypatch, caplog):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points(20)
    loader = [(x[i : i + 6], y[i : i + 6]) for i in range(0, 20, 6)]
    expected = ds.predict(posterior, loader).member_means
    late(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        assert torch.equal(ds.predict(posterior, loader).member_means, expected)
    assert not caplog.records
