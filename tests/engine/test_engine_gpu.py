"""The engines on a GPU: captured, streamed and compiled runs give what the plain loop gives."""

import copy
import logging
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.core.posterior import inference_context
from dissensus.data import Batches
from dissensus.engine import CapturedStep, EagerStep, adaptive_step, break_even, cuda_graphs
from dissensus.engine.cuda_graphs import CapturedFunction
from dissensus.engine.prediction_loop import precision_context
from dissensus.kernels.multi_tensor import can_run_kernels
from refusals import refuses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]

ENGINES = ["loop", "vectorised", "streamed", "loop+captured", "vectorised+captured", "streamed+captured"]


@pytest.fixture(autouse=True)
def deterministic():
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.deterministic = False


@pytest.fixture(autouse=True)
def graphs_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast way is prepared as soon as it can be, in runs as short as these."""
    monkeypatch.setattr(break_even, "pays", lambda *_: True)
    monkeypatch.setattr(adaptive_step, "may_compile", lambda posterior: False)
    for module in (adaptive_step, cuda_graphs):
        monkeypatch.setattr(module, "known_pace", lambda *_, **__: break_even.Pace(plain=1.0))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def data(rows: int = 90) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x.cuda(), torch.randint(5, (rows,), generator=generator).cuda()


def trained(engine: str, optimizer: str, networks: list[nn.Module], *, epochs: int = 3, clip: float | None = None):
    posterior = ds.DeepEnsemble(copy.deepcopy(networks)).to("cuda", torch.float64)
    maker = {"sgd": lambda p: torch.optim.SGD(p, lr=2**-4, momentum=0.9, weight_decay=1e-3, nesterov=True)}
    maker |= {"adam": lambda p: torch.optim.Adam(p, lr=2**-7), "adamw": lambda p: torch.optim.AdamW(p, lr=2**-7)}
    chosen = maker[optimizer](posterior.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(chosen, 1, 0.5)
    loader = Batches(*data(), batch_size=12, shuffle=True, seed=3)  # 7 full batches and one of 6
    history = ds.fit(
        posterior, loader, epochs=epochs, optimizer=chosen, scheduler=schedule, engine=engine, clip=clip, progress=False
    )
    return posterior, history, chosen


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_every_engine_trains_as_the_loop_does(engine: str, optimizer: str) -> None:
    torch.manual_seed(0)
    networks = [conv_net() for _ in range(3)]
    expected, _, _ = trained("loop", optimizer, networks, clip=0.5)
    got, history, used = trained(engine, optimizer, networks, clip=0.5)
    assert history.engine == engine
    for name, tensor in expected.state_dict().items():
        # 24 steps with batch norm and a schedule; float64 and deterministic algorithms leave summation order only. The
        # rates are powers of two because a captured optimiser keeps its learning rate as float32 on the device.
        torch.testing.assert_close(got.state_dict()[name], tensor, rtol=1e-8, atol=1e-9, msg=name)
    assert isinstance(used.param_groups[0]["lr"], float)
    assert used.param_groups[0]["lr"] == (2**-4 if optimizer == "sgd" else 2**-7) / 8


@pytest.mark.parametrize("members", [1, 2])
def test_statistics_are_copied_once_a_step_where_no_activations_are_recomputed(members: int) -> None:
    posterior = ds.DeepEnsemble([ds.nets.ResNet(8) for _ in range(members)])
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    ds.fit(posterior, Batches(x, y, batch_size=4), epochs=1, device="cuda", engine="loop", progress=False)
    assert posterior.particles.runner.recomputes is False


def test_captured_dropout_has_fresh_and_distinct_masks() -> None:
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Dropout(0.5), nn.Linear(64, 5)) for _ in range(4)]
    posterior = ds.DeepEnsemble(networks).cuda()
    x, y = data()
    seen = []
    loader = Batches(x.float()[:60], y[:60], batch_size=12)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.0)
    ds.fit(
        posterior,
        loader,
        epochs=6,
        optimizer=optimizer,
        engine="vectorised+captured",
        precision="float32",
        callback=lambda epoch: seen.append(epoch.members) and None,
        progress=False,
    )
    losses = torch.tensor(seen)  # the weights never move: only masks make the losses differ
    assert (losses.std(0) > 1e-4).all()
    assert (losses.std(1) > 1e-4).all()


def test_a_nan_in_a_captured_run_names_the_member() -> None:
    torch.manual_seed(0)
    networks = [conv_net() for _ in range(3)]
    with torch.no_grad():
        networks[1][-1].weight.fill_(float("nan"))
    posterior = ds.DeepEnsemble(networks)
    x, y = data()
    with pytest.raises(ds.Diverged) as caught:
        ds.fit(posterior, Batches(x.float(), y, batch_size=12), epochs=2, engine="captured", progress=False)
    assert caught.value.members == [1]


def test_an_interrupt_leaves_whole_steps_and_the_optimiser_as_it_was() -> None:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([conv_net() for _ in range(2)])
    x, y = data()

    class Interrupted(Batches):
        def __iter__(self):
            for i, batch in enumerate(super().__iter__()):
                if i == 6:
                    raise KeyboardInterrupt
                yield batch

    posterior.cuda()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        ds.fit(
            posterior,
            Interrupted(x.float(), y, batch_size=12),
            epochs=2,
            optimizer=optimizer,
            engine="captured",
            progress=False,
        )
    assert int(posterior.steps) == 6
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert all(parameter.isfinite().all() for parameter in posterior.parameters())
    ds.fit(
        posterior,
        Batches(x.float(), y, batch_size=12),
        epochs=1,
        optimizer=optimizer,
        engine="captured",
        progress=False,
    )
    assert int(posterior.steps) == 14


@pytest.mark.parametrize("dropout", [None, 0.5])  # a capture that failed must not stop torch's generators
def test_what_cannot_be_captured_runs_plainly_and_says_so_once(
    dropout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(192, 5)
            self.noise = nn.Dropout(0.0 if dropout is None else dropout)

        def forward(self, x: Tensor) -> Tensor:
            return self.noise(self.linear(x.flatten(1) * (2.0 if float(x.sum()) > 0 else 1.0)))

    torch.manual_seed(0)
    networks = [Looks() for _ in range(2)]
    results = []
    for engine in ("loop", "loop+captured"):
        posterior = ds.DeepEnsemble(copy.deepcopy(networks)).cuda()
        x, y = data()
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.01)
        with caplog.at_level(logging.INFO, logger="dissensus"):
            ds.fit(
                posterior,
                Batches(x.float(), y, batch_size=12),
                epochs=2,
                optimizer=optimizer,
                engine=engine,
                precision="float32",
                progress=False,
            )
        results.append(posterior.state_dict())
    for name in results[0] if dropout is None else ():
        torch.testing.assert_close(results[0][name], results[1][name])
    said = [record.message for record in caplog.records if "not captured" in record.message]
    assert len(said) == 1
    assert "float(x.sum())" in said[0]  # the line that cannot be captured


class Makes(nn.Module):
    """Tensors from the host's data in every forward; `scale` may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 5)
        self.table = torch.linspace(-1, 1, 192, dtype=torch.float64)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.flatten(1) * x.new_tensor([self.scale]) + self.table.to(x.device, x.dtype)
        return self.linear(shifted)[:, [4, 3, 2, 1, 0]] * torch.tensor(0.5, device=x.device)


