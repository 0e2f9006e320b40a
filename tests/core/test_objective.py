"""From one member's loss to everyone's gradients: coupled members against the objective written out."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core import gradients
from dissensus.core.batch import Batch


class Coupled(ds.DeepEnsemble):
    """Members pushed about by a fixed mixing of their hidden features: z_i = features, v = A z over members."""

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
    "vectorised": gradients.vectorised_gradients,
    "looped": gradients.looped_gradients,
    "looped, graphs kept": gradients.looped_keeping_graphs,
    "automatic": gradients.automatic_gradients,
}


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


@pytest.mark.parametrize(
    "strategy", [gradients.vectorised_gradients, gradients.looped_gradients], ids=["vectorised", "looped"]
)
def test_a_strategy_changes_nothing_by_itself(strategy):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    before = tiny.state(posterior)
    strategy(posterior, Batch(x, y))
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0
    assert all(p.grad is None for p in posterior.parameters())


def test_parameters_that_no_member_used_get_no_gradient():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    x, y = tiny.points()
    for posterior in (ds.MAP(Unused().double()), tiny.ensemble(Unused, how="loop")):
        posterior.backward(x, y)
        for name, parameter in posterior.named_parameters():
            expected_none = "unused" in name
            assert (parameter.grad is None or float(parameter.grad.abs().max()) == 0) == expected_none, name


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_gradients_have_memory_and_layout_of_their_own(how):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return self.layer(x) + (self.a + self.b)

    for posterior in (ds.MAP(Sum().double()), tiny.ensemble(Sum, how=how)):
        posterior.backward(*tiny.points())
        grads = [p.grad for p in posterior.parameters()]
        assert len({g.data_ptr() for g in grads}) == len(grads)
        assert all(p.grad.stride() == p.stride() for p in posterior.parameters())


def test_backward_works_without_grad_mode():
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    with torch.no_grad():
        posterior.backward(x, y)
    assert len(tiny.gradients(posterior)) == 6


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
        with (
            torch.inference_mode(),
            pytest.raises(ValueError, match=r"^expected gradients to be recorded, got torch.inference_mode\(\)"),
        ):
            train()
    assert tiny.largest_difference(tiny.state(posterior), before) == 0
    with torch.no_grad():
        ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    assert int(posterior.steps) == 1
    assert (
        tiny.largest_difference(
            tiny.state(posterior.particles), {k[10:]: before[k] for k in before if k.startswith("particles.")}
        )
        > 1e-6
    )


def test_gradients_that_lanes_put_into_place_are_those_of_one_lane() -> None:
    """Also where a member uses a tensor that another one does not, or none does."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x) if bool(self.first.bias[0] > 0) else self.first(x)

    networks = [Some().double() for _ in range(3)]
    with torch.no_grad():
        for network, sign in zip(networks, (1, -1, 1), strict=True):
            network.first.bias[0] = sign
    posterior, lanes = ds.DeepEnsemble(networks), (lambda index: nullcontext(), lambda: None)
    batch = Batch(torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2)
    plain, placed = (
        gradients.looped_gradients(posterior, batch),
        gradients.looped_gradients(posterior, batch, lanes=lanes),
    )
    assert plain.gradients.keys() == placed.gradients.keys() == {"network.first.weight", "network.first.bias", *OTHER}
    for name, gradient in plain.gradients.items():
        assert torch.equal(placed.gradients[name], gradient)
    assert not plain.gradients["network.other.weight"][1].any()


OTHER = ("network.other.weight", "network.other.bias")
