"""The engines on a CPU: every way of running members gives the same training."""

import contextlib
import copy
import functools
import logging
import re
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dissensus as ds
import tiny
from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.data import Batches
from dissensus.engine import strategies
from dissensus.engine.cuda_graphs import timed_convolutions
from dissensus.engine.memory import HEAP, Memory, PeakMemory, training_memory
from dissensus.engine.strategies import functional_member_gradients, make_strategy
from refusals import refuses
from thinning import thinned
from tiny import Repelling


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def data(shape: tuple[int, ...] = (4,), rows: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


def trained(
    engine: str, networks: list[nn.Module], kind: type[ds.DeepEnsemble], shape: tuple[int, ...], rows: int = 50
) -> dict[str, Tensor]:
    posterior = kind(copy.deepcopy(networks)).double()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.05, momentum=0.9)
    history = ds.fit(
        posterior,
        Batches(*data(shape, rows), batch_size=12),  # of 50 rows four full batches and a partial one
        epochs=4,
        optimizer=optimizer,
        engine=engine,
        clip=1.0,
        progress=False,
    )
    assert history.engine == engine
    return posterior.state_dict()


def embedded(networks):
    """Members of the first network's weights; the same factors every time."""
    torch.manual_seed(1)
    return ds.BatchEnsemble(networks[0], members=len(networks), modulation=ds.Modulation.normal(1, 0.5), regime=1.5)


@pytest.mark.parametrize(
    ("kind", "network"), thinned([ds.DeepEnsemble, Repelling, embedded], [(conv, (1, 4, 4)), (dense, (4,))], every=2)
)
def test_vectorised_training_equals_the_loop_over_twenty_steps(kind, network) -> None:
    make, shape = network
    torch.manual_seed(0)
    networks = [make() for _ in range(3)]
    expected = trained("loop", networks, kind, shape)
    got = trained("vectorised", networks, kind, shape)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


COMPILED = [("vectorised+compiled", Repelling), ("vectorised+compiled", embedded), ("loop+compiled", ds.DeepEnsemble)]


def check_compiled_training(engine: str, kind, caplog, *, rows: int = 50, make=dense) -> None:
    """What was trained compiled is what the loop trains, and one graph was traced for each size of batch."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    networks = [make() for _ in range(2)]
    expected = trained("loop", networks, kind, (4,), rows)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        got = trained(engine, networks, kind, (4,), rows)
    assert not any("uncompiled" in record.message for record in caplog.records)  # it really was compiled
    # Once for each shape of batch, a full one and a partial one; the loop's member function likewise.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if rows % 12 else 1)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


TRACED = [*(pytest.param(*each, marks=pytest.mark.slow) for each in COMPILED[:2]), COMPILED[2]]


@pytest.mark.parametrize(("engine", "kind"), TRACED)
def test_traced_training_equals_the_loop_over_twenty_steps(engine: str, kind, caplog, monkeypatch) -> None:
    """The compiler's tracing and autograd without its code generation, which takes most of the time."""
    compiler = functools.partial(torch.compile, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(strategies, "_compile", compiler)
    check_compiled_training(engine, kind, caplog, rows=48)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kind"), COMPILED)
def test_compiled_training_equals_the_loop_over_twenty_steps(engine: str, kind, caplog) -> None:
    check_compiled_training(engine, kind, caplog)


def test_one_pass_and_two_pass_coupling_agree_with_autograd() -> None:
    torch.manual_seed(0)
    posterior = Repelling([dense() for _ in range(3)]).double().train()
    x, y = data(rows=10)
    two = gradients.looped_gradients(posterior, Batch(x, y))
    one = gradients.looped_keeping_graphs(posterior, Batch(x, y))
    all_at_once = gradients.vectorised_gradients(posterior, Batch(x, y))
    posterior.loss(x, y).backward()
    for name, parameter in posterior.particles.own_parameters().items():
        for found in (two, one, all_at_once):
            torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-12, atol=1e-13, msg=name)