def made(engine: str, *, callback=None):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([Makes() for _ in range(3)]).to("cuda", torch.float64)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=2**-6, momentum=0.5)
    loader = Batches(*data(), batch_size=10)
    change = None if callback is None else lambda epoch: callback(posterior, epoch)
    history = ds.fit(posterior, loader, epochs=3, optimizer=optimizer, engine=engine, callback=change, progress=False)
    return posterior, history


@pytest.mark.parametrize("engine", ["loop+captured", "vectorised+captured", "streamed+captured", "auto"])
def test_constants_that_a_forward_makes_do_not_prevent_a_capture(engine: str) -> None:
    expected, _ = made("loop")
    got, history = made(engine)
    assert "captured" in history.engine
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def test_a_constant_that_a_callback_changes_is_not_frozen(caplog: pytest.LogCaptureFixture) -> None:
    def change(posterior: ds.Posterior, epoch: ds.Epoch) -> None:
        posterior.particles.template.network.scale = float(epoch.epoch)

    expected, _ = made("loop", callback=change)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        got, history = made("loop+captured", callback=change)
    assert history.engine == "loop"
    assert sum("x.new_tensor([self.scale])" in record.message for record in caplog.records) == 1
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def test_a_prediction_that_makes_constants_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([Makes() for _ in range(3)]).to("cuda", torch.float64)
    x, y = data()
    with caplog.at_level(logging.INFO, logger="dissensus"):
        got = ds.predict(posterior, Batches(x, y, batch_size=6))
    expected = torch.cat([posterior.predict(part).log_probs for part in x.split(6)], 1)
    torch.testing.assert_close(got.log_probs, expected, rtol=0, atol=1e-9)
    assert not [record.message for record in caplog.records if "not captured" in record.message]


@pytest.mark.parametrize("engine", ["vectorised", "streamed", "streamed+captured", "vectorised+captured"])
def test_coupled_members_train_as_in_the_loop(engine: str) -> None:
    torch.manual_seed(0)
    networks = [conv_net() for _ in range(3)]
    results = []
    for each in ("loop", engine):
        posterior = tiny.Repelling(copy.deepcopy(networks)).to("cuda", torch.float64)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=2**-5, momentum=0.9)
        ds.fit(posterior, Batches(*data(), batch_size=12), epochs=3, optimizer=optimizer, engine=each, progress=False)
        results.append(posterior.state_dict())
    for name in results[0]:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-8, atol=1e-9, msg=name)


def test_auto_chooses_remembers_and_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([conv_net() for _ in range(3)])
    x, y = data()
    with caplog.at_level(logging.INFO, logger="dissensus"):
        first = ds.fit(posterior, Batches(x.float(), y, batch_size=12), epochs=1, progress=False)
        second = ds.fit(posterior, Batches(x.float(), y, batch_size=12), epochs=1, progress=False)
    assert first.engine.split(" ")[0] == second.engine.split(" ")[0]
    assert "captured" in first.engine
    assert sum(record.message.startswith("members run") for record in caplog.records) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", ["deep_ensemble", "repelling"])
