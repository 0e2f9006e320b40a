"""The tree of tensors knows its names, and learns anew when tensors are replaced."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import dissensus as ds
import tiny
from dissensus.utils.tensor_tree import TensorPlaces, TensorTree, call_with_tensors, named_submodules, named_tensors


def tree():
    planted = TensorTree()
    planted.add_tensor("a.weight", nn.Parameter(torch.ones(2, 3)))
    planted.add_tensor("a.count", torch.zeros(2))
    return planted


def are_those_of(module):
    parameters, buffers = named_tensors(module)
    assert [(n, id(t)) for n, t in parameters.items()] == [(n, id(t)) for n, t in module.named_parameters()]
    assert [(n, id(t)) for n, t in buffers.items()] == [(n, id(t)) for n, t in module.named_buffers()]
    return True


def test_names_follow_whatever_replaces_tensors():
    planted = tree()
    assert are_those_of(planted)
    planted.add_tensor("b.bias", nn.Parameter(torch.ones(2)))
    assert are_those_of(planted)
    planted.to(torch.float64)
    assert are_those_of(planted)
    assert named_tensors(planted)[1]["a.count"].dtype == torch.float64
    planted.load_state_dict({name: t.clone() for name, t in planted.state_dict().items()}, assign=True)
    assert are_those_of(planted)
    assert are_those_of(copy.deepcopy(planted))


def test_a_posterior_whose_state_is_assigned_trains_what_it_was_given():
    posterior, other, (x, y) = tiny.ensemble(tiny.mlp), tiny.ensemble(tiny.mlp), tiny.points()
    posterior.backward(x, y)  # names are known
    posterior.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(posterior.eval().predict(x).member_means, other.eval().predict(x).member_means)
    posterior.zero_grad()
    posterior.backward(x, y)
    assert all(parameter.grad is not None for parameter in posterior.parameters())
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)


class Tied(nn.Module):
    """A layer under two names, a tied weight, a buffer that forward assigns anew, and one that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.count.add_(1)
        return self.last(self.again(x)) + self.seen


def test_a_call_with_other_tensors_is_torchs_functional_call_and_puts_back_what_was_there():
    network, x = Tied().double(), torch.randn(3, 4, dtype=torch.float64)
    assert [name for name, _ in named_submodules(network)] == [
        f"{name}." if name else "" for name, _ in network.named_modules()
    ]
    assert are_those_of(network)
    before = {name: (id(t), t.clone()) for name, t in network.state_dict(keep_vars=True).items()}
    mine, others = ({n: torch.randn_like(t) for n, t in tensors.items()} for tensors in named_tensors(network))
    given = {**mine, **others}
    copied = {name: t.clone() for name, t in given.items()}
    tied = {"last.weight": copied["first.weight"]}
    expected = functional_call(copy.deepcopy(network), {**copied, **tied}, (x,), tie_weights=False)
    for places in (None, TensorPlaces(network)):
        again = {name: t.clone() for name, t in given.items()}
        torch.testing.assert_close(call_with_tensors(network, again, x, places=places), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        call_with_tensors(network, given, torch.zeros(3, 5, dtype=torch.float64))
    after = network.state_dict(keep_vars=True)
    assert {name: id(t) for name, t in after.items()} == {name: known for name, (known, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())


def test_a_network_that_assigns_its_buffers_predicts_the_same_every_time_and_keeps_them():
    torch.manual_seed(0)
    network, x = Tied(), torch.randn(3, 4)
    seen, posterior = network.seen, ds.MAP(network)
    first, second = (posterior.predict(x).member_means for _ in range(2))
    assert torch.equal(first, second)
    assert network.seen is seen
    assert float(seen) == 0
    torch.testing.assert_close(first[0], network(x).softmax(1))
    assert float(network.seen) == 1
