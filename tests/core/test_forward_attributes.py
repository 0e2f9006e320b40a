"""Networks that write attributes, call hooks and count in their forward: no call leaves a trace, and members keep their own."""

import copy
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import dissensus as ds
import tiny
from dissensus.core.member import state_names
from thinning import thinned

STEPS = 4


def net(between: Callable[..., Tensor] = lambda self, h: h, **attributes: object) -> nn.Module:
    """Two layers and something between them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.h(between(self, torch.tanh(self.a(x))))

    return tiny.Network(forward, a=nn.Linear(4, 6), h=nn.Linear(6, 3), **attributes)


def keep_features(self: nn.Module, h: Tensor) -> Tensor:
    self.features = h
    return self.features


def hook_on_layer() -> nn.Module:
    network = net()
    network.a.register_forward_hook(lambda layer, _, output: setattr(layer, "last", output))
    return network


def hook_into_dict() -> nn.Module:
    network = net()
    network.a.store = {}
    network.a.register_forward_hook(lambda layer, _, output: layer.store.update(a=output))
    return network


def append(self: nn.Module, h: Tensor) -> Tensor:
    self.history.append(h)
    return h


def count_rows(self: nn.Module, h: Tensor) -> Tensor:
    self.rows = len(h)
    return h


def count_steps(self: nn.Module, h: Tensor) -> Tensor:
    self.step += self.training
    return h * min(1.0, self.step / 10)


def count_in_dict(self: nn.Module, h: Tensor) -> Tensor:
    self.counts["step"] += self.training
    return h * min(1.0, self.counts["step"] / 10)


def count_late(self: nn.Module, h: Tensor) -> Tensor:
    """Nothing shows in the first calls."""
    if self.training:
        self.steps += 1
        if self.steps > 2:
            self.late += 1
    return h / self.late


def count_calls(self: nn.Module, h: Tensor) -> Tensor:
    """In eval mode it counts, too: predictions must not."""
    self.calls += 1
    return h * (1 + self.calls / 10)


def mask_by_shape(self: nn.Module, h: Tensor) -> Tensor:
    if len(h) not in self.masks:
        self.masks[len(h)] = torch.arange(6, dtype=h.dtype)
    return h * self.masks[len(h)]


def mask_once(self: nn.Module, h: Tensor) -> Tensor:
    if self.mask is None or len(self.mask) != len(h):
        self.mask = torch.linspace(0, 1, len(h), dtype=h.dtype)[:, None]
    return h * self.mask


def average(self: nn.Module, h: Tensor) -> Tensor:
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    return h - self.mean


def average_in_place(self: nn.Module, h: Tensor) -> Tensor:
    if self.training:
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - self.mean


def with_mean(between: Callable[..., Tensor]) -> nn.Module:
    network = net(between)
    network.mean = torch.zeros(6, dtype=torch.float64)  # an attribute, no buffer
    return network


def add_last_features(self: nn.Module, h: Tensor) -> Tensor:
    last = getattr(self, "last", None)
    if self.training:
        self.last = h
    return h if last is None else h + last.detach().mean(0)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "KeepsFeatures": lambda: net(keep_features),
    "KeepsFeaturesInPlaceOfNone": lambda: net(keep_features, features=None),
    "CounterNotRead": lambda: net(count_rows, rows=0),
    "HookOnLayer": hook_on_layer,
    "HookIntoDict": hook_into_dict,
    "AppendsToList": lambda: net(append, history=[]),
    "MaskByShape": lambda: net(mask_by_shape, masks={}),
    "MaskOnce": lambda: net(mask_once, mask=None),
    "CounterRead": lambda: net(count_steps, step=0),
    "CounterInDict": lambda: net(count_in_dict, counts={"step": 0}),
    "CountsFromTheThirdStep": lambda: net(count_late, steps=torch.tensor(0), late=1),
    "Average": lambda: with_mean(average),
    "AverageInPlace": lambda: with_mean(average_in_place),
    "AddsLastFeatures": lambda: net(add_last_features),
    "CounterInEval": lambda: net(count_calls, calls=0),
    "SharesList": lambda: shares_list(),
    "AverageTimesFeatures": lambda: with_mean(average_times_features),
}


STATELESS = ["KeepsFeatures", "KeepsFeaturesInPlaceOfNone", "CounterNotRead"]
# Written, read and not needed: as good as stateless, but nobody can know.
HARMLESS = ["HookOnLayer", "HookIntoDict", "AppendsToList", "MaskByShape", "MaskOnce"]
STATEFUL = ["CounterRead", "CounterInDict", "CountsFromTheThirdStep", "Average", "AverageInPlace", "AddsLastFeatures"]
KINDS = [*STATELESS, *HARMLESS, *STATEFUL, "CounterInEval"]
METHODS: dict[str, Callable[..., ds.Posterior]] = {
    "MAP": lambda make: ds.MAP(make()),
    "MAP of a list": lambda make: ds.MAP([make() for _ in range(2)]),
    "DeepEnsemble": lambda make: ds.DeepEnsemble([make() for _ in range(3)]),
    "SWAG": lambda make: ds.SWAG(make(), samples=2, rank=2),
    "TRADI": lambda make: ds.TRADI(make(), samples=2),
    "Snapshot": lambda make: ds.METHODS["snapshot_ensemble"](make(), members=2),
    "FoRDE": lambda make: ds.FoRDE([make() for _ in range(2)]),
    "WeightRDE": lambda make: ds.METHODS["weight_rde"]([make() for _ in range(2)], data_size=12),
    "BatchEnsemble": lambda make: ds.BatchEnsemble(make(), members=2, modulation=ds.Modulation.sign()),
    "NodeBNN": lambda make: ds.NodeBNN(make(), samples=2, data_size=12),
    "MCDropout": lambda make: ds.MCDropout(make(), samples=2, rate=0.3),
    "MeanFieldVI": lambda make: ds.MeanFieldVI(make(), samples=2, data_size=12),
}


def made(kind: str | None) -> nn.Module:
    return (NETWORKS[kind]() if kind else net()).double()


def fit(posterior: ds.Posterior, **keywords: object) -> ds.Posterior:
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)
    ds.fit(posterior, [tiny.points()], optimizer=optimizer, progress=False, **{"epochs": STEPS, **keywords})
    return posterior


def train(network: nn.Module, steps: int = STEPS) -> nn.Module:
    """The same by hand."""
    (x, y), optimizer = tiny.points(), torch.optim.SGD(network.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network


@torch.no_grad()
def outputs(network: nn.Module) -> Tensor:
    """Those of one call, which leaves the network's attributes as they are."""
    before = vars(network).copy()
    found = network(tiny.points()[0])
    vars(network).update(before)
    return found