def test_a_run_that_changes_to_a_graph_in_the_middle_gives_what_the_loop_gives(method: str, dtype, monkeypatch) -> None:
    """20 steps in float64 within 1e-10; in float32 no farther from float64 than the loop in float32 is, but for a factor."""
    monkeypatch.setattr(break_even.BreakEven, "_pays_now", lambda self: self.calls > 7)
    torch.manual_seed(0)
    networks = [conv_net() for _ in range(3)]
    make = ds.DeepEnsemble if method == "deep_ensemble" else tiny.Repelling
    x, y = data(60)

    def weights(engine: str, dtype: torch.dtype) -> Tensor:
        posterior = make(copy.deepcopy(networks)).to("cuda", dtype)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=2**-5, momentum=0.9)
        loader = Batches(x.to(dtype), y, batch_size=12)
        settings = {"epochs": 4, "optimizer": optimizer, "precision": "float32", "progress": False}
        history = ds.fit(posterior, loader, engine=engine, **settings)
        assert ("since batch 8" in history.engine) == (engine == "auto"), history.engine
        return torch.cat([each.flatten().double() for each in posterior.parameters()])

    expected, got = weights("loop", torch.float64), weights("auto", dtype)
    allowed = 1e-10 if dtype == torch.float64 else 4 * float((weights("loop", dtype) - expected).abs().max()) + 1e-6
    assert float((got - expected).abs().max()) <= allowed


POSTERIORS = {
    "deep_ensemble, looped": lambda: ds.DeepEnsemble([conv_net() for _ in range(3)]),
    "deep_ensemble, vectorised": lambda: ds.DeepEnsemble(
        [nn.Sequential(nn.Flatten(), ds.nets.MLP(192, 5)) for _ in range(3)]
    ),
    "mc_dropout": lambda: ds.MCDropout(conv_net(), rate=0.3, samples=4),
    "gaussian_perturbation": lambda: ds.GaussianPerturbation(conv_net(), samples=4),
    "laplace": lambda: ds.Laplace(conv_net(), samples=4),
    "node_bnn": lambda: ds.NodeBNN(conv_net(), data_size=90, components=2, samples=4),
    "mean_field_vi": lambda: ds.MeanFieldVI(conv_net(), data_size=90, samples=4),
    "map": lambda: ds.MAP(conv_net()),
}


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_batches_predicted_from_a_graph_are_those_predicted_plainly(name: str, precision: str, monkeypatch) -> None:
    torch.manual_seed(0)
    posterior = POSTERIORS[name]().cuda()
    x, y = data(90)
    x = x.float()
    ds.refresh(posterior, Batches(x, y, batch_size=12))  # samples are stored: every prediction is of the same functions
    state = torch.cuda.get_rng_state()
    loader = Batches(x, y, batch_size=12)  # 7 full batches, of which six come from a graph, and one of 6
    torch.manual_seed(1)
    got = ds.predict(posterior, loader, precision=precision)
    torch.manual_seed(1)
    parts = []
    monkeypatch.setattr(break_even, "pays", lambda *_: False)
    for batch, _ in loader:
        torch.manual_seed(1)  # MC dropout draws its masks by a seed from here
        one = Batches(batch, torch.zeros(len(batch), dtype=torch.long), batch_size=12)
        parts.append(ds.predict(posterior, one, precision=precision).log_probs)  # a single batch is never captured
    # The same kernels on the same numbers, several at a time: only the choice of algorithm may differ.
    torch.testing.assert_close(
        got.log_probs, torch.cat(parts, 1), rtol=0, atol=1e-5 if precision == "float32" else 2e-2
    )
    summary = ds.summarise(posterior, loader, precision="float32")
    if name != "mc_dropout" and precision == "float32":
        torch.testing.assert_close(summary.mean, got.mean, rtol=0, atol=1e-5)
    torch.cuda.set_rng_state(state)


@pytest.mark.parametrize("networks", [1, 2])
def test_weight_noise_trains_from_a_graph_with_new_numbers_at_every_step(networks: int) -> None:
    torch.manual_seed(0)
    x, y = data(90)
    made = [conv_net() for _ in range(networks)]
    posterior = ds.MeanFieldVI(made[0] if networks == 1 else made, data_size=90, init_std=0.1).cuda()
    still = torch.optim.SGD(posterior.parameter_groups(lr=0.0), lr=0.0)
    history = ds.fit(posterior, Batches(x.float(), y, batch_size=90), epochs=6, optimizer=still, progress=False)
    assert "captured" in history.engine
    assert len({epoch.loss for epoch in history.epochs}) == 6  # nothing has moved: the noise was other
    optimizer = torch.optim.Adam(posterior.parameter_groups(lr=0.02))
    loader = Batches(x.float() + y[:, None, None, None], y, batch_size=30)
    history = ds.fit(posterior, loader, epochs=15, optimizer=optimizer, progress=False)
    assert history[-1].loss < history[0].loss


