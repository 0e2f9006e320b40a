"""Progress without a bar: a line per epoch, within long epochs, and of long evaluations."""

import sys

import pytest
import torch

import dissensus as ds
from dissensus.utils import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by four seconds whenever it is looked at."""
    seconds = iter(range(0, 10**6, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))


def batches(count: int):
    return ds.data.Batches(torch.randn(8 * count, 2), torch.zeros(8 * count, dtype=torch.long), batch_size=8)


def test_a_long_epoch_says_where_it_is(capsys, clock):
    with progress.Progress(2, 9, title="map", show=True) as bar:
        for _ in range(9):
            bar.step()
        bar.end_epoch(1, "loss 1")
        bar.step()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "map  epoch 1/2  batch 3/9", "map  epoch 1/2  batch 6/9", "map  epoch 1/2  batch 9/9",
        "map  epoch 1/2  loss 1",
    ]  # fmt: skip


def test_a_terminal_without_rich_has_lines(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    with progress.Progress(30, 1, title="map", show=True) as bar:
        for number in range(1, 31):
            bar.step()
            bar.end_epoch(number, "loss 1")
    assert capsys.readouterr().err.splitlines() == ["map  epoch 1/30  loss 1", "map  epoch 30/30  loss 1"]


def test_a_quick_epoch_has_one_line(capsys):
    ds.fit(ds.MAP(ds.nets.MLP(2, 2, hidden=(4,))), batches(5), epochs=1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_long_evaluation_says_where_it_is_and_a_quick_one_nothing(capsys, monkeypatch):
    posterior = ds.MAP(ds.nets.MLP(2, 2, hidden=(4,)))
    quick = ds.evaluate(posterior, batches(3), ood={"far": batches(2)})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SECONDS", -1.0)
    slow = ds.evaluate(posterior, batches(3), ood={"far": batches(2)}, shift={"later": batches(1)})
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "evaluating map  test  batch 1/3"
    assert said[-1] == "evaluating map  later  batch 1/1"
    assert len(said) == 6
    ds.evaluate(posterior, batches(3), progress=False)
    assert capsys.readouterr().err == ""
    assert quick.metrics.keys() < slow.metrics.keys()


def test_a_notebook_has_one_line_that_is_overwritten_and_not_on_stderr(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with progress.Progress(3, 1, title="map", show=True) as bar:
        for number, text in enumerate(("loss 1.25", "loss 1", "loss 0.5"), 1):
            bar.end_epoch(number, text)
    out, err = capsys.readouterr()
    assert err == ""
    assert out == "\rmap  epoch 1/3  loss 1.25\rmap  epoch 2/3  loss 1   \rmap  epoch 3/3  loss 0.5 \n"
    ds.evaluate(ds.MAP(ds.nets.MLP(2, 2, hidden=(4,))), batches(3))
    assert capsys.readouterr() == ("", "")