def predicted(posterior: ds.Posterior) -> Tensor:
    torch.manual_seed(1)
    return posterior.predict(tiny.points()[0]).member_means


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "method", "engine"),
    thinned(KINDS, ["MAP", "MAP of a list", "DeepEnsemble"], ["auto", "loop", "vectorised"], every=5),
)
def test_training_and_predictions_are_those_of_a_plain_loop(kind: str, method: str, engine: str) -> None:
    torch.manual_seed(0)
    posterior = METHODS[method](lambda: made(kind))
    alone = [posterior.member(i) for i in range(posterior.particles.members)]
    fit(posterior, engine=engine)
    for network in alone:
        train(network).eval()
    expected = torch.stack([outputs(network) for network in alone])
    for _ in range(2):
        same(posterior.predict(tiny.points()[0]).mean, expected.softmax(2).mean(0))
    same(torch.stack([outputs(posterior.member(i).eval()) for i in range(len(alone))]), expected)


@pytest.mark.parametrize(("kind", "method"), thinned(KINDS, list(METHODS), every=12))
def test_copies_states_and_files_have_the_same_predictions_or_it_is_said(
    kind: str, method: str, tmp_path, caplog
) -> None:
    torch.manual_seed(0)
    fresh = made(kind)
    posterior = fit(METHODS[method](lambda: made(kind)))
    expected = predicted(posterior)
    assert expected.isfinite().all()
    same(predicted(posterior), expected)
    same(predicted(copy.deepcopy(posterior)), expected)
    copy.deepcopy(posterior.member(0))

    caplog.set_level(logging.WARNING, logger="dissensus")
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, network=copy.deepcopy(fresh))
    other = METHODS[method](lambda: made(kind))
    said = "not the attribute" in caplog.text
    assert said == (kind not in STATELESS) or kind == "CountsFromTheThirdStep"
    assert said == bool(state_names(posterior.particles))
    if kind not in STATEFUL and kind != "CounterInEval":
        same(predicted(loaded), expected)
    elif method in ("MAP", "DeepEnsemble", "BatchEnsemble"):
        assert said
    if method in ("MAP", "DeepEnsemble", "BatchEnsemble", "FoRDE"):  # others have recordings of other lengths
        other.load_state_dict(posterior.state_dict())
        if kind not in STATEFUL and kind != "CounterInEval":
            same(predicted(other), expected)
    for name in vars(fresh).keys() - {"function"}:  # files describe the network as it was built
        each = getattr(fresh, name)
        assert getattr(made(kind), name, None) is None or repr(getattr(made(kind), name)) == repr(each)