def test_node_noise_trains_from_a_graph_with_new_numbers_at_every_step() -> None:
    torch.manual_seed(0)
    x, y = data(90)
    posterior = ds.NodeBNN(conv_net(), data_size=90, components=3, train_samples=2).cuda()
    still = torch.optim.SGD(posterior.parameter_groups(lr=0.0), lr=0.0)
    history = ds.fit(posterior, Batches(x.float(), y, batch_size=90), epochs=6, optimizer=still, progress=False)
    assert "captured" in history.engine
    assert len({epoch.loss for epoch in history.epochs}) == 6  # no weight has moved: the latents were others
    posterior = ds.NodeBNN(conv_net(), data_size=90, annealing=ds.Annealing("linear")).cuda()
    optimizer = torch.optim.Adam(posterior.parameter_groups(lr=0.02))
    loader = Batches(x.float() + y[:, None, None, None], y, batch_size=30)
    history = ds.fit(posterior, loader, epochs=15, optimizer=optimizer, progress=False)
    assert "captured" in history.engine
    assert history[-1].loss < 0.8 * history[0].loss


@pytest.mark.parametrize("networks", [1, 3])
def test_captured_chains_have_the_noise_of_plain_ones_and_go_on_after_a_checkpoint(networks: int, tmp_path) -> None:
    """Each chain's generator is registered with the graph: as many numbers are taken from it as in plain steps."""
    x, y = data(96)

    def run(engine: str, **keywords) -> ds.SGHMC:
        torch.manual_seed(0)
        made = [conv_net() for _ in range(networks)]
        posterior = ds.SGHMC(
            made[0] if networks == 1 else made, members=4, cycles=2, exploration=0.5, lr=2**-6, data_size=96, seed=1
        ).to("cuda", torch.float64)
        loader = Batches(x, y, batch_size=12, shuffle=True, seed=3)
        history = ds.fit(posterior, loader, epochs=6, engine=engine, progress=False, **keywords)
        assert history.engine == engine
        return posterior

    plain, captured = run("loop"), run("loop+captured")
    for name, rows in plain.sample(4).items():
        torch.testing.assert_close(captured.sample(4)[name], rows, rtol=0, atol=1e-8)
    whole = run("loop+captured")
    run("loop+captured", checkpoint=tmp_path / "run.pt", callback=lambda epoch: epoch.epoch == 3)
    resumed = run("loop+captured", checkpoint=tmp_path / "run.pt")
    assert tiny.largest_difference(tiny.state(whole), tiny.state(resumed)) == 0


def test_an_evaluation_on_the_gpu_is_the_one_on_the_host() -> None:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([conv_net() for _ in range(3)])
    x, y = data(90)
    loader = Batches(x.float().cpu(), y.cpu(), batch_size=12)
    host = ds.evaluate(posterior, loader).metrics
    gpu = ds.evaluate(posterior.cuda(), loader).metrics
    for key in ("accuracy", "nll", "brier", "ece"):
        assert gpu[key] == pytest.approx(host[key], abs=1e-5), key


def test_a_prediction_that_cannot_be_captured_runs_plainly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 5, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * (2.0 if float(x.sum()) > 0 else 1.0)).flatten(1)

    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([Looks() for _ in range(2)]).cuda()
    x, y = data(90)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        got = ds.predict(posterior, Batches(x.float(), y, batch_size=10))
    expected = torch.cat([posterior.predict(part).log_probs for part in x.float().split(10)], 1)
    torch.testing.assert_close(got.log_probs, expected, rtol=0, atol=1e-5)
    assert sum("not captured" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("engine", ["vectorised+captured", "streamed+captured", "loop"])
def test_the_memory_stated_before_training_is_about_what_it_takes(engine: str) -> None:
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Flatten(), ds.nets.MLP(192, 5, hidden=(2000, 2000))) for _ in range(4)]
    posterior = ds.DeepEnsemble(networks).cuda()
    x, y = data(1024)
    optimizer = torch.optim.Adam(posterior.parameters())
    loader = Batches(x.float(), y, batch_size=128)
    before = torch.cuda.memory_allocated() - sum(p.numel() * 4 for p in posterior.parameters())
    history = ds.fit(posterior, loader, epochs=2, optimizer=optimizer, engine=engine, progress=False)
    took = torch.cuda.max_memory_allocated() - before
    memory = history.memory
    stated = memory.bytes_in_loop if engine == "loop" else memory.bytes_at_once
    assert 0.5 * took < stated < 2 * took, (stated / 2**20, took / 2**20, str(memory))


