"""The tree of tensors knows its names, and learns anew when tensors are replaced."""

import copy

import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.numerics.tree import TensorTree, named_tensors


def tree():
    planted = TensorTree()
    planted.plant("a.weight", nn.Parameter(torch.ones(2, 3)))
    planted.plant("a.count", torch.zeros(2))
    return planted


def are_those_of(module):
    parameters, buffers = named_tensors(module)
    assert [(n, id(t)) for n, t in parameters.items()] == [(n, id(t)) for n, t in module.named_parameters()]
    assert [(n, id(t)) for n, t in buffers.items()] == [(n, id(t)) for n, t in module.named_buffers()]
    return True


def test_names_follow_whatever_replaces_tensors():
    planted = tree()
    assert are_those_of(planted)
    planted.plant("b.bias", nn.Parameter(torch.ones(2)))
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
    assert torch.equal(posterior.eval().predict(x).members, other.eval().predict(x).members)
    posterior.zero_grad()
    posterior.backward(x, y)
    assert all(parameter.grad is not None for parameter in posterior.parameters())
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
