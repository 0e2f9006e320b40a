"""Divergence: a bad batch costs nothing but the error, on the host at once, on a device by values read late."""

import copy
import logging
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.engine import prediction_loop
from dissensus.engine.prediction_loop import AsyncHostCopy, LateChecks, Timer, delay_by_one, largest_input
from dissensus.engine.training_step import EagerStep, Guard
from refusals import refuses
from thinning import thinned

NAN = float("nan")
QUIET = {"epochs": 1, "progress": False}
X, Y = tiny.points(12)


def poisoned(member: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), Marked(member), nn.Linear(6, 3))


class Marked(nn.Module):
    """Features of one member whose value or slope is NaN while the class says so."""

    mode: str | None = None

    def __init__(self, member: int) -> None:
        super().__init__()
        self.register_buffer("bad", torch.tensor(float(member == 1)))

    def forward(self, features: Tensor) -> Tensor:
        if Marked.mode == "loss":
            return features + torch.where(self.bad > 0, NAN, 0.0)
        if Marked.mode == "gradient":  # √0 has an infinite slope, which times 0 is NaN: the value is fine
            return features + torch.sqrt((1.0 - self.bad) + 0.0 * features) - torch.sqrt(1.0 - self.bad)
        return features


@pytest.fixture(autouse=True)
def healthy():
    yield
    Marked.mode = None


def networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [poisoned(i).double() for i in range(3)]


METHODS = {
    "deep_ensemble": lambda: ds.DeepEnsemble(networks()),
    "weight_rde": lambda: ds.WeightRDE(networks(), data_size=12),
    "function_rde": lambda: ds.FunctionRDE(networks(), data_size=12, score="spectral_stein"),
    "feature_rde": lambda: ds.FeatureRDE(networks(), layer="2", head="4"),
    "forde": lambda: ds.FoRDE(networks()),
    "svgd": lambda: ds.SVGD(networks(), data_size=12),
    "svgd, functions": lambda: ds.SVGD(networks(), data_size=12, space="function"),
    "map": lambda: ds.MAP(networks()[1]),
    "swag": lambda: ds.SWAG(networks()[1], rank=2, start=0, every=1),
    "tradi": lambda: ds.TRADI(networks()[1]),
}
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def guarded_step(method: str, optimiser: str, *, host: bool = False, **settings):
    """(a posterior, its optimiser, a step of both), guarded on the host or by a flag as on a device."""
    posterior = METHODS[method]()
    optimizer = OPTIMISERS[optimiser](posterior.parameters())
    step = EagerStep(posterior.train(), optimizer, **settings)
    step.guard = Guard(posterior, optimizer, host=host)
    return posterior, optimizer, step