class Checkpointed(nn.Module):
    """Computes activations again in the backward pass, for which its own tensors must be in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh()), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False).flatten(1))


@pytest.mark.parametrize(("kind", "make", "kept", "engine"), [
    (Repelling, conv, strategies.KEPT, strategies.KEEPING),
    (ds.FoRDE, conv, strategies.KEPT, strategies.KEEPING),
    (ds.FoRDE, conv, 0, "loop"),
    (Repelling, Checkpointed, strategies.KEPT, "loop"),
])  # fmt: skip
def test_on_a_host_members_that_interact_run_once_where_their_graphs_take_little_memory(
    kind, make, kept, engine, monkeypatch
) -> None:
    monkeypatch.setattr(strategies, "KEPT", kept)
    torch.manual_seed(0)
    networks, found = [make() for _ in range(3)], []
    for asked in ("auto", "loop"):
        posterior = kind(copy.deepcopy(networks)).double()
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.05, momentum=0.9)
        loader = Batches(*data((1, 4, 4)), batch_size=12)
        history = ds.fit(posterior, loader, epochs=4, optimizer=optimizer, engine=asked, progress=False)
        assert history.engine == (engine if asked == "auto" else "loop")
        found.append(posterior.state_dict())
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_two_passes_of_a_coupled_member_see_the_same_dropout() -> None:
    torch.manual_seed(0)

    class Recording(Repelling):
        seen: ClassVar[list[Tensor]] = []

        def member_loss(self, params, buffers, batch):
            value, outputs, buffers = super().member_loss(params, buffers, batch)
            self.seen.append(outputs.detach())
            return value, outputs, buffers

    posterior = Recording(
        [nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3)) for _ in range(2)]
    ).double()
    posterior.train()
    gradients.looped_gradients(posterior, Batch(*data(rows=6)))
    first, second, again_first, again_second = Recording.seen
    assert torch.equal(first, again_first)
    assert torch.equal(second, again_second)
    before = torch.get_rng_state()
    gradients.looped_gradients(posterior, Batch(*data(rows=6)))
    assert not torch.equal(torch.get_rng_state(), before)  # and the next batch sees other masks


def test_dropout_has_one_law_whether_looped_or_vectorised() -> None:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.3), nn.Linear(64, 3)) for _ in range(4)])
    posterior.double().train()
    x, y = data(rows=20)
    n = 60
    draws = {
        kind: torch.stack([run(posterior, Batch(x, y)).losses for _ in range(n)])
        for kind, run in {"loop": gradients.looped_gradients, "vectorised": gradients.vectorised_gradients}.items()
    }  # (n, M)
    error = (draws["loop"].var(0) / n + draws["vectorised"].var(0) / n).sqrt()
    assert ((draws["loop"].mean(0) - draws["vectorised"].mean(0)).abs() < 4 * error).all()
    ratio = draws["vectorised"].std(0) / draws["loop"].std(0)
    assert ((ratio - 1).abs() < 4 / (2 * n) ** 0.5 * 2**0.5).all()  # 4 standard errors of a ratio of deviations
    # Distinct masks: losses of two members move independently. 4 standard errors of a correlation are 4/√n.
    assert torch.corrcoef(draws["vectorised"].T).tril(-1).abs().max() < 4 / n**0.5


def test_functional_and_plain_gradients_of_a_member_agree() -> None:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([dense() for _ in range(2)], weight_prior_std=0.5, data_size=10).double().train()
    state = gradients.detached_state(posterior).members(2)[1]
    plain = gradients.member_gradients(posterior, state, Batch(*data(rows=8)), None)
    functional = functional_member_gradients(posterior, state, Batch(*data(rows=8)), None)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(functional.gradients[name], gradient, rtol=1e-12, atol=1e-14)


def partly_frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.PReLU(), nn.Linear(6, 5), nn.Linear(5, 3))
    network[3].requires_grad_(False)
    return network


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), thinned(["vectorised", "loop"], [ds.DeepEnsemble, ds.FoRDE], every=4))
def test_compiled_gradients_are_one_graph_without_breaks(method, kind, monkeypatch) -> None:
    if method is ds.FoRDE and torch.__version__ < "2.7":
        pytest.skip("this compiler knows no context managers that are generators")
    torch._dynamo.reset()
    monkeypatch.setattr(strategies, "_compile", functools.partial(torch.compile, fullgraph=True, backend="eager"))
    posterior, batch = method([partly_frozen() for _ in range(2)]).double(), Batch(*data(rows=8))
    compiled = make_strategy(kind, compiled=True)
    found, wanted = compiled(posterior, batch), gradients.looped_gradients(posterior, batch)
    assert compiled.name == f"{kind}+compiled"  # did not fall back
    # Losses, gradients and buffers: who looks at gradients on the way depends on how members run.
    torch.testing.assert_close(found[:3], wanted[:3], rtol=1e-10, atol=1e-12)


def test_a_strategy_that_fails_is_replaced_once_and_said_once(caplog, monkeypatch) -> None:
    calls = []

    def failing(*_):
        calls.append(1)
        raise RuntimeError("no such kernel")

    posterior = ds.DeepEnsemble([dense() for _ in range(2)]).double()
    monkeypatch.setattr(strategies, "_compile", lambda function: failing)
    run = make_strategy("loop", compiled=True)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        for _ in range(3):
            run(posterior, Batch(*data()))
    assert len(calls) == 1
    assert run.name == "loop"
    assert [r.message for r in caplog.records] == ["members run uncompiled: the compiler failed (no such kernel)"]


@pytest.mark.parametrize(("engine", "message"), [
    ("fast", 'expected engine "auto"'),
    ("loop+vectorised", "expected one of"),
    ("captured", "expected a GPU"),
    ("streamed", "expected a GPU"),
])  # fmt: skip
def test_an_engine_that_cannot_be_is_one_clear_error(engine: str, message: str) -> None:
    if torch.cuda.is_available() and "GPU" in message:
        message = "never raised"
    posterior = ds.DeepEnsemble([dense() for _ in range(2)]).double()
    with pytest.raises(ValueError, match=message):
        ds.fit(posterior, Batches(*data(), batch_size=10), epochs=1, engine=engine, device="cpu", progress=False)


@pytest.mark.parametrize(("seconds", "compiled"), [((0.01, 0.005), True), ((0.01, 0.02), False), ((0.01, None), False)])
def test_code_is_compiled_if_that_is_faster(seconds: tuple, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(seconds)
    monkeypatch.setattr(strategies, "time_strategy", lambda *_, **__: next(times))
    posterior, (x, y) = ds.DeepEnsemble([dense() for _ in range(2)]).double(), data()
    plain = strategies.plain_plan(posterior)
    found = strategies.compiled_plan(plain, posterior, Batch(x, y), precision=None)
    assert (found.compiled, found is plain) == (compiled, not compiled)


def test_convolutions_run_in_a_loop_on_a_cpu_and_dense_networks_vectorised() -> None:
    for make, kind in ((conv, "loop"), (dense, "vectorised")):
        posterior = ds.DeepEnsemble([make() for _ in range(2)]).double()
        assert strategies.plain_plan(posterior).kind == kind


def test_expected_memory_counts_weights_states_and_kept_activations() -> None:
    posterior = ds.DeepEnsemble([nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(5)])
    optimizer = torch.optim.Adam(posterior.parameters())
    x, y = torch.randn(16, 10), torch.randint(3, (16,))
    memory = training_memory(posterior, optimizer, Batch(x, y))
    weights = 5 * (10 * 7 + 7 + 7 * 3 + 3) * 4
    assert memory.gradients == weights
    assert memory.optimizer == 2 * weights
    assert memory.weights == weights + 4 + 8  # the temperature and the clock
    # Kept: the input, tanh's output, the log-softmax of the logits; the loss may keep a few bytes and y more.
    least = HEAP * 4 * 16 * (10 + 7 + 3)
    assert least <= memory.activations <= least + HEAP * (16 * 8 + 64)
    assert memory.bytes_at_once == memory.bytes_in_loop + 4 * memory.activations
    assert "MiB" in str(memory) or "KiB" in str(memory)


def attend(self, x: Tensor) -> Tensor:
    z = self.layer(x.flatten(1))
    return (z @ z.T).softmax(1) @ z


@pytest.mark.parametrize("make", [
    lambda: ds.MAP(conv()), lambda: ds.MeanFieldVI(conv(), data_size=100), lambda: ds.NodeBNN(conv(), data_size=100),
    lambda: ds.FoRDE([conv() for _ in range(3)]), lambda: ds.MAP(tiny.Network(attend, layer=nn.Linear(16, 3))),
])  # fmt: skip
def test_kept_activations_are_told_by_few_rows_of_a_large_batch(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In less time, and the same to the byte; a network that wants all rows, or compares them, gets them."""
    posterior, (x, y) = make().double(), data(shape=(1, 4, 4), rows=64)
    batch, optimizer, found = Batch(x, y), torch.optim.SGD(posterior.parameters()), []
    for few in (8, 64):
        monkeypatch.setattr("dissensus.engine.memory.FEW", few)
        posterior.particles.runner.plans.clear()
        found.append(training_memory(posterior, optimizer, batch).activations)
    assert found[0] == found[1] > 0