SEEN: dict[str, Tensor] = {}


def closure_and_its_list() -> tuple[Callable[..., None], list[Tensor]]:
    seen: list[Tensor] = []
    return lambda layer, inputs, output: seen.append(output), seen


def function_and_its_global() -> tuple[Callable[..., None], dict[str, Tensor]]:
    SEEN.clear()
    return lambda layer, inputs, output: SEEN.update(a=output), SEEN


@pytest.mark.parametrize("make", [closure_and_its_list, function_and_its_global])
def test_hooks_keep_what_each_member_has_computed_outside_of_the_network(make: Callable[[], tuple]) -> None:
    torch.manual_seed(0)
    hook, seen = make()
    networks = [made(None) for _ in range(3)]
    for network in networks:
        network.a.register_forward_hook(hook)
    posterior = ds.DeepEnsemble(networks)
    x, y = tiny.points()
    posterior.train().backward(x, y)
    posterior.predict(x)
    kept = list(seen.values() if isinstance(seen, dict) else seen)
    expected = [F.linear(x, each.a.weight, each.a.bias) for each in networks]
    same(kept[-1].detach(), expected[-1].detach())
    for each in kept:
        each.sum().item()  # not a tensor of vmap
    copy.deepcopy(posterior)


def test_hooks_that_keep_no_tensors_leave_members_vectorised() -> None:
    calls: list[int] = []
    networks = [made(None) for _ in range(3)]
    for network in networks:
        network.a.register_forward_hook(lambda *_: calls.append(1))
    posterior = ds.DeepEnsemble(networks)
    posterior.predict(tiny.points()[0])
    assert calls
    assert posterior.particles.how == "vectorised"


def test_features_of_the_callers_own_call_stay_and_can_be_copied_and_saved(tmp_path) -> None:
    torch.manual_seed(0)
    network = made("KeepsFeatures")
    posterior = fit(ds.MAP(network))
    assert not hasattr(network, "features")
    x, _ = tiny.points()
    expected = network.eval()(x).softmax(1)
    features = network.features
    assert features.grad_fn is not None
    for other in (posterior, copy.deepcopy(posterior), saved_and_loaded(posterior, tmp_path)):
        same(other.predict(x).mean, expected.detach())
    assert network.features is features


