"""CUDA graphs, with fakes in place of torch's where there is no GPU: predictions from graphs, and constants."""

import contextlib
import logging
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core.member_runner import ONE_LANE
from dissensus.core.particles import Particles
from dissensus.core.posterior import inference_context
from dissensus.data import Batches
from dissensus.engine import break_even, cuda_graphs
from dissensus.engine.cuda_graphs import (
    MOST_GRAPHS,
    CapturedCalls,
    CapturedFunction,
    Constants,
    Graph,
    NotConstant,
    failure_reason,
)
from dissensus.engine.prediction_loop import precision_context
from dissensus.engine.tracing import any_batch_size
from dissensus.kernels import multi_tensor, weight_cache
from refusals import refuses

EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream."
)


class Recorded:
    """In place of a CUDA graph: counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> object:
        return "pool"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list:
    """What captures were asked for; they warn of an empty graph and of something else."""
    found = []

    @contextlib.contextmanager
    def capture_into(made, pool, *, relaxed):
        found.append((type(made), pool, relaxed))
        try:
            yield
        finally:
            warnings.warn(EMPTY, stacklevel=1)
            warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(cuda_graphs, "_capture_into", capture_into)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def refusing() -> None:
    raise RuntimeError("cannot be captured\nand a second line")


@pytest.mark.parametrize("failing", [False, True])
def test_a_graph_that_stays_empty_is_no_warning_and_others_are(failing: bool, asked: list) -> None:
    refused = pytest.raises(RuntimeError, match="cannot be captured") if failing else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, refused:
        warnings.simplefilter("always")
        Graph(refusing if failing else lambda: None, pool="pool")
    again = [(Recorded, None, False)] if failing else []  # so that random generators draw again
    assert [str(each.message) for each in caught] == ["something else"] * (1 + len(again))
    assert asked == [(Recorded, "pool", False), *again]


@pytest.mark.filterwarnings("ignore:something else")
@pytest.mark.usefixtures("asked")
def test_a_replay_copies_what_is_given_into_the_memory_that_was_captured() -> None:
    held = torch.zeros(3)
    graph = Graph(lambda: held, [held])
    assert graph.replay([torch.arange(3.0)]) is held
    assert held.tolist() == [0.0, 1.0, 2.0]
    assert graph.graph.replays == 1
    refuses(lambda: graph.replay([]), "zip")


class Twice(CapturedCalls):
    log_name = "something"
    warm_up = 2


@pytest.mark.filterwarnings("ignore:something else")
def test_shapes_that_come_often_are_captured_up_to_a_few_in_one_pool(asked: list) -> None:
    captured = Twice()
    assert [captured.should_capture("a") for _ in range(4)] == [False, False, True, True]
    for key in range(MOST_GRAPHS):
        assert captured.capture(key, lambda: None, [], ()) is captured.graphs[key]
    assert [pool for _, pool, _ in asked] == [None, "pool", "pool"]
    assert not any(captured.should_capture("b") for _ in range(5))


@pytest.mark.filterwarnings("ignore:something else")
@pytest.mark.usefixtures("asked")
def test_a_refused_capture_is_the_last_and_said_once_and_graphs_before_stay(caplog: pytest.LogCaptureFixture) -> None:
    captured = Twice()
    kept = captured.capture("a", lambda: None, [], ())
    with caplog.at_level(logging.INFO, logger="dissensus"):
        assert captured.capture("b", refusing, [], ()) is None
        assert not captured.failed  # once more, after plain calls that keep constants
        assert [captured.should_capture("b") for _ in range(3)] == [False, False, True]
        assert captured.capture("b", refusing, [], ()) is None
        captured.disable_capture("another reason")
    assert captured.failed
    assert captured.graphs == {"a": kept}
    assert not any(captured.should_capture("c") for _ in range(5))
    line = refusing.__code__.co_firstlineno + 1
    assert [record.message for record in caplog.records] == [
        f"something is not captured in a CUDA graph: cannot be captured (test_cuda_graphs.py:{line}: "
        'raise RuntimeError("cannot be captured\\nand a second line"))'
    ]


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
    drawn, entered = ds.DeepEnsemble(networks()).draw(), []

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
@pytest.mark.parametrize(("count", "captured_at"), [(8, None), (20, 4), (None, 9)])
def test_the_number_of_batches_decides_when_a_graph_is_captured(count, captured_at, monkeypatch) -> None:
    monkeypatch.setattr(break_even, "CAPTURE", 5)  # plain calls, of which a graph saves two thirds
    monkeypatch.setattr(break_even, "LOADING", 0.0)
    clock = tiny.FakeClock(monkeypatch)
    posterior = ds.DeepEnsemble(networks())
    with inference_context(posterior):
        drawn = posterior.draw()

    def describe(x):
        clock.now += 1.0
        return drawn.describe(x)

    replay = Repeated.replay
    saved = 0.7
    monkeypatch.setattr(Repeated, "replay", lambda *args: (replay(*args), setattr(clock, "now", clock.now - saved))[0])
    captured = CapturedFunction(describe, drawn, lambda: inference_context(posterior), count=count)
    for number in range(1, 13):
        x = torch.randn(5, 2, 4)
        assert torch.equal(captured(x)[0], drawn.describe(x)[0])
        assert bool(captured.graphs) == (captured_at is not None and number >= captured_at)
    captured(torch.randn(7, 2, 4))  # of another shape: how many will come, nobody knows
    assert len(captured.graphs) == (captured_at is not None)


@pytest.mark.usefixtures("graphs_on_the_host")
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(("count", "begins"), [(20, ["capture"]), (2000, ["fused", "capture", "fused"])])
def test_kernels_of_fused_layers_are_loaded_before_a_capture_that_pays_for_them(members, count, begins, monkeypatch):
    monkeypatch.setattr(break_even, "_loaded", set())
    monkeypatch.setattr(break_even, "LOADING", 100.0)  # of which a tenth of 1,000 calls pays
    clock, happened, make_graph = tiny.FakeClock(monkeypatch), [], Repeated.__init__

    @contextmanager
    def fuse():
        happened.append("fused")
        yield

    monkeypatch.setattr(cuda_graphs, "fuse_layers", fuse)
    capture = lambda *args, **settings: (happened.append("capture"), make_graph(*args, **settings))[1]  # noqa: E731
    monkeypatch.setattr(Repeated, "__init__", capture)
    made = [ds.nets.ResNet(8) for _ in range(members)]
    posterior = ds.MAP(made[0]) if members == 1 else ds.DeepEnsemble(made)
    with inference_context(posterior):
        drawn = posterior.draw()

    def describe(x):
        clock.now += 1.0
        return drawn.describe(x)

    monkeypatch.setattr(Repeated, "context", staticmethod(lambda: inference_context(posterior)))
    captured = CapturedFunction(describe, drawn, lambda: inference_context(posterior), count=count)
    for _ in range(6):
        x = torch.randn(2, 3, 8, 8)
        with inference_context(posterior):
            expected = drawn.describe(x)[0]
        torch.testing.assert_close(captured(x)[0], expected)
    assert happened[: len(begins)] == begins
    assert ("fused" in happened) == (count == 2000)


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


@pytest.fixture
def graphs_from_the_second_call(graphs_on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(break_even.BreakEven, "_pays_now", lambda self: self.calls > 1)
    monkeypatch.setattr(cuda_graphs, "known_pace", lambda *_, **__: break_even.Pace(plain=1.0))


@pytest.mark.usefixtures("graphs_from_the_second_call")
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


@pytest.mark.usefixtures("graphs_from_the_second_call")
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
@pytest.mark.parametrize(("make", "at_once"), [
    (lambda: ds.DeepEnsemble([tiny.mlp() for _ in range(2)]), True),
    (lambda: ds.MCDropout(tiny.mlp(0.5), samples=3), False),
    (lambda: ds.NodeBNN(tiny.mlp(), data_size=10, samples=3), False),
])  # fmt: skip
def test_functions_that_are_drawn_in_their_first_call_are_captured_after_it(make, at_once: bool, monkeypatch) -> None:
    """What the host makes in a draw is not there in later calls, so that no graph could hold the call."""
    known = break_even.Pace(plain=1.0, launched=1.0, fast=0.1, preparation=0.5)
    monkeypatch.setattr(cuda_graphs, "known_pace", lambda *_, **__: known)
    posterior = make()
    drawn, found = posterior.draw(), []
    captured = CapturedFunction(drawn.describe, drawn, lambda: inference_context(posterior), count=10)
    for _ in range(3):
        captured(torch.randn(5, 4))
        found.append(bool(captured.graphs))
    assert found == [at_once, True, True]


@pytest.mark.usefixtures("graphs_from_the_second_call")
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


class Makes(nn.Module):
    """A network that makes tensors from the host's data in every common way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.table = torch.tensor([1.0, 2.0, 3.0])
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        factors = x.new_tensor([0.1, 0.2, 0.3])
        factors += 1  # a forward may change its own tensor
        factors = factors * torch.as_tensor(np.array([1.0, 2.0, 3.0]), device=x.device).to(x.dtype)
        return self.linear(x * factors + self.table.to(x.device) + torch.tensor(self.scale, device=x.device))[:, [1, 0]]


