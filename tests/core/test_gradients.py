"""From one member's loss to everyone's gradients: coupled, in lanes, and of a network that is not copied."""

import copy
import functools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import dissensus as ds
import tiny
from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.core.divergence import amax
from dissensus.core.gradients import Gradients, compute_gradients, looped_gradients, looped_keeping_graphs
from dissensus.engine import strategies
from dissensus.engine.training_step import EagerStep
from dissensus.utils.tensor_tree import OwnTensors
from dissensus.utils.torch_private import run_backward
from refusals import refuses


class Coupled(ds.StackedPosterior):
    """Members pushed about by a fixed mixing of their hidden features: z_i = features, v = A z over members."""

    name = "coupled"
    mixing = torch.tensor([[0.0, 0.7, -0.2], [0.3, 0.0, 0.5], [-0.4, 0.1, 0.2]], dtype=torch.float64)

    def member_loss(self, params, buffers, batch):
        def nll_and_features(member):
            hidden = member.network[:3](batch.x)
            return member.likelihood.nll(member.network[3:](hidden), batch.y, batch.weight), hidden

        (value, hidden), after = self.particles.call(nll_and_features, params, buffers)
        return value, {"hidden": hidden, "mean": hidden.mean(0)}, after

    def couple(self, z):
        assert not any(tensor.requires_grad for tensor in z.values())
        return {name: torch.einsum("ij,j...->i...", self.mixing, tensor) for name, tensor in z.items()}


def coupled(make=tiny.mlp) -> Coupled:
    return Coupled([make() for _ in range(3)]).to(torch.float64)


