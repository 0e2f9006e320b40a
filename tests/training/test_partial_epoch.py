"""SIGTERM in the middle of an epoch: a checkpoint is written, the process ends, and the resumed run is the undisturbed one."""

import os
import signal

import pytest
import torch
from test_checkpoint import LOADERS, Killed, augmented
from torch import nn
from torch.optim import SGD

import dissensus as ds
import tiny


@pytest.fixture
def terminated(monkeypatch):
    """A handler of the caller's own, in place of the end of the process."""

    def end(number, frame):
        raise Killed

    before = signal.signal(signal.SIGTERM, end)
    yield
    assert signal.getsignal(signal.SIGTERM) is end  # put back
    signal.signal(signal.SIGTERM, before)


def run(make, path=None, *, at=None, accumulate=1, epochs=3):
    """(state, losses, seconds); SIGTERM comes when batch `at` (from 1) is read for training."""
    torch.manual_seed(5)
    image = make is augmented
    network = nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).double() if image else tiny.mlp(0.2).double()
    posterior = ds.SWAG(network, rank=2, samples=2)
    seen = 0

    def count(*_):
        nonlocal seen
        if posterior.training:
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGTERM)

    posterior.particles.template.network.register_forward_pre_hook(count)
    optimizer = SGD(posterior.parameters(), lr=0.1, momentum=0.9)
    settings = {"optimizer": optimizer, "checkpoint": path, "progress": False, "accumulate": accumulate}
    history = ds.fit(posterior, make(), epochs=epochs, **settings)
    return tiny.state(posterior), [epoch.loss for epoch in history.epochs]


@pytest.mark.parametrize(("loader", "accumulate"), [*((name, 1) for name in LOADERS), ("batches", 2)])
def test_a_run_that_is_told_to_end_goes_on_within_the_epoch(loader, accumulate, terminated, tmp_path):
    make = LOADERS[loader]
    expected, losses = run(make, accumulate=accumulate)
    for at in (2, 3):  # in the first epoch, and in what that run has left
        with pytest.raises(Killed):
            run(make, tmp_path / "c.pt", at=at, accumulate=accumulate)
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    found, again = run(make, tmp_path / "c.pt", accumulate=accumulate)
    assert again == losses
    assert tiny.largest_difference(expected, found) == 0


@pytest.mark.parametrize("path", [None, "c.pt"])
def test_the_signal_is_heard_only_where_there_is_a_checkpoint_to_write(path, terminated, tmp_path):
    before, heard = signal.getsignal(signal.SIGTERM), []
    posterior = ds.MAP(tiny.mlp().double())
    posterior.particles.template.network.register_forward_pre_hook(
        lambda *_: heard.append(signal.getsignal(signal.SIGTERM) is not before)
    )
    checkpoint = None if path is None else tmp_path / path
    ds.fit(posterior, [tiny.points()], epochs=1, progress=False, checkpoint=checkpoint)
    assert any(heard) is (path is not None)


class Unmeasured:
    def __iter__(self):
        return iter(LOADERS["batches"]())


def test_a_loader_that_does_not_know_its_length_is_left_without_a_part(terminated, tmp_path):
    """Of the first epoch: how long the run is, is not known yet."""
    with pytest.raises(Killed):
        run(Unmeasured, tmp_path / "c.pt", at=2)
    assert not list(tmp_path.iterdir())