def watched(run, times: int = 2) -> Constants:
    constants = Constants("cpu")
    for _ in range(times):
        with constants.record_constants():
            run()
    return constants


@pytest.mark.parametrize("transform", ["none", "vmap", "grad of vmap"])
def test_kept_constants_give_what_was_computed_without_them(transform: str) -> None:
    network, x = Makes(), torch.randn(4, 3)
    weights = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in network.named_parameters()}

    def members(weights: dict[str, Tensor]) -> Tensor:
        one = lambda each: torch.func.functional_call(network, each, x)  # noqa: E731
        return torch.func.vmap(one)(weights)

    run = {
        "none": lambda: network(x),
        "vmap": lambda: members(weights),
        "grad of vmap": lambda: torch.func.grad(lambda w: members(w).square().sum())(weights)["linear.weight"],
    }[transform]
    expected, constants = run(), watched(run)
    assert constants.varying is None
    assert len(constants.entries) >= 5
    for _ in range(2):  # what the forward added to its copy is not in the next one
        with constants.reuse_constants():
            assert torch.equal(run(), expected)


def test_what_was_kept_is_handed_out_and_not_made_again() -> None:
    x = torch.zeros(1)
    run = lambda: x.new_tensor([1.0, 2.0])  # noqa: E731
    constants = watched(run)
    constants.entries[0].made.fill_(7.0)
    with constants.reuse_constants():
        assert run().tolist() == [7.0, 7.0]