def saved_and_loaded(posterior: ds.Posterior, folder) -> ds.Posterior:
    ds.save(posterior, folder)
    return ds.load(folder, network=made("KeepsFeatures"))


def test_members_that_keep_features_stay_vectorised() -> None:
    posterior = fit(ds.DeepEnsemble([made("KeepsFeatures") for _ in range(3)]))
    assert posterior.particles.how == "vectorised"
    assert len(posterior.particles.templates) == 1


@pytest.mark.parametrize(
    ("kind", "method"),
    thinned(["CounterRead", "Average", "AverageInPlace", "MaskByShape"], ["MAP", "DeepEnsemble"], every=2),
)
def test_a_resumed_run_says_what_its_checkpoint_does_not_hold(kind: str, method: str, tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="dissensus")
    posterior, resumed = (METHODS[method](lambda: made(kind)) for _ in range(2))
    fit(posterior, epochs=2, checkpoint=tmp_path / "run.pt")
    assert "not the attribute" in caplog.text
    fit(resumed, epochs=STEPS, checkpoint=tmp_path / "run.pt")


@pytest.mark.parametrize("method", ["MAP", "DeepEnsemble", "SWAG"])
def test_a_resumed_run_of_a_network_that_keeps_features_is_the_whole_run(method: str, tmp_path) -> None:
    def run(epochs: int, folder: str) -> ds.Posterior:
        torch.manual_seed(0)
        posterior = METHODS[method](lambda: made("KeepsFeatures"))
        return fit(posterior, epochs=epochs, checkpoint=tmp_path / folder)

    whole = run(STEPS, "whole.pt")
    run(2, "part.pt")
    for a, b in zip(whole.parameters(), run(STEPS, "part.pt").parameters(), strict=True):
        same(a.detach(), b.detach())


def test_attributes_set_by_the_caller_between_calls_are_read() -> None:
    network, (x, _) = made("CounterRead").eval(), tiny.points()
    posterior = ds.MAP(network)
    for step in (3, 7):
        network.step = step
        same(posterior.predict(x).mean, network(x).softmax(1).detach())
        assert network.step == step


def shares_list() -> nn.Module:
    """A layer appends to the list that the network sums."""

    def between(self: nn.Module, h: Tensor) -> Tensor:
        self.extra.clear()
        self.inner(h)
        return h + sum(self.extra)

    extra = []
    inner = tiny.Network(lambda self, h: self.extra.append(h.square()), extra=extra)
    return net(between, extra=extra, inner=inner)


def average_times_features(self: nn.Module, h: Tensor) -> Tensor:
    """The backward pass needs the average as it was in the forward pass."""
    average_in_place(self, h)
    return h * (1 + self.mean)


@pytest.mark.parametrize("method", ["MAP", "DeepEnsemble"])
@pytest.mark.parametrize("kind", ["SharesList", "AverageTimesFeatures"])
def test_what_layers_share_and_what_the_backward_pass_needs_is_there(kind: str, method: str) -> None:
    test_training_and_predictions_are_those_of_a_plain_loop(kind, method, "auto")


def test_pruned_and_normed_networks_have_no_state() -> None:
    def network() -> nn.Module:
        layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        prune.l1_unstructured(layers[0], "weight", amount=0.5)
        torch.nn.utils.spectral_norm(layers[2])
        return layers

    posterior = fit(ds.DeepEnsemble([network() for _ in range(2)]))
    assert not state_names(posterior.particles)
    assert len(posterior.particles.templates) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorised+compiled", "loop+compiled"])
@pytest.mark.parametrize("kind", ["KeepsFeatures", "CounterRead"])
def test_compiled_members_keep_no_attributes_and_count_as_plain_ones(kind: str, engine: str) -> None:
    for method in ("MAP", "DeepEnsemble"):
        torch._dynamo.reset()
        test_training_and_predictions_are_those_of_a_plain_loop(kind, method, engine)
