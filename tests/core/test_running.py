"""The plain runner of core works by itself; the engine's replaces it and gives the same."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.running import Runner, replace_runner
from dissensus.engine.runner import FastRunner


@pytest.fixture
def plain():
    before = replace_runner(Runner)
    yield
    replace_runner(before)


def convolving():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double()


def gradients(posterior, x, y):
    losses = posterior.backward(x, y)
    return [losses, *(parameter.grad for parameter in posterior.parameters())]


def test_the_engine_has_put_its_runner_in_place():
    assert type(ds.DeepEnsemble([tiny.mlp() for _ in range(2)]).particles.runner) is FastRunner


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("make", [tiny.mlp, convolving], ids=["dense", "convolutions"])
def test_the_plain_runner_gives_what_the_engines_does(make):
    torch.manual_seed(0)
    networks = [make().double() for _ in range(3)]
    x = torch.randn(5, 1, 4, 4).double() if make is convolving else torch.randn(5, 4).double()
    y = torch.arange(5) % 3
    mine = ds.DeepEnsemble(networks)
    assert type(mine.particles.runner) is Runner
    assert mine.particles.how == "vectorised"
    replace_runner(FastRunner)
    theirs = ds.DeepEnsemble(networks)
    for one, other in zip(gradients(mine, x, y), gradients(theirs, x, y), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(mine.predict(x).members, theirs.predict(x).members, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("plain")
def test_the_plain_runner_falls_back_to_the_loop_once_and_says_so(caplog):
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() + self.weight.sum() > -1e9 else x

    posterior = ds.DeepEnsemble([Branching(4, 3).double() for _ in range(2)])
    with caplog.at_level("INFO", logger="dissensus"):
        posterior.predict(torch.randn(5, 4).double())
        posterior.predict(torch.randn(5, 4).double())
    assert posterior.particles.how == "loop"
    assert sum("cannot be vectorised" in record.message for record in caplog.records) == 1