MEASURED = """
import torch, dissensus as ds
from torch import nn
from dissensus.engine import adaptive_step, break_even
break_even.pays = lambda *_: True
break_even.Pace.saves = True  # also where another process has the GPU meanwhile
adaptive_step.may_compile = lambda posterior: False
make = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), ds.nets.MLP(192, 5, hidden=(2000, 2000))),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 1024, 3), nn.ReLU(), nn.Conv2d(1024, 256, 3), nn.Flatten(), nn.Linear(4096, 5)),
}[NETWORK]
loader = ds.data.Batches(torch.randn(1024, 3, 8, 8).cuda(), torch.randint(5, (1024,)).cuda(), batch_size=128)
before = torch.cuda.memory_allocated()
posterior = (ds.SWAG(make(), rank=5, samples=10) if DRAWS else ds.DeepEnsemble([make() for _ in range(4)])).cuda()
optimizer = torch.optim.Adam(posterior.parameters())
history = ds.fit(posterior, loader, epochs=2, optimizer=optimizer, progress=False)
took, error = torch.cuda.max_memory_allocated() - before, 0.25 if DRAWS else 0.1
stated = history.memory.bytes_with_draw
assert (1 - error) * took < stated < (1 + error) * took, (took / 2**20, stated / 2**20, str(history.memory))
"""


@pytest.mark.parametrize(("network", "draws"), [("mlp", False), ("conv", False), ("mlp", True)])
def test_the_memory_measured_while_ways_are_tried_is_what_training_takes(network: str, draws: bool) -> None:
    """In a process of its own: what other tests leave is freed at any time. `draws`: SWAG, with the draw after training."""
    code = MEASURED.replace("NETWORK", repr(network)).replace("DRAWS", str(draws))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


class Trap(nn.Module):
    """The identity, but for inputs above 100 NaN (or, for inputs above 1000, with a slope of NaN) in one member."""

    def __init__(self, member: int) -> None:
        super().__init__()
        self.register_buffer("bad", torch.tensor(float(member == 1)))
        self.linear = nn.Linear(192, 192)

    def forward(self, x: Tensor) -> Tensor:
        first = x.flatten()[0]
        features = self.linear(x.flatten(1).clamp(-3, 3))
        loss = torch.where((first > 100) & (first < 1000) & (self.bad > 0), float("nan"), 0.0)
        # √0 has an infinite slope, which times 0 is NaN: the value is fine.
        below = torch.where((first > 1000) & (self.bad > 0), 0.0, 1.0)
        return features + loss + torch.sqrt(below + 0.0 * features) - torch.sqrt(below)


def trapped() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Trap(i), nn.BatchNorm1d(192), nn.Tanh(), nn.Linear(192, 5)) for i in range(3)]


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),  # cannot skip a step by a flag: it is read
}


def everything(posterior: ds.Posterior, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    found = {f"{i}/{key}": torch.as_tensor(value).clone().cpu() for i, s in state.items() for key, value in s.items()}
    return found | {name: tensor.clone().cpu() for name, tensor in posterior.state_dict().items()}


@pytest.mark.parametrize("value", [500.0, 5000.0], ids=["loss", "gradient"])
@pytest.mark.parametrize("at", [0, 1, 6])  # the first step, one that warms up, a captured one
@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [
        *((engine, "sgd") for engine in ENGINES),
        ("vectorised+captured", "adam"),
        ("streamed+captured", "adamw"),
        ("vectorised", "adamw"),
        ("vectorised", "rmsprop"),
    ],
)
def test_a_bad_batch_on_a_gpu_changes_nothing(engine: str, optimizer: str, at: int, value: float) -> None:
    posterior = ds.DeepEnsemble(trapped()).cuda()
    chosen = OPTIMISERS[optimizer](posterior.parameters())
    x, y = data(96)
    batches = [(x.float()[i : i + 12].clone(), y[i : i + 12]) for i in range(0, 96, 12)]
    batches[at][0][0, 0, 0, 0] = value
    before = {}

    class Watched(list):
        def __iter__(self):
            for i, batch in enumerate(super().__iter__()):
                if i == at:
                    before.update(everything(posterior, chosen))
                yield batch

    with pytest.raises(ds.Diverged) as caught:
        ds.fit(posterior, Watched(batches), epochs=1, optimizer=chosen, engine=engine, clip=1.0, progress=False)
    assert (caught.value.members, caught.value.step) == ([1], at + 1)
    assert caught.value.what == ("loss" if value == 500.0 else "gradient")
    after = everything(posterior, chosen)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("at", [2, 3, 6])
