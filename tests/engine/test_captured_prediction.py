"""Prediction from graphs, and members in lanes: where there is no GPU both are what they were before."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.core.member_runner import ONE_LANE
from dissensus.core.particles import Particles
from dissensus.core.posterior import inference_context
from dissensus.data import Batches
from dissensus.engine import cuda_graphs
from dissensus.engine.cuda_graphs import CapturedFunction
from dissensus.engine.prediction_loop import precision_context
from dissensus.kernels import weight_cache


def networks(count: int = 3) -> list[nn.Module]:
    return [nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(12, 4)) for _ in range(count)]


def test_looped_members_each_run_in_their_lane_and_are_waited_for() -> None:
    particles = Particles.stack(networks(), ds.Classification())
    x, happened = torch.randn(5, 2, 4), []

    def lane(index: int):
        happened.append(index)
        return nullcontext()

    plain = particles.map_members(lambda member, inputs: member.network(inputs), x)
    with particles.runner.use_lanes((lane, lambda: happened.append("joined"))):
        beside = particles.map_members(lambda member, inputs: member.network(inputs), x)
    again = particles.map_members(lambda member, inputs: member.network(inputs), x)
    assert happened == [0, 1, 2, "joined"]
    assert torch.equal(plain, beside)
    assert torch.equal(plain, again)


def test_without_a_gpu_every_call_is_a_plain_one_in_its_context() -> None:
    posterior = ds.DeepEnsemble(networks())
    drawn, entered = posterior.draw(), []

    def context():
        entered.append(True)
        return nullcontext()

    captured = CapturedFunction(drawn.describe, drawn, context)
    x = torch.randn(5, 2, 4)
    for _ in range(5):
        assert torch.equal(captured(x)[0], drawn.describe(x)[0])
    assert len(entered) == 5
    assert not captured.graphs


def test_predicted_batches_leave_the_modes_as_they_were_between_them() -> None:
    posterior = ds.DeepEnsemble(networks()).train()
    loader = Batches(torch.randn(9, 2, 4), torch.randint(4, (9,)), batch_size=3)
    for predictive, _ in ds.predict_batches(posterior, loader):
        assert posterior.training
        assert torch.is_grad_enabled()
        assert not predictive.mean.requires_grad


@pytest.mark.usefixtures("graphs_on_the_host")
@pytest.mark.parametrize(("count", "captured_at"), [(4, None), (5, 1), (None, 2), (500, 2)])
def test_the_number_of_batches_decides_when_a_graph_is_captured(count, captured_at) -> None:
    posterior = ds.DeepEnsemble(networks())
    with inference_context(posterior):
        drawn = posterior.draw()
    captured = CapturedFunction(drawn.describe, drawn, lambda: inference_context(posterior), count=count)
    for number in range(1, 5):
        x = torch.randn(5, 2, 4)
        assert torch.equal(captured(x)[0], drawn.describe(x)[0])
        assert bool(captured.graphs) == (captured_at is not None and number >= captured_at)
    captured(torch.randn(7, 2, 4))  # of another shape: not at once
    assert len(captured.graphs) == (captured_at is not None)


class Repeated:
    """In place of a CUDA graph: a replay calls the function again, with what the capture could read."""

    context = nullcontext

    def __init__(self, function, inputs=(), **settings) -> None:
        self.function, self.inputs, self.graph = function, inputs, self
        function()

    def pool(self) -> None:
        return None

    def replay(self, given):
        for mine, new in zip(self.inputs, given, strict=True):
            mine.copy_(new)
        with self.context():
            return self.function()


@pytest.fixture
def graphs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_graphs, "Graph", Repeated)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_graphs.Lanes, "for_members", lambda self, count: ONE_LANE)
    monkeypatch.setattr(weight_cache, "LEAST", 1)


@pytest.mark.usefixtures("graphs_on_the_host")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_a_graph_keeps_of_weights_is_theirs_and_goes_when_they_change(precision, monkeypatch) -> None:
    posterior = ds.DeepEnsemble(networks())
    drawn = posterior.draw()

    @contextmanager
    def context():
        with inference_context(posterior), precision_context(posterior, precision):
            yield

    monkeypatch.setattr(Repeated, "context", staticmethod(context))
    captured = CapturedFunction(drawn.describe, drawn, context, keeps=True, half=precision == "bf16")
    found = []
    for i in range(12):
        x = torch.randn(5, 2, 4)
        with context():
            expected = drawn.describe(x)[0]
        assert torch.equal(captured(x)[0], expected)
        found.append((bool(captured.graphs), captured.weight_cache is not None and captured.weight_cache.has_casts))
        if i in (3, 7):
            with torch.no_grad():
                for parameter in posterior.parameters():
                    parameter.add_(0.1)
    assert not captured.failed
    half = precision == "bf16"
    anew = [(False, False), *[(True, half)] * 3]
    last = [(False, False), *[(True, False)] * 3]  # weights that change again are cast at every use
    assert found == ([*anew, *anew, *last] if half else [(False, False), *[(True, False)] * 11])


@pytest.mark.usefixtures("graphs_on_the_host")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_graph_goes_when_weights_move_in_memory(keeps: bool) -> None:
    """As when `fit` lays them out for a GPU between two batches of `predict_batches`."""
    posterior = ds.DeepEnsemble(networks())
    drawn = posterior.draw()
    captured = CapturedFunction(drawn.describe, drawn, lambda: inference_context(posterior), keeps=keeps)
    x, found = torch.randn(5, 2, 4), []
    for i in range(6):
        captured(x)
        found.append(bool(captured.graphs))
        if i == 2:
            for parameter in posterior.parameters():
                parameter.data = parameter.data.clone()
    assert found == [False, True, True, False, True, True]


@pytest.mark.usefixtures("graphs_on_the_host")
def test_a_network_that_writes_to_its_weights_is_right_without_what_is_kept() -> None:
    class Writes(nn.Linear):
        def forward(self, x):
            w = self.weight.to(torch.bfloat16)
            w.mul_(2)
            return nn.functional.linear(x, w.float(), self.bias)

    posterior = ds.DeepEnsemble([Writes(4, 3) for _ in range(2)])
    posterior.particles.how = "loop"
    drawn = posterior.draw()
    captured = CapturedFunction(drawn.describe, drawn, lambda: inference_context(posterior), keeps=True, half=True)
    for _ in range(5):
        x = torch.randn(5, 4)
        with inference_context(posterior):
            expected = drawn.describe(x)[0]
        assert torch.equal(captured(x)[0], expected)
