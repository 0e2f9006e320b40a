"""Captured steps, with fakes in place of CUDA's streams and graphs: what is kept, compared and dropped."""

import contextlib
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.engine import cuda_graphs, strategies, training_step
from dissensus.engine.cuda_graphs import Constants
from dissensus.engine.strategies import make_strategy
from dissensus.engine.training_step import CapturedStep, EagerStep


class Capturing(TorchFunctionMode):
    """As in a capture, nothing may be made from the host's data."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.new_tensor:
            raise RuntimeError("no copies while capturing")
        return function(*args, **(kwargs or {}))


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1

    def pool(self) -> object:
        return "pool"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda_graphs, "_capture_into", lambda *args, **kwargs: Capturing())
    monkeypatch.setattr(training_step, "make_capturable", lambda optimizer, device: lambda: None)
    for module in (cuda_graphs, strategies):
        monkeypatch.setattr(module, "Constants", lambda: Constants("cpu"))
    FakeGraph.replays = 0


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * x.new_tensor([self.scale]))


def step_of(network: nn.Module) -> CapturedStep:
    posterior = ds.MAP(network).train()
    return CapturedStep(EagerStep(posterior, torch.optim.SGD(posterior.parameters(), lr=0.1)))


def test_a_step_whose_capture_fails_is_captured_with_its_constants() -> None:
    step, batch = step_of(Makes()), Batch(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    captured_at = []
    for number in range(12):
        step(batch)
        if step.graphs:
            captured_at.append(number)
    # A plain step, a capture that fails, three steps (the one of the failure, too) that keep constants, a capture.
    assert captured_at[0] == 4
    assert FakeGraph.replays == 12 - 4
    assert step.engine_name.endswith("+captured")
    step.check()  # the end of an epoch: the next step is a plain one that compares
    step(batch)
    assert FakeGraph.replays == 8
    step(batch)
    assert FakeGraph.replays == 9
    step.close()


@pytest.mark.parametrize("failed", [False, True], ids=["", "another shape cannot be captured"])
def test_a_constant_that_changes_between_epochs_ends_the_capture(failed: bool, caplog) -> None:
    network = Makes()
    step, batch = step_of(network), Batch(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    with caplog.at_level(logging.INFO, logger="dissensus"):
        for _ in range(9):
            step(batch)
        assert step.graphs
        step.check()
        step.failed = failed
        network.scale = 2.0
        step(batch)
    assert not step.graphs
    assert not step.engine_name.endswith("captured")
    assert failed or [record.message for record in caplog.records] == [
        "the training step is not captured in a CUDA graph: tensors made on the host change from call to call "
        f"(test_captured_step.py:{Makes.forward.__code__.co_firstlineno + 1}: "
        "return self.linear(x * x.new_tensor([self.scale])))"
    ]
    before = FakeGraph.replays
    step(batch)
    assert FakeGraph.replays == before


def test_a_network_that_makes_other_tensors_at_every_step_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(Makes):
        def forward(self, x: Tensor) -> Tensor:
            self.scale += 1.0
            return super().forward(x)

    step, batch = step_of(Counts()), Batch(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    with caplog.at_level(logging.INFO, logger="dissensus"):
        for _ in range(12):
            step(batch)
    assert not step.graphs
    assert step.failed
    assert len(caplog.records) == 1
    assert "x.new_tensor([self.scale])" in caplog.records[0].message


def test_a_recorder_beside_a_step_with_constants_does_not_prevent_the_capture() -> None:
    posterior = ds.TRADI(Makes()).train()
    step = CapturedStep(EagerStep(posterior, torch.optim.SGD(posterior.parameters(), lr=0.1)))
    batch = Batch(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    for _ in range(10):
        step(batch)
    assert step.graphs
    assert int(posterior.recorder.filters.observed) == 10


@pytest.mark.parametrize("kind", ["loop", "vectorised"])
def test_a_way_to_run_members_is_timed_in_a_graph_with_constants_or_the_line_is_logged(kind: str, caplog) -> None:
    posterior = ds.DeepEnsemble([Makes() for _ in range(2)]).train()
    batch = Batch(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    with caplog.at_level(logging.INFO, logger="dissensus"):
        assert strategies.time_strategy(make_strategy(kind), posterior, batch, captured=True) is not None
        assert not caplog.records
        posterior.particles.template.network.scale = property  # no number: torch refuses it
        assert strategies.time_strategy(make_strategy(kind), posterior, batch, captured=True) is None
    assert f"members run {kind}" in caplog.records[-1].message
    assert "x.new_tensor([self.scale])" in caplog.records[-1].message