def test_gathered_batches_on_a_gpu_are_forgotten_with_the_bad_one(at: int) -> None:
    x, y = data(84)
    batches = [(x.float()[i : i + 12].clone(), y[i : i + 12]) for i in range(0, 84, 12)]
    twin, posterior = (ds.DeepEnsemble(trapped()).cuda() for _ in range(2))
    settings = {"epochs": 1, "accumulate": 2, "engine": "vectorised", "precision": "float32", "progress": False}
    good = batches[: at - at % 2]
    ds.fit(twin, good, optimizer=OPTIMISERS["adamw"](twin.parameters()), **settings)
    batches[at][0][0, 0, 0, 0] = 500.0
    with pytest.raises(ds.Diverged) as caught:
        ds.fit(posterior, batches, optimizer=OPTIMISERS["adamw"](posterior.parameters()), **settings)
    assert (caught.value.members, caught.value.step) == ([1], at // 2 + 1)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(posterior.state_dict()[name], tensor), name


@pytest.mark.parametrize("method", ["deep_ensemble", "svgd", "function_rde"])
def test_a_captured_step_that_is_guarded_waits_for_nobody(method: str) -> None:
    make = {
        "deep_ensemble": ds.DeepEnsemble,
        "svgd": lambda nets: ds.SVGD(nets, data_size=96),
        "function_rde": lambda nets: ds.FunctionRDE(nets, data_size=96),
    }
    posterior = make[method](trapped()).cuda().train()
    optimizer = OPTIMISERS["sgd"](posterior.parameters())
    step = CapturedStep(EagerStep(posterior, optimizer, clip=1.0))
    x, y = data(12)
    x = x.float()
    for _ in range(6):
        step(Batch(x, y))
    assert not step.failed
    assert len(step.graphs) == 1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(Batch(x, y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check()
    before = everything(posterior, optimizer)
    x[0, 0, 0, 0] = 500.0
    step(Batch(x, y))
    x[0, 0, 0, 0] = 0.0
    step(Batch(x, y))
    after = everything(posterior, optimizer)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    refuses(lambda: step.check(), "a loss that is not finite in member 1 at step 10;", ds.Diverged)
    step.close()


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_between_the_batches_of_an_epoch_the_host_waits_for_nobody(where: str) -> None:
    torch.manual_seed(0)
    x, y = (tensor.to(where) for tensor in data())
    augment = ds.data.Augmentation(padding=1, cutout=2)

    class Unwaited(Batches):
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            try:
                for i, batch in enumerate(super().__iter__()):
                    if self.epochs > 1 and i == 1:  # captured in the first epoch; a label on the host may be read
                        torch.cuda.set_sync_debug_mode("error")
                    yield batch
            finally:
                torch.cuda.set_sync_debug_mode("default")

    posterior = ds.DeepEnsemble([conv_net() for _ in range(2)]).cuda()
    loader = Unwaited(x.float(), y, batch_size=9, shuffle=True, augment=augment)
    history = ds.fit(posterior, loader, epochs=3, engine="streamed+captured", progress=False)
    assert history.engine == "streamed+captured"


@pytest.mark.parametrize("method", ["tradi", "swag"])
def test_a_recorder_beside_a_captured_step_waits_for_nobody(method: str) -> None:
    torch.manual_seed(0)
    assert can_run_kernels(torch.device("cuda", torch.cuda.current_device()))  # once they are loaded, they are used
    network = conv_net().cuda()
    posterior = (ds.TRADI(network) if method == "tradi" else ds.SWAG(network, start=0, every=1)).cuda().train()
    optimizer = OPTIMISERS["sgd"](posterior.parameters())
    step = CapturedStep(EagerStep(posterior, optimizer))
    x, y = data(12)
    x = x.float()
    for _ in range(6):
        step(Batch(x, y))
    assert len(step.graphs) == 1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(Batch(x, y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.step.guard._chunks._usable
    if method == "tradi":
        assert posterior.filters._cached.chunks
        assert all(each._usable for each in posterior.filters._cached.chunks)
    step.close()


def test_a_watcher_on_a_gpu_stays_finite_when_its_network_goes_bad() -> None:
    posterior = ds.TRADI(trapped()[1]).cuda()
    x, y = data(96)
    batches = [(x.float()[i : i + 12].clone(), y[i : i + 12]) for i in range(0, 96, 12)]
    batches[5][0][0, 0, 0, 0] = 500.0
    with pytest.raises(ds.Diverged, match="in member 0 at step 6"):
        ds.fit(posterior, batches, epochs=1, engine="loop+captured", progress=False)
    assert int(posterior.steps) == 5
    assert all(tensor.isfinite().all() for tensor in posterior.state_dict().values())


def test_recorders_see_the_gradients_of_this_step_whichever_graph_it_came_from() -> None:
    """From the fourth epoch on both the full batches and the partial one are replayed, each into memory of its own."""
    torch.manual_seed(0)
    network, (x, y) = conv_net().double(), data()
    states = []
    for engine in ("loop", "loop+captured"):
        posterior = ds.TRADI(copy.deepcopy(network)).to("cuda", torch.float64)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=2**-5, momentum=0.9)
        loader = Batches(x, y, batch_size=12)
        history = ds.fit(posterior, loader, epochs=7, optimizer=optimizer, engine=engine, draw=False, progress=False)
        assert history.engine == engine
        states.append(posterior.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-7, atol=1e-9, msg=name)


def test_gradients_that_the_optimizer_does_not_hold_count_once_in_the_norm_of_a_captured_step() -> None:
    torch.manual_seed(0)
    network, (x, y) = conv_net().double(), data()
    states = []
    for engine in ("loop", "loop+captured"):
        posterior = ds.MAP(copy.deepcopy(network)).to("cuda", torch.float64)
        optimizer = torch.optim.SGD(list(posterior.parameters())[-2:], lr=2**-2)
        loader = Batches(x, y, batch_size=18)
        ds.fit(posterior, loader, epochs=3, optimizer=optimizer, engine=engine, clip=0.01, progress=False)
        states.append(posterior.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-8, atol=1e-10, msg=name)


def test_a_last_step_that_explodes_on_a_gpu_is_seen() -> None:
    posterior = ds.DeepEnsemble([nn.Sequential(nn.Flatten(), nn.Linear(192, 5)) for _ in range(2)]).cuda()
    x, y = data(12)
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1e38)
    loader = [(1e4 * x.float(), y)]
    with pytest.raises(ds.Diverged, match="expected finite weights"):
        ds.fit(posterior, loader, epochs=1, optimizer=optimizer, precision="float32", engine="loop", progress=False)


def test_nan_on_a_gpu_is_refused_in_inputs_and_named_in_predictions() -> None:
    posterior = ds.DeepEnsemble([conv_net() for _ in range(3)]).cuda()
    x, y = data(36)
    x = x.float()
    loader = Batches(x, y, batch_size=6)
    ds.predict(posterior, loader)
    with torch.no_grad():
        posterior.particles.own_parameters()["network.7.bias"][2] = float("nan")
    calls = (
        lambda: posterior.predict(x),
        lambda: ds.predict(posterior, loader),
        lambda: ds.summarise(posterior, loader),
        lambda: ds.evaluate(posterior, loader),
    )
    for call in calls:
        refuses(call, "a prediction that is not finite in member 2", ds.Diverged)
    x[0, 0, 0, 0] = float("nan")
    loader = Batches(x, y, batch_size=6)
    for call in calls:
        refuses(call, "expected finite inputs, got NaN or infinity in row")


@pytest.mark.parametrize("net", [lambda: ds.nets.ConvNet(1, 3, size=8, width=4, hidden=8), lambda: ds.nets.MLP(64, 3)])
def test_predictions_from_many_threads_are_those_of_one(net):
    """Graphs are captured and replayed in one thread while others launch, capture and replay theirs."""
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([net() for _ in range(3)]).cuda()
    shape = (1, 8, 8) if isinstance(posterior.member(0), ds.nets.ConvNet) else (64,)
    loader = [(torch.randn(5, *shape), torch.zeros(5, dtype=torch.int64)) for _ in range(8)]
    expected = ds.predict(posterior, loader).log_probs

    def one(i: int) -> bool:
        if i % 2:
            found = ds.predict(posterior, loader).log_probs
        else:
            found = torch.cat([posterior.predict(x).log_probs for x, _ in loader], 1)
        return torch.allclose(found, expected, rtol=0, atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(24)))


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_laplace_of_a_network_on_the_gpu_is_that_on_the_host(structure: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    likelihood = ds.Regression(initial=0.5)
    host = ds.Laplace(copy.deepcopy(network), structure=structure, likelihood=likelihood).fit_posthoc([(x, y)])
    there = ds.Laplace(network.cuda(), structure=structure, likelihood=likelihood).fit_posthoc([(x, y)])
    assert there.device.type == "cuda"
    assert float(there.log_marginal_likelihood()) == pytest.approx(float(host.log_marginal_likelihood()), rel=1e-9)
    for name, variance in host.variance.items():
        torch.testing.assert_close(there.variance[name].cpu(), variance, rtol=1e-8, atol=1e-10)
    back = there.to("cpu")
    assert back.predict(x).mean.shape == (40, 2)


def test_a_batch_on_the_host_is_taken_to_the_gpu_in_a_users_own_loop():
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(2)]).to("cuda", torch.float64)
    x, y, weight = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3, torch.rand(6, dtype=torch.float64)
    there = posterior.loss(x.cuda(), y.cuda(), weight.cuda())
    torch.testing.assert_close(posterior.loss(x, y, weight), there, rtol=0, atol=1e-12)
    refuses(lambda: posterior.loss(x, torch.full((6,), 7)), "expected labels in 0…2, got 7")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["deep_ensemble, looped", "deep_ensemble, vectorised", "map", "mc_dropout"])