def test_kept_activations_of_a_network_for_one_batch_size_are_counted() -> None:
    posterior = ds.MAP(tiny.Network(lambda self, x: self.layer(x.view(16, 10)), layer=nn.Linear(10, 3)))
    alike = ds.MAP(tiny.Network(lambda self, x: self.layer(x), layer=nn.Linear(10, 3)))
    batch = Batch(torch.randn(16, 10), torch.randint(3, (16,)))
    counts = [
        training_memory(each, torch.optim.SGD(each.parameters()), batch).activations for each in (posterior, alike)
    ]
    assert counts[0] == pytest.approx(counts[1], abs=64)


def test_counting_activations_leaves_none_behind() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    class Noted(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            outputs.append(weakref.ref(found := super().forward(x).exp()))  # exp saves its own result
            return found

    posterior = ds.MAP(nn.Sequential(nn.Linear(10, 7), Noted(), nn.Linear(7, 3)))
    batch = Batch(torch.randn(16, 10), torch.randint(3, (16,)))
    training_memory(posterior, torch.optim.SGD(posterior.parameters()), batch)
    assert outputs
    assert [each() for each in outputs] == [None] * len(outputs)


def test_tensors_that_malloc_returns_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, batch = ds.MAP(nn.Linear(10, 3)), Batch(torch.randn(16, 10), torch.randint(3, (16,)))
    optimizer = torch.optim.SGD(posterior.parameters())
    heap = training_memory(posterior, optimizer, batch).activations
    monkeypatch.setattr("dissensus.engine.memory.RETURNED", 0)
    posterior.particles.runner.plans.clear()  # where it was kept
    assert training_memory(posterior, optimizer, batch).activations == pytest.approx(heap / HEAP, abs=4)


def test_the_size_of_a_prediction_is_known_before(caplog: pytest.LogCaptureFixture) -> None:
    posterior, (x, y) = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(10)]), data(rows=64)
    loader = Batches(x.float(), y, batch_size=16)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        ds.predict(posterior, loader)
        ds.summarise(posterior, loader)
    assert 10 * 64 * 3 * 4 == 7.5 * 1024  # members, inputs, classes, bytes of a number
    assert 64 * (3 + 2) * 4 == 1.25 * 1024  # mean, aleatoric and epistemic
    assert [record.message for record in caplog.records] == [
        "the prediction of about 64 inputs will take 7.5 KiB",
        "the prediction of about 64 inputs will take 1.25 KiB",
    ]