def by_hand(posterior: Coupled, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of Σ nll_i + Σ ⟨z_i, v_i⟩ with plain modules and plain autograd."""
    networks = [posterior.member(i) for i in range(3)]
    hidden = [net[:3](x) for net in networks]
    z = {"hidden": torch.stack(hidden), "mean": torch.stack([h.mean(0) for h in hidden])}
    v = posterior.couple({name: tensor.detach() for name, tensor in z.items()})
    nll = sum(nn.functional.cross_entropy(net[3:](h), y) for net, h in zip(networks, hidden, strict=True))
    (nll + sum((z[name] * v[name]).sum() for name in z)).backward()
    names = [name for name, _ in networks[0].named_parameters()]
    return {f"particles.own.network.{n}": torch.stack([net.get_parameter(n).grad for net in networks]) for n in names}


STRATEGIES = {
    "vectorised": gradients.vectorised_gradients, "looped": gradients.looped_gradients,
    "looped, graphs kept": gradients.looped_keeping_graphs, "automatic": gradients.automatic_gradients,
}  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_coupled_gradients_are_those_of_the_objective(strategy):
    posterior, (x, y) = coupled(), tiny.points()
    expected = by_hand(posterior, x, y)
    losses = gradients.backward(posterior, Batch(x, y), strategy)
    assert tiny.largest_difference(tiny.gradients(posterior), expected) < 1e-10
    assert losses.shape == (3,)
    # Batch statistics move once, although the loop runs coupled members twice.
    assert posterior.particles.own_buffers()["network.1.num_batches_tracked"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_coupled_loss_has_the_same_gradients(how):
    posterior, (x, y) = coupled(), tiny.points()
    posterior.particles.how = how
    expected = by_hand(posterior, x, y)
    posterior.loss(x, y).backward()
    assert tiny.largest_difference(tiny.gradients(posterior), expected) < 1e-10


def test_both_passes_of_the_loop_drop_the_same_units():
    """z and its gradient belong to the same dropout mask, and the random stream moves on as in one pass."""

    def make():
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))

    twice, once = coupled(make), None
    once = copy.deepcopy(twice)
    x, y = tiny.points()
    torch.manual_seed(3)
    gradients.backward(twice, Batch(x, y), gradients.looped_gradients)
    after = torch.rand(1)
    torch.manual_seed(3)
    gradients.backward(once, Batch(x, y), gradients.looped_keeping_graphs)
    assert torch.equal(torch.rand(1), after)
    assert tiny.largest_difference(tiny.gradients(twice), tiny.gradients(once)) < 1e-10


@pytest.mark.parametrize("strategy", ["vectorised", "looped"])
def test_a_strategy_changes_nothing_by_itself(strategy):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    before = tiny.state(posterior)
    STRATEGIES[strategy](posterior, Batch(x, y))
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0
    assert all(p.grad is None for p in posterior.parameters())


def test_parameters_that_no_member_used_get_no_gradient():
    x, y = tiny.points()
    for posterior in (ds.MAP(Unused().double()), tiny.ensemble(Unused, how="loop")):
        posterior.backward(x, y)
        for name, parameter in posterior.named_parameters():
            assert (parameter.grad is None or float(parameter.grad.abs().max()) == 0) == ("never" in name), name


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_gradients_have_memory_and_layout_of_their_own(how):
    for posterior in (ds.MAP(tiny.equal_gradients().double()), tiny.ensemble(tiny.equal_gradients, how=how)):
        posterior.backward(*tiny.points())
        grads = [p.grad for p in posterior.parameters()]
        assert len({g.data_ptr() for g in grads}) == len(grads)
        assert all(p.grad.stride() == p.stride() for p in posterior.parameters())


METHODS = {
    "map": lambda: ds.MAP(tiny.mlp()),
    "deep_ensemble": lambda: ds.DeepEnsemble([tiny.mlp() for _ in range(2)]),
    "svgd": lambda: ds.SVGD([tiny.mlp() for _ in range(2)], data_size=12),
    "function_rde": lambda: ds.FunctionRDE([tiny.mlp() for _ in range(2)], data_size=12),
    "batch_ensemble": lambda: ds.BatchEnsemble(tiny.mlp(), members=2, modulation=ds.Modulation.sign()),
    "node_bnn": lambda: ds.NodeBNN(tiny.mlp(), data_size=12),
    "tracked": lambda: ds.track(tiny.mlp(), [ds.SWAG, ds.TRADI]),
}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_trained_where_no_gradient_is_recorded(name):
    posterior, (x, y) = METHODS[name]().double(), tiny.points()
    before = tiny.state(posterior)
    for train in (
        lambda: ds.fit(posterior, [(x, y)], epochs=1, progress=False),
        lambda: posterior.backward(x, y),
        lambda: posterior.loss(x, y),
    ):
        with torch.inference_mode():
            refuses(train, r"^expected gradients to be recorded, got torch.inference_mode\(\)")
    assert tiny.largest_difference(tiny.state(posterior), before) == 0
    with torch.no_grad():
        ds.fit(posterior, [(x, y)], epochs=1, progress=False)
        posterior.backward(x, y)
    assert tiny.gradients(posterior)
    assert int(posterior.steps) == 1
    start = {k.removeprefix("particles."): before[k] for k in before if k.startswith("particles.")}
    assert tiny.largest_difference(tiny.state(posterior.particles), start) > 1e-6


def test_gradients_that_lanes_put_into_place_are_those_of_one_lane() -> None:
    """Also where a member uses a tensor that another one does not, or none does."""

    def some() -> nn.Module:
        layers = {name: nn.Linear(3, 2) for name in ("first", "other", "never")}
        return tiny.Network(lambda self, x: self.other(x) if self.first.bias[0] > 0 else self.first(x), **layers)

    networks = [some().double() for _ in range(3)]
    with torch.no_grad():
        for network, sign in zip(networks, (1, -1, 1), strict=True):
            network.first.bias[0] = sign
    posterior, lanes = ds.DeepEnsemble(networks), (lambda index: nullcontext(), lambda: None)
    batch = Batch(torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2)
    plain, placed = looped_gradients(posterior, batch), looped_gradients(posterior, batch, lanes=lanes)
    assert plain.gradients.keys() == placed.gradients.keys() == {"network.first.weight", "network.first.bias", *OTHER}
    for name, gradient in plain.gradients.items():
        assert torch.equal(placed.gradients[name], gradient)
    assert not plain.gradients["network.other.weight"][1].any()


OTHER = ("network.other.weight", "network.other.bias")

LANES = (lambda index: nullcontext(), lambda: None)  # two functions of their own, as with streams


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def batch(size: int = 6) -> Batch:
    return Batch(torch.randn(size, 1, 3, 3), torch.randint(3, (size,)))


def same(a: Gradients, b: Gradients) -> bool:
    pairs = [(a.losses, b.losses)]
    for mine, other in ((a.gradients, b.gradients), (a.buffers, b.buffers)):
        assert list(mine) == list(other)
        pairs += [(mine[name], other[name]) for name in mine]
    return all(torch.equal(*pair) and pair[0].stride() == pair[1].stride() for pair in pairs)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("method", "run"), [
    (ds.DeepEnsemble, looped_gradients),
    (ds.FoRDE, looped_gradients),
    (ds.FoRDE, looped_keeping_graphs),
    (partial(ds.FunctionRDE, data_size=20), looped_keeping_graphs),
])  # fmt: skip
def test_results_in_lanes_are_those_one_after_the_other(method, run, device) -> None:
    posterior, given = method([conv() for _ in range(3)]).train().to(device), batch().to(torch.device(device))
    expected, found = run(posterior, given), run(posterior, given, lanes=LANES)
    if device == "cpu":  # nobody has looked
        assert same(found, expected)
        assert expected.largest is None is found.largest
        return
    assert tiny.largest_difference(found.gradients, expected.gradients) < 1e-4  # of cuDNN's algorithms
    own = posterior.particles.own_parameters()
    sizes = [each.abs().flatten(1).amax(1) for name, each in found.gradients.items() if name in own]
    for each in (expected, found):
        assert torch.equal(each.largest, torch.stack(sizes).amax(0))


def partly(number: int) -> nn.Module:
    """Uses one of its layers only if its number is 1, and changes the shape of a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x[:1, 0].detach()])
        return self.layer(x) + (self.other(x) if self.number == 1 else 0)

    parts = {"layer": nn.Linear(2, 3), "other": nn.Linear(2, 3), "number": torch.tensor(float(number))}
    return tiny.Network(forward, **parts, seen=torch.zeros(1))