def test_what_is_kept_of_weights_gives_the_bits_of_what_is_computed_at_every_batch(name: str, precision: str) -> None:
    torch.manual_seed(0)
    posterior = POSTERIORS[name]().cuda()
    x = data(12)[0].float()
    with inference_context(posterior):
        drawn = posterior.draw()

    @contextmanager
    def context():
        with inference_context(posterior), precision_context(posterior, precision):
            yield

    once, always = (
        CapturedFunction(drawn.describe, drawn, context, keeps=keeps, half=precision == "bf16")
        for keeps in (True, False)
    )
    for _ in range(4):
        assert all(map(torch.equal, once(x), always(x)))
        x = x + 0.1
    assert once.graphs
    assert always.graphs
    with torch.no_grad():
        for parameter in drawn.parameters():
            parameter.mul_(1.5)
    # It begins anew, with a plain call; a graph runs fused layers, which round otherwise.
    torch.testing.assert_close(once(x), always(x), rtol=0, atol=1e-5 if precision == "float32" else 0.05)
    for _ in range(3):
        assert all(map(torch.equal, once(x), always(x)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_networks_predict_in_bf16_what_they_predict_in_float32_within_its_error(layout: torch.memory_format) -> None:
    """Convolutions that include batch norm, addition and ReLU, in graphs, against torch's own layers."""
    torch.manual_seed(0)
    networks = [ds.nets.ResNet(20).cuda().to(memory_format=layout) for _ in range(2)]
    with torch.no_grad():
        for network in networks:
            for _ in range(3):
                network.train()(torch.randn(64, 3, 32, 32, device="cuda"))  # statistics that are not 0 and 1
    posterior = ds.DeepEnsemble(networks).cuda()
    x = torch.randn(256, 3, 32, 32, device="cuda")
    with torch.no_grad():
        exact = torch.stack([network.eval().double()(x.double()).softmax(1) for network in networks])
    loader = Batches(x, torch.zeros(256, dtype=torch.long, device="cuda"), batch_size=32)
    for precision, bound in (("float32", 1e-5), ("bf16", 0.02)):
        found = ds.predict(posterior, loader, precision=precision).member_means
        assert float((found - exact).abs().max()) < bound


def test_weights_trained_between_two_batches_are_seen_by_the_next() -> None:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([conv_net() for _ in range(3)]).cuda()
    x, y = data(72)
    loader = Batches(x.float(), y, batch_size=12)
    for precision in ("float32", "bf16"):
        for i, (predictive, _) in enumerate(ds.predict_batches(posterior, loader, precision=precision)):
            one = Batches(x[12 * i : 12 * i + 12].float(), y[:12], batch_size=12)
            expected = ds.predict(posterior, one, precision=precision).log_probs
            torch.testing.assert_close(
                predictive.log_probs, expected, rtol=0, atol=1e-5 if precision == "float32" else 2e-2
            )
            if i > 1:
                ds.fit(
                    posterior, loader, epochs=2, progress=False
                )  # lays out weights anew; its graph counts no versions


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["deep_ensemble, looped", "deep_ensemble, vectorised", "mc_dropout", "map"])
def test_predictions_wait_for_the_device_at_no_batch(name: str, where: str) -> None:
    torch.manual_seed(0)
    posterior = POSTERIORS[name]().cuda()
    posterior.temperature.fill_(2.0)
    x, y = (each.to(where) for each in data(120))

    def steady():
        try:
            for i, batch in enumerate(Batches(x.float(), y, batch_size=12)):
                if i == 3:  # the first batches look at the network and capture it
                    torch.cuda.set_sync_debug_mode("error")
                yield batch
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for precision in ("float32", "bf16"):
        ds.predict(posterior, steady(), precision=precision)
        ds.summarise(posterior, steady(), precision=precision)
        list(ds.predict_batches(posterior, steady(), precision=precision))
        ds.evaluate(posterior, steady(), precision=precision, progress=False)


def test_what_a_gpu_predicts_late_is_what_it_predicts() -> None:
    """Of data on the host: copies are under way while the device computes, and memory is used again."""
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([conv_net() for _ in range(3)]).cuda()
    x, y = (each.cpu() for each in data(600))
    x = x.float()
    members = torch.cat([posterior.predict(part).log_probs.cpu() for part in x.split(12)], 1)
    found = ds.predict(posterior, Batches(x, y, batch_size=12))
    targets = found.targets
    torch.testing.assert_close(found.log_probs.cpu(), members, rtol=0, atol=1e-5)
    assert torch.equal(targets.cpu(), y)
    evaluation = ds.evaluate(posterior, Batches(x, y, batch_size=12), progress=False)
    nll = -members.logsumexp(0).sub(math.log(3)).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(evaluation.arrays["test/nll"], nll.double(), rtol=0, atol=1e-5)
    assert evaluation.metrics["cost/predict_ms"] > 0


@pytest.mark.parametrize("make", [
    lambda: ds.MAP(conv_net()),
    lambda: ds.DeepEnsemble([conv_net() for _ in range(3)]),
    lambda: ds.MCDropout(nn.Sequential(conv_net(), nn.Dropout(0.5), nn.Linear(5, 5)), samples=4),
    lambda: ds.NodeBNN(conv_net(), data_size=96, samples=4),
    lambda: ds.GaussianPerturbation(conv_net(), noise=0.1, samples=4),
])  # fmt: skip
def test_later_predictions_are_captured_too(make, monkeypatch, caplog):
    """Once the fast way is known, a run prepares it as soon as it can, also of functions that are drawn anew."""
    known, replays = {"plain": 1.0, "fast": 0.01, "preparation": 0.0}, []
    monkeypatch.setattr(cuda_graphs, "known_pace", lambda *_, **__: break_even.Pace(**known))
    replay = cuda_graphs.Graph.replay
    monkeypatch.setattr(cuda_graphs.Graph, "replay", lambda *given: replays.append(1) or replay(*given))
    posterior = make().cuda().eval()
    loader = Batches(torch.randn(96, 3, 8, 8).cuda(), torch.zeros(96).long(), batch_size=16)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        found = [ds.predict(posterior, loader).mean for _ in range(4)]
    assert not any("not captured" in line for line in caplog.messages)
    assert len(replays) >= 4 * 5  # of six batches, the first may be plain
    if isinstance(posterior, (ds.MAP, ds.DeepEnsemble)):
        torch.testing.assert_close(found[-1], found[0], rtol=1e-5, atol=1e-6)
