"""Gradients of a network that is not copied: those of a loop by hand, which leave no trace in it."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import dissensus as ds
import tiny
from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.engine import strategies
from dissensus.utils.tensor_tree import OwnTensors

X, Y = tiny.points(12)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())


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
    "tied": Tied,
    "frozen": frozen,
    "parametrised": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
    "batch norm": lambda: nn.Sequential(*layers(nn.BatchNorm1d(5))),
    "recomputed": lambda: Recomputed(*layers()),
    "recomputed, batch norm": lambda: Recomputed(*layers(nn.BatchNorm1d(5))),
    "unused": Unused,
}
WAYS = {
    "by its own": gradients.looped_gradients,
    "by other leaves": lambda posterior, batch: gradients.looped_gradients(
        posterior, batch, member=gradients.member_gradients
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double().train()


def by_hand(network: nn.Module) -> dict[str, torch.Tensor]:
    nn.functional.cross_entropy(network(X), Y).backward()
    return {f"network.{name}": p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_a_loop_by_hand_and_nothing_else_changes(name):
    posterior = ds.MAP(network := made(name))
    before, expected = copy.deepcopy(network.state_dict()), by_hand(copy.deepcopy(network))
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
        by_hand(theirs)
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
    posterior = ds.MAP(made("plain").requires_grad_(False))
    found = gradients.looped_gradients(posterior, Batch(X, Y))
    assert found.losses.shape == (1,)
    assert not found.gradients


def test_a_loss_of_many_numbers_is_refused():
    class Many(ds.MAP):
        def member_loss(self, params, buffers, batch):
            value, z, buffers = super().member_loss(params, buffers, batch)
            return value.expand(3), z, buffers

    with pytest.raises(RuntimeError, match="scalar outputs"):
        gradients.looped_gradients(Many(made("plain")), Batch(X, Y))


def test_other_tensors_than_its_own_are_put_in_place():
    posterior = ds.MAP(made("plain"))
    particles, own = posterior.particles, OwnTensors(posterior.particles.template)
    others = {name: torch.zeros_like(each) for name, each in own.items()}
    (mine, _), (zero, _) = (particles.call(lambda member: member.network(X), given, {}) for given in (own, others))
    assert not zero.any()
    assert torch.equal(mine, posterior.particles.template.network(X))