def test_missing_gradients_and_buffers_of_other_shapes_are_joined() -> None:
    posterior = ds.DeepEnsemble([partly(number) for number in range(3)]).train()
    given = Batch(torch.randn(5, 2), torch.randint(3, (5,)))
    expected, found = looped_gradients(posterior, given), looped_gradients(posterior, given, lanes=LANES)
    assert same(found, expected)
    assert found.buffers["network.seen"].shape == (3, 2)
    assert not found.gradients["network.other.weight"][[0, 2]].any()


def steep() -> nn.Module:
    """Its loss is finite, and so is its gradient, unless it is marked: the root of 0 has none."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.layer(x))
        return out + (0 * self.layer.weight).sqrt().sum() if self.mark else out

    return tiny.Network(forward, layer=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), mark=torch.tensor(0.0))


@pytest.mark.parametrize("bad", [0, 2])
def test_a_member_whose_gradient_is_not_finite_is_named_and_nothing_changes(bad: int) -> None:
    posterior = ds.DeepEnsemble([steep() for _ in range(3)]).train()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    step = EagerStep(posterior, optimizer, strategy=partial(looped_gradients, lanes=LANES))
    given = Batch(torch.randn(5, 2), torch.randint(3, (5,)))
    step(given)
    posterior.particles.own_buffers()["network.mark"][bad] = 1.0
    before = {name: each.clone() for name, each in posterior.state_dict().items()}
    with pytest.raises(ds.Diverged, match="gradient") as error:
        step(given)
    assert error.value.members == [bad]
    assert all(torch.equal(each, before[name]) for name, each in posterior.state_dict().items())


def test_gradients_that_are_mixed_are_looked_at_again() -> None:
    posterior = ds.SVGD([tiny.mlp().float() for _ in range(3)], data_size=10).train()
    given = Batch(torch.randn(5, 4), torch.randint(3, (5,)))
    assert compute_gradients(posterior, given, partial(looped_gradients, lanes=LANES)).largest is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_the_largest_value_is_not_finite_if_one_number_is_not(bad: str, dtype: torch.dtype, device: str) -> None:
    tensors = [torch.zeros(3, dtype=dtype, device=device), torch.zeros(70_001, dtype=dtype, device=device)]
    assert amax(tensors, tensors[0].device) == 0
    tensors[1][-1] = float(bad)
    assert not amax(tensors, tensors[0].device).isfinite()
    assert amax([], torch.device(device)) == 0


X, Y = tiny.points(12)


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    network[2].weight = network[0].weight
    return network


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Assigning(nn.Linear):
    """Its forward registers another parameter in the place of its weight."""

    def forward(self, x):
        plain = super().forward(x)
        self.weight = nn.Parameter(torch.zeros_like(self.weight))
        return plain


class Unused(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.never = nn.Linear(2, 2)


def layers(*more: nn.Module) -> list[nn.Module]:
    return [nn.Linear(4, 5), *more, nn.Tanh(), nn.Linear(5, 3)]


def frozen() -> nn.Module:
    network = nn.Sequential(*layers())
    network[0].weight.requires_grad_(False)
    return network


NETWORKS = {
    "plain": lambda: nn.Sequential(*layers()),
    "tied": tied,
    "frozen": frozen,
    "parametrised": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
    "batch norm": lambda: nn.Sequential(*layers(nn.BatchNorm1d(5))),
    "recomputed": lambda: Recomputed(*layers()),
    "recomputed, batch norm": lambda: Recomputed(*layers(nn.BatchNorm1d(5))),
    "unused": Unused,
}
WAYS = {"by its own": looped_gradients, "by other leaves": partial(looped_gradients, member=gradients.member_gradients)}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double().train()


def plain_gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    nn.functional.cross_entropy(network(X), Y).backward()
    return {f"network.{name}": p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_a_loop_by_hand_and_nothing_else_changes(name):
    posterior = ds.MAP(network := made(name))
    before, expected = copy.deepcopy(network.state_dict()), plain_gradients(copy.deepcopy(network))
    for _ in range(3):  # activations that are recomputed are noticed in the first run
        found = gradients.looped_gradients(posterior, Batch(X, Y))
        assert found.gradients.keys() == expected.keys()
        assert all(torch.equal(found.gradients[each], expected[each]) for each in expected)
        assert all(p.grad is None for p in network.parameters())
        assert all(torch.equal(now, before[key]) for key, now in network.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_the_parameters_change_the_gradients_once(way):
    posterior = ds.MAP(network := made("plain"))
    plain, seen = gradients.looped_gradients(posterior, Batch(X, Y)).gradients, []
    network[0].weight.register_hook(lambda g: 3 * g)
    network[0].weight.register_hook(seen.append)  # it returns None, which changes nothing
    network[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append("never"))
    found = WAYS[way](posterior, Batch(X, Y)).gradients
    torch.testing.assert_close(found["network.0.weight"], 3 * plain["network.0.weight"], rtol=1e-12, atol=0)
    torch.testing.assert_close(found["network.2.weight"], plain["network.2.weight"], rtol=1e-12, atol=0)
    assert len(seen) == 1


@pytest.mark.parametrize("engine", ["auto", "loop", "vectorised"])
def test_fit_trains_under_hooks_as_a_loop_by_hand(engine):
    network, theirs = made("plain"), made("plain")
    for each in (network, theirs):
        each[0].weight.register_hook(lambda g: g * (torch.arange(4) % 2))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        plain_gradients(theirs)
        optimizer.step()
    mine = torch.optim.SGD(network.parameters(), lr=0.1)
    ds.fit(ds.MAP(network), [(X, Y)], epochs=5, optimizer=mine, progress=False, device="cpu", engine=engine)
    torch.testing.assert_close(network.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-14)


def test_hooks_also_act_where_the_gradients_are_compiled(monkeypatch):
    monkeypatch.setattr(strategies, "_compile", functools.partial(torch.compile, dynamic=False, backend="aot_eager"))
    posterior = ds.MAP(network := made("plain"))
    plain = gradients.looped_gradients(posterior, Batch(X, Y)).gradients["network.0.weight"]
    network[0].weight.register_hook(lambda g: 3 * g)
    found = strategies.make_strategy("loop", compiled=True)(posterior, Batch(X, Y)).gradients["network.0.weight"]
    torch.testing.assert_close(found, 3 * plain, rtol=1e-10, atol=1e-12)


def test_a_forward_that_assigns_parameters_leaves_the_callers_in_place():
    network = nn.Sequential(Assigning(4, 3)).double().train()
    weight = network[0].weight
    found = gradients.looped_gradients(ds.MAP(network), Batch(X, Y)).gradients
    assert network[0].weight is weight
    assert found["network.0.weight"].abs().sum() > 0


def test_a_network_of_which_nothing_is_trained_has_no_gradients():
    found = gradients.looped_gradients(ds.MAP(made("plain").requires_grad_(False)), Batch(X, Y))
    assert found.losses.shape == (1,)
    assert not found.gradients


def test_a_loss_of_many_numbers_is_refused():
    class Many(ds.NetworksPosterior):
        def member_loss(self, params, buffers, batch):
            value, z, buffers = super().member_loss(params, buffers, batch)
            return value.expand(3), z, buffers

    for write in (False, True):
        posterior = Many(made("plain"))
        refuses(
            lambda each=posterior, write=write: gradients.in_place_gradients(each, Batch(X, Y), write=write),
            "scalar outputs", RuntimeError,
        )  # fmt: skip


def test_gradients_are_written_as_torch_writes_them():
    """Of what is wanted only, with hooks; a mode for torch's functions is asked."""
    network, seen = made("plain"), []
    (first, *others), outside = network.parameters(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    first.register_hook(seen.append)
    first.register_post_accumulate_grad_hook(seen.append)
    run_backward((network(X) * outside).square().mean(), others[:1])
    assert outside.grad is first.grad is others[1].grad is None
    (network(X) * outside).square().mean().backward(inputs=[first])
    theirs, first.grad = first.grad, None
    run_backward((network(X) * outside).square().mean(), [first])
    assert torch.equal(first.grad, theirs)
    assert len(seen) == 4

    class Noted(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    loss = network(X).mean()
    with Noted():
        run_backward(loss, [first])
    assert any(each is torch.autograd.backward for each in seen)


def test_other_tensors_than_its_own_are_put_in_place():
    posterior = ds.MAP(made("plain"))
    particles, own = posterior.particles, OwnTensors(posterior.particles.template)
    others = {name: torch.zeros_like(each) for name, each in own.items()}
    (mine, _), (zero, _) = (particles.call(lambda member: member.network(X), given, {}) for given in (own, others))
    assert not zero.any()
    assert torch.equal(mine, posterior.particles.template.network(X))
