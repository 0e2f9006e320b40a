"""Runs of a bench that are trained, or stopped on the way, and tasks that start from a network."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dissensus as ds
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import Task, load_task


@functools.cache
def moons_network(hidden: int, *, epochs: int) -> torch.nn.Module:
    """Trained on cleaner points than those that are tested on: too sure there."""
    torch.manual_seed(0)
    made = ds.MAP(ds.nets.MLP(2, 2, hidden=(hidden,)))
    data = ds.data.Batches(*ds.data.two_moons(200, noise=0.1, seed=5), batch_size=20)
    ds.fit(made, data, epochs=epochs, progress=False)
    return made.member(0)


def task_with_weights(folder: Path, text: str, network: torch.nn.Module) -> Task:
    """The task of this text, which names the network's weights given.safetensors."""
    save_file(network.state_dict(), folder / "given.safetensors")
    (folder / "mine.toml").write_text(text)
    return load_task(str(folder / "mine.toml"))


def trained(run: Run) -> Run:
    """The run, begun and trained."""
    run.begin()
    run.train_alone()
    return run


def train_until(run: Run, last: int) -> None:
    """Begins and trains the run, which is interrupted after this epoch."""
    log = Run.log

    def stop(self, epoch):
        log(self, epoch)
        if epoch.epoch == last:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "log", stop)
        with pytest.raises(KeyboardInterrupt):
            trained(run)
