"""Members that differ in what a forward reads beside its tensors run each in its own template; files describe it."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from dissensus.utils.module_state import saved_attributes
from refusals import refuses


class Net(nn.Module):
    """A network with an attribute that is neither layer nor tensor of its own, which scales its inputs if it is a number."""

    def __init__(self, attribute=None):
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.attribute = attribute

    def forward(self, x):
        x = self.attribute(x) if callable(self.attribute) else x * self.attribute
        return self.head(torch.tanh(self.norm(self.layer(x))))


def templates(networks) -> int:
    return len(ds.DeepEnsemble(networks).particles.templates)


def scaled(factor):
    return lambda x: x * factor


def added(x, *, summand=0.0):
    return x + summand


def again(x, *, summand=1.0):
    return x + summand


again.__qualname__ = added.__qualname__
PAIRS = {
    "number": (1.0, 2.0),
    "kind": (1, "one"),
    "function": (F.relu, F.tanh),
    "lambda": (lambda x: x, lambda x: -x),
    "closure": (scaled(1.0), scaled(2.0)),
    "default": (added, again),
    "partial": (functools.partial(added, summand=1.0), functools.partial(added, summand=2.0)),
    "tensor": (torch.zeros(3), torch.ones(3)),
    "array": (np.zeros(3), np.ones(3)),
    "list": ([1, [2, 3]], [1, [2, 4]]),
    "table": ({"a": 1}, {"b": 1}),
    "set": ({1, 2}, {1, 3}),
    "layer in a list": ([nn.Linear(2, 2)], [nn.Linear(2, 2)]),
    "what cannot be compared": ((x for x in ()), (x for x in ())),
}


@pytest.mark.parametrize("name", PAIRS)
def test_members_with_other_attributes_have_templates_of_their_own(name):
    first, second = PAIRS[name]
    if name == "what cannot be compared":  # nor copied
        refuses(lambda: templates([Net(first), Net(second)]), "generator", TypeError)
    else:
        assert templates([Net(first), Net(second)]) == 2
        assert templates([Net(copy.deepcopy(first)), Net(copy.deepcopy(first))]) == 1


def test_what_is_equal_is_one_template():
    for values in ((float("nan"), float("nan")), (object(), object()), (torch.device("cpu"), torch.device("cpu")),
                   (scaled(2.0), scaled(2.0))):  # fmt: skip
        assert templates([Net(value) for value in values]) == 1


def with_list_of_layers():
    network = Net()
    network.attribute = [network, network.layer, network.layer.weight, lambda: network]
    return network


def test_what_each_member_has_for_itself_is_one_template():
    recurrent = [nn.LSTM(2, 3) for _ in range(2)]  # which keep lists of their weights
    normed = [nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))) for _ in range(2)]
    for networks in (recurrent, normed, [with_list_of_layers(), with_list_of_layers()]):
        assert templates(networks) == 1


def test_hooks_of_one_member_are_read_by_that_member_alone():
    networks, (x, _) = [Net(1.0).double() for _ in range(2)], tiny.points()
    networks[1].layer.register_forward_hook(lambda _, __, output: output + 1)
    expected = torch.stack([network.eval()(x) for network in networks])
    torch.testing.assert_close(ds.DeepEnsemble(networks)(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["auto", "vectorised", "loop"])
@pytest.mark.parametrize(
    "values",
    [(1.0, 5.0), (torch.tanh, torch.sin), (torch.ones(4), torch.arange(4))],
    ids=["number", "function", "tensor"],
)
def test_members_with_other_attributes_train_and_predict_as_each_does_alone(values, engine):
    torch.manual_seed(0)
    x, y = tiny.points()
    alone = [Net(value).double() for value in values]
    posterior = ds.DeepEnsemble(alone)
    ds.fit(posterior, [(x, y)], epochs=3, optimizer=torch.optim.SGD(posterior.parameters(), lr=0.5), engine=engine,
           progress=False)  # fmt: skip
    for network in alone:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    expected = torch.stack([network.eval()(x) for network in alone])
    posterior.eval()
    for found in (posterior(x), copy.deepcopy(posterior)(x), torch.stack([posterior.member(i)(x) for i in (0, 1)])):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.predict(x).mean, expected.softmax(-1).mean(0), rtol=0, atol=1e-12)
    parts = list(posterior.draw().predict_parts(x))
    assert len(parts) == 2
    torch.testing.assert_close(parts[1].mean, expected[1].softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["svgd", "weight_rde", "function_rde", "feature_rde", "forde", "lit"])
def test_coupled_members_with_other_attributes_train_in_their_own_templates(method):
    """A factor of the inputs as an attribute is the same as one folded into the first layer's inputs beforehand."""
    x, y = tiny.points()
    keywords = {"feature_rde": {"layer": "norm", "head": "head"}, "lit": {"strength": 0.5}, "forde": {}}
    losses = []
    for factors in ((1.0, 3.0), (torch.tensor(1.0), torch.tensor(3.0))):
        torch.manual_seed(0)
        networks = [Net(factor).double() for factor in factors]
        if losses:
            for network in networks:  # in one template: a buffer for each
                value = network.attribute
                del network.attribute
                network.register_buffer("attribute", value)
        posterior = ds.METHODS[method](networks, **keywords.get(method, {"data_size": 12})).double()
        assert len(posterior.particles.templates) == (1 if losses else 2)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        ds.fit(posterior, [(x, y)], epochs=2, optimizer=optimizer, progress=False)
        losses.append(posterior.predict(x).log_prob(y))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_layer_in_eval_mode_in_one_member_alone_stays_so_in_that_one(chosen):
    networks, (x, y) = [Net(1.0).double() for _ in range(2)], tiny.points()
    networks[chosen].norm.eval()
    posterior = ds.DeepEnsemble(networks)
    before = posterior.particles.own_buffers()["network.norm.running_mean"].clone()
    posterior.train().backward(x, y)
    moved = (posterior.particles.own_buffers()["network.norm.running_mean"] - before).abs().amax(1) > 0
    assert moved.tolist() == [chosen == 1, chosen == 0]
    refuses(lambda: ds.save(posterior, "nowhere"), r"norm\.training")
    networks[1 - chosen].norm.eval()
    assert templates(networks) == 1
    networks[1].eval()  # as a whole, as networks are after an evaluation
    assert templates(networks) == 1


def test_files_describe_attributes_in_words_that_any_process_understands():
    network = nn.Sequential(Net(2.0), Net(scaled(3.0)), Net(torch.ones(2)), Net(object()), nn.MultiheadAttention(4, 2))
    found = saved_attributes(network)
    assert found["0.attribute"] == "2.0"
    assert found["1.attribute"] == ["scaled.<locals>.<lambda>", ["None", "None", ["3.0"]], None]
    assert found["2.attribute"].startswith("Tensor (2,) torch.float32 ")
    assert "3.attribute" not in found
    assert found["4.num_heads"] == "2"
    assert "0.layer.in_features" not in found  # its description is in the network's structure


def test_files_do_not_hold_what_trainers_of_other_libraries_note_on_a_network():
    network = Net(2.0)
    network._is_accelerate_prepared, network._current_fx_name = True, "on_fit_start"
    assert saved_attributes(network) == saved_attributes(Net(2.0)) != {}