def test_vectorised_means_vectorised_for_convolutions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    real = gradients.vectorised_gradients
    monkeypatch.setattr(gradients, "vectorised_gradients", lambda *a: called.append(1) or real(*a))
    posterior = ds.DeepEnsemble([conv() for _ in range(2)]).double()
    make_strategy("vectorised")(posterior, Batch(*data((1, 4, 4))))
    assert called


@pytest.mark.parametrize("engine", ["auto", "vectorised"])
def test_the_history_says_how_members_really_ran(engine: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x[:, None])[0][:, -1])

    posterior = ds.DeepEnsemble([Recurrent() for _ in range(2)]).double()
    history = ds.fit(posterior, Batches(*data(), batch_size=25), epochs=1, engine=engine, progress=False)
    assert history.engine == "loop"


@pytest.mark.slow
def test_steps_past_the_limit_of_recompilations_are_not_called_compiled(monkeypatch, caplog) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(
        strategies, "_compile", lambda function: torch.compile(function, dynamic=False, backend="eager")
    )
    posterior, (x, y) = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(2)]).double(), data()
    batches = [(x[:size], y[:size]) for size in (4, 5)]  # the second needs another compilation
    with torch._dynamo.config.patch(cache_size_limit=1), caplog.at_level(logging.INFO, logger="dissensus"):
        history = ds.fit(posterior, batches, epochs=1, engine="vectorised+compiled", progress=False)
    assert history.engine == "vectorised"
    assert re.search(r"members run uncompiled: the compiler failed \(.*limit", caplog.text)
    assert not torch._dynamo.config.fail_on_cache_limit_hit  # left as found


def test_an_empty_batch_is_named() -> None:
    posterior = ds.DeepEnsemble([dense() for _ in range(2)]).double()
    x, y = data()
    refuses(lambda: ds.fit(posterior, [(x, y), (x[:0], y[:0])], epochs=1, progress=False), "got an empty one")


def test_mixed_gradients_reach_grad_alike_through_loss_and_backward() -> None:
    class Averaging(ds.StackedPosterior):
        def mix(self, gradients):
            return {name: gradient.mean(0, keepdim=True).expand_as(gradient) for name, gradient in gradients.items()}

    torch.manual_seed(0)
    posterior = Averaging([dense() for _ in range(3)]).double().train()
    plain = ds.DeepEnsemble([posterior.member(i) for i in range(3)]).double().train()
    x, y = data(rows=10)
    losses = posterior.backward(x, y)
    plain.backward(x, y)
    got = {name: parameter.grad.clone() for name, parameter in posterior.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad.mean(0, keepdim=True).expand_as(parameter))
    posterior.zero_grad()
    total = posterior.loss(x, y)
    total.backward()
    torch.testing.assert_close(total.detach(), losses.sum())
    for name, parameter in posterior.named_parameters():
        torch.testing.assert_close(parameter.grad, got[name])