@pytest.mark.parametrize("make", [
    lambda x, count: x.new_tensor([float(count)]),
    lambda x, count: torch.tensor(count, device=x.device),
    lambda x, count: torch.rand(3).to(x.device),
    lambda x, count: torch.as_tensor(np.random.default_rng(count).normal(size=2), device=x.device),
    lambda x, count: x[[count % 2]],
    lambda x, count: [x.new_tensor([1.0]) for _ in range(count)],
], ids=["counter", "scalar", "noise of torch", "noise of numpy", "index", "number"])  # fmt: skip
@pytest.mark.parametrize("times", [1, 2])
def test_what_changes_from_call_to_call_is_not_frozen(make, times: int) -> None:
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        make(torch.zeros(2), count)

    constants = watched(run, times)
    with pytest.raises(NotConstant, match="change from call to call"), constants.reuse_constants():
        run()


def test_the_line_that_makes_a_changing_tensor_is_named() -> None:
    values = iter(range(9))
    constants = watched(lambda: torch.zeros(1).new_tensor([next(values)]))
    assert "test_cuda_graphs.py" in constants.varying
    assert "new_tensor([next(values)])" in constants.varying
    with pytest.raises(NotConstant, match=r"new_tensor\(\[next\(values\)\]\)"), constants.reuse_constants():
        raise AssertionError("expected not to run")


def test_what_is_trained_or_on_the_device_already_is_left_alone() -> None:
    trained = torch.ones(2, requires_grad=True)
    constants = Constants("cuda")
    with constants.record_constants():
        assert trained.to(torch.float64).requires_grad
        torch.tensor([1.0])  # stays on the host
    assert [kept.made for kept in constants.entries] == [None]


def test_what_the_library_itself_makes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "can_run_kernels", lambda device: True)
    constants = Constants("cpu")
    with constants.record_constants():
        assert multi_tensor.Chunks().find([torch.zeros(3)], on="cpu")
        likelihood = ds.Classification(class_weights=[1.0, 2.0])
        assert likelihood._weight_of_classes(torch.device("cpu"), torch.float32).tolist() == [1.0, 2.0]
    assert constants.entries == []


def test_what_a_forward_makes_is_seen_through_the_librarys_own_modes() -> None:
    network, x = Makes(), torch.randn(4, 3)
    expected, constants = network(x), Constants("cpu")
    for context in (constants.record_constants, constants.record_constants, constants.reuse_constants):
        with context(), any_batch_size():
            assert torch.equal(network(x), expected)
    assert len(constants.entries) >= 5


def test_the_reason_names_the_users_line_of_the_first_error() -> None:
    def forward() -> None:
        raise RuntimeError("no copies while capturing")

    def capture() -> None:
        try:
            forward()
        finally:
            torch.zeros(2).view(3)  # as leaving a capture that failed

    with pytest.raises(RuntimeError, match="shape") as caught:
        capture()
    assert 'raise RuntimeError("no copies while capturing")' in failure_reason(caught.value)