def everything(posterior: ds.Posterior, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of the posterior and the optimiser, copied."""
    state = copy.deepcopy(optimizer.state_dict()["state"])
    moments = {f"{i}/{key}": torch.as_tensor(value) for i, each in state.items() for key, value in each.items()}
    return tiny.state(posterior) | moments


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


class GoesBad(list):
    """Batches, of which one is bad."""

    def __init__(self, batches, *, at: int, mode: str, before) -> None:
        super().__init__(batches)
        self.at, self.mode, self.before = at, mode, before

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            Marked.mode = self.mode if i == self.at else None
            if i == self.at:
                self.before()
            yield batch


def diverges(posterior, optimizer, mode, *, at=3, **settings) -> tuple[ds.Diverged, dict, dict]:
    """(the error, the state before the bad batch, the state after the error)."""
    seen = {}
    loader = GoesBad([(X, Y)] * 5, at=at, mode=mode, before=lambda: seen.update(everything(posterior, optimizer)))
    with pytest.raises(ds.Diverged) as error:
        ds.fit(posterior, loader, optimizer=optimizer, **QUIET, **settings)
    return error.value, seen, everything(posterior, optimizer)


@pytest.mark.parametrize(("method", "mode", "at"), thinned(list(METHODS), ["loss", "gradient"], [0, 3], every=3))
def test_a_bad_batch_changes_nothing(method: str, mode: str, at: int) -> None:
    posterior = METHODS[method]()
    optimizer = OPTIMISERS["sgd"](posterior.parameters())
    error, before, after = diverges(posterior, optimizer, mode, at=at, clip=1.0)
    assert_same(after, before)
    assert error.step == at + 1
    assert error.what == mode
    assert all(p.grad is None for p in posterior.parameters())
    if mode == "loss" or method in ("deep_ensemble", "weight_rde", "svgd"):
        assert error.members == ([0] if posterior.particles.members == 1 else [1])
    else:  # members that act on each other by what goes through the bad layer
        assert 1 in error.members or posterior.particles.members == 1


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_a_bad_batch_changes_nothing_whatever_the_optimiser_and_the_engine(optimiser: str, how: str) -> None:
    posterior = METHODS["deep_ensemble"]()
    optimizer = OPTIMISERS[optimiser](posterior.parameters())
    error, before, after = diverges(posterior, optimizer, "gradient", engine=how)
    assert_same(after, before)
    assert error.members == [1]
    assert "expected finite gradients, got a gradient that is not finite in member 1 at step 4; lower" in str(error)


# the first and the second batch of a step, and the only one of the last
@pytest.mark.parametrize(("at", "mode"), thinned([2, 3, 4], ["loss", "gradient"], every=2))
def test_batches_that_were_gathered_are_forgotten_with_the_bad_one(at: int, mode: str) -> None:
    posterior = METHODS["deep_ensemble"]()
    optimizer = OPTIMISERS["adamw"](posterior.parameters())
    twin = copy.deepcopy(posterior)
    ds.fit(twin, [(X, Y)] * (at - at % 2), optimizer=OPTIMISERS["adamw"](twin.parameters()), accumulate=2, **QUIET)
    error, _, after = diverges(posterior, optimizer, mode, at=at, accumulate=2)
    expected = tiny.state(twin)
    assert_same({name: after[name] for name in expected}, expected)
    assert error.step == at // 2 + 1
    assert error.members == [1]


@pytest.mark.parametrize(
    ("method", "mode", "optimiser"),
    thinned(["deep_ensemble", "svgd", "feature_rde", "swag", "map"], ["loss", "gradient"], ["sgd", "adamw"], every=2),
)
def test_a_flag_on_the_device_stops_training_as_the_host_would(method: str, mode: str, optimiser: str) -> None:
    posterior, optimizer, step = guarded_step(method, optimiser, clip=1.0)
    for _ in range(3):
        step(Batch(X, Y))
    before = everything(posterior, optimizer)
    Marked.mode = mode
    step(Batch(X, Y))
    assert not step.guard.checks_at_once
    Marked.mode = None
    step(Batch(X, Y))  # a good batch after it does not move them either: they stay as they were
    step.finish()
    after = everything(posterior, optimizer)
    watches = ("recorder.",)  # counted on the host
    for name, tensor in before.items():
        if not name.startswith(watches):
            assert torch.equal(after[name], tensor), name
        assert after[name].isfinite().all()
    with pytest.raises(ds.Diverged, match="at step 4; lower") as error:
        step.check()
    assert error.value.what == mode
    if method != "feature_rde" or mode == "loss":  # whose bad gradient has reached all by the features
        assert error.value.members == ([1] if posterior.particles.members > 1 else [0])
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("mode", ["loss", "gradient"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_flag_on_the_device_forgets_gathered_batches(at: int, mode: str) -> None:
    posterior, optimizer, step = guarded_step("deep_ensemble", "adamw", accumulate=2)
    states = []
    for i in range(5):
        if i % 2 == 0:
            states.append(everything(posterior, optimizer))
        Marked.mode = mode if i == at else None
        step(Batch(X, Y))
    Marked.mode = None
    step.finish()
    assert_same(everything(posterior, optimizer), states[at // 2])
    refuses(lambda: step.check(), f"in member 1 at step {at // 2 + 1};", ds.Diverged)


def test_a_flag_on_the_device_leaves_good_training_as_it_is() -> None:
    results = []
    for host in (True, False):
        posterior, optimizer, step = guarded_step("deep_ensemble", "sgd", host=host, clip=1.0)
        for _ in range(4):
            step(Batch(X, Y))
        step.check()
        results.append(everything(posterior, optimizer))
    assert_same(*results)


def test_an_optimiser_that_cannot_skip_is_read_at_every_step() -> None:
    posterior, optimizer, step = guarded_step("deep_ensemble", "rmsprop")
    step(Batch(X, Y))
    before = everything(posterior, optimizer)
    Marked.mode = "loss"
    refuses(lambda: step(Batch(X, Y)), "a loss that is not finite in member 1 at step 2", ds.Diverged)
    assert_same(everything(posterior, optimizer), before)


def test_the_first_step_of_a_run_is_read_since_it_makes_the_optimisers_state() -> None:
    _, optimizer, step = guarded_step("deep_ensemble", "sgd")
    Marked.mode = "gradient"
    refuses(lambda: step(Batch(X, Y)), "member 1 at step 1", ds.Diverged)
    assert not optimizer.state


def test_a_last_step_that_explodes_is_seen() -> None:
    posterior = ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(3)], likelihood=ds.Regression(noise=1.0))
    with torch.no_grad():
        posterior.particles.own_parameters()["network.bias"][2] = 1e15
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1e30)
    with pytest.raises(
        ds.Diverged, match="expected finite weights, got a weight that is not finite in member 2 at step 1"
    ):
        ds.fit(posterior, [(X.float(), torch.zeros(12, 1))], optimizer=optimizer, **QUIET)


def test_moments_that_overflow_are_seen_where_the_weights_would_just_stop(tmp_path) -> None:
    posterior = ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(2)], likelihood=ds.Regression(noise=1.0))
    x = 1e4 * X.float()
    optimizer = torch.optim.Adam(posterior.parameters(), lr=1e-3)
    with torch.no_grad():
        posterior.particles.own_parameters()["network.bias"][1] = 1e18
    with pytest.raises(ds.Diverged, match="got a moment that is not finite in member 1 at step 1"):
        ds.fit(posterior, [(x, torch.zeros(12, 1))], optimizer=optimizer, checkpoint=tmp_path / "c.pt", **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_masks_of_minus_infinity_are_no_divergence() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
            self.fixed = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.exp() * self.mask.exp())

    posterior = ds.DeepEnsemble([Masked() for _ in range(2)])
    ds.fit(posterior, [(X.float(), Y)], epochs=2, progress=False)
    assert int(posterior.steps) == 2


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ds.Diverged([1, 2], 7, "gradient")))
    assert (error.members, error.step, error.what) == ([1, 2], 7, "gradient")
    assert str(error) == str(ds.Diverged([1, 2], 7, "gradient"))


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
    LateChecks(at_once=True, behind=3).add(torch.tensor(20), lambda value: done.append(int(value)))
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
    refuses(lambda: prediction_loop.check_input_values(torch.tensor(float("nan")), x), "overwritten")
    x[1] = float("inf")
    refuses(lambda: prediction_loop.check_input_values(torch.tensor(float("inf")), x), "row 1")


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