def test_a_network_no_graph_can_hold_is_timed_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def timed(run, *_, captured: bool) -> float | None:
        asked.append(captured)
        return None if captured else 0.01

    monkeypatch.setattr(strategies, "time_strategy", timed)
    posterior = ds.DeepEnsemble([dense() for _ in range(2)]).double()
    monkeypatch.setattr(ds.DeepEnsemble, "device", torch.device("cuda"))
    monkeypatch.setattr(strategies, "autocast", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(strategies, "free_cublas_workspaces", lambda: None)  # there need be no GPU
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(strategies, "reset_peak", lambda device: None)
    monkeypatch.setattr(strategies, "measure_peak", lambda _: contextlib.nullcontext([]))
    chosen = strategies.make_plan("auto", posterior, Batch(*data()), precision=None)
    assert asked == [True, True, False, False]
    assert not chosen.captured
    assert chosen.kind in ("vectorised", "streamed")


def test_members_with_their_own_convolutions_are_not_vectorised_on_a_gpu_unless_asked(monkeypatch) -> None:
    """As grouped convolutions they take three times the memory and are slower."""
    tried = []
    monkeypatch.setattr(strategies, "time_strategy", lambda run, *_, **__: tried.append(run.name) or 0.01)
    monkeypatch.setattr(ds.DeepEnsemble, "device", torch.device("cuda"))
    monkeypatch.setattr(strategies, "autocast", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(strategies, "free_cublas_workspaces", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(strategies, "reset_peak", lambda device: None)
    monkeypatch.setattr(strategies, "measure_peak", lambda _: contextlib.nullcontext([PeakMemory(3, 5)]))
    batch = Batch(*data((1, 4, 4)))
    posterior = ds.DeepEnsemble([conv() for _ in range(2)]).double()
    chosen = strategies.make_plan("auto", posterior, batch, precision=None)
    assert (tried, str(chosen)) == (["streamed"], "streamed+captured")
    assert strategies.make_plan("vectorised", posterior, batch, precision=None).kind == "vectorised"
    # What was measured is stated in place of the estimate.
    memory = Memory(weights=100, gradients=100, optimizer=200, activations=1000, members=2, taken=chosen.taken)
    assert (memory.bytes_at_once, memory.reserved_bytes) == (303, 305)


@pytest.mark.parametrize("asked", ["nothing", "deterministic", "deterministic algorithms", "benchmark"])
def test_convolutions_are_timed_on_a_gpu_unless_results_must_be_deterministic(asked: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", asked == "deterministic")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", asked == "benchmark")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked == "deterministic algorithms")
    for device, expected in (("cuda", asked in ("nothing", "benchmark")), ("cpu", asked == "benchmark")):
        with contextlib.suppress(KeyError), timed_convolutions(torch.device(device)):
            assert torch.backends.cudnn.benchmark == expected
            raise KeyError
        assert torch.backends.cudnn.benchmark == (asked == "benchmark")


def test_expected_memory_counts_what_recorders_keep_and_what_is_drawn() -> None:
    networks = [nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(5)]
    weights = 5 * (10 * 7 + 7 + 7 * 3 + 3) * 4
    x, y = torch.randn(16, 10), torch.randint(3, (16,))
    plain = ds.DeepEnsemble(copy.deepcopy(networks))
    unwatched = training_memory(plain, torch.optim.Adam(plain.parameters()), Batch(x, y))
    run = ds.track(networks, [functools.partial(ds.SWAG, rank=4, samples=6), functools.partial(ds.TRADI, samples=2)])
    memory = training_memory(run, torch.optim.Adam(run.parameters()), Batch(x, y))
    counts = 64  # a few numbers that recorders count by
    assert (
        (4 + 2 + 2) * weights <= memory.recorded <= (4 + 2 + 2) * weights + counts
    )  # deviations, SWAG's and TRADI's moments
    assert memory.drawn == (6 + 2) * weights
    assert memory.bytes_at_once == unwatched.bytes_at_once + memory.recorded + memory.weights - unwatched.weights
    assert "recorders" in str(memory)
    assert memory.bytes_with_draw == memory.bytes_at_once + 2 * (6 + 2) * weights
    assert "while functions are drawn afterwards" in str(memory)
    assert "recorders" not in str(unwatched)
