"""Attributes that members of an ensemble cannot have each for itself are said, where they differ."""

import functools
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds


class Net(nn.Module):
    """A network with an attribute that is neither layer nor tensor of its own."""

    def __init__(self, attribute=None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.attribute = attribute

    def forward(self, x):
        return self.layer(x)


def said(networks, caplog) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        ds.DeepEnsemble(networks)
    return [record.getMessage() for record in caplog.records]


PAIRS = {
    "number": (1.0, 2.0),
    "kind": (1, "one"),
    "function": (F.relu, F.tanh),
    "tensor": (torch.zeros(3), torch.ones(3)),
    "array": (np.zeros(3), np.ones(3)),
    "list": ([1, [2, 3]], [1, [2, 4]]),
    "table": ({"a": 1}, {"b": 1}),
    "layer in a list": ([nn.Linear(2, 2)], [nn.Linear(2, 2)]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_would_be_read_for_all_members_is_said_where_it_differs(name, caplog):
    (message,) = said([Net(value) for value in PAIRS[name]], caplog)
    assert message.startswith(
        "members 0 and 1 differ in the attribute 'attribute', and member 0's will be read for all"
    )


def test_what_is_equal_or_cannot_be_compared_is_not_said(caplog):
    for values in ((1.0, 1.0), (float("nan"), float("nan")), (object(), object()), (lambda x: x, lambda x: x),
                   (functools.partial(F.relu), functools.partial(F.relu)), (torch.ones(3), torch.ones(3))):  # fmt: skip
        assert not said([Net(value) for value in values], caplog)


def with_list_of_layers():
    network = Net()
    network.attribute = [network.layer, network.layer.weight]
    return network


def test_what_each_member_has_for_itself_is_not_said(caplog):
    recurrent = [nn.LSTM(2, 3) for _ in range(2)]  # which keep a list of their weights
    normed = [nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))) for _ in range(2)]
    for networks in (recurrent, normed, [with_list_of_layers(), with_list_of_layers()]):
        assert not said(networks, caplog)


@pytest.mark.parametrize("chosen", [0, 1])
def test_layers_in_eval_mode_in_some_members_alone_are_said(chosen, caplog):
    networks = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    networks[chosen][1].eval()
    (message,) = said(networks, caplog)
    assert message.startswith("layer '1' is in eval mode in one of members 0 and 1 alone")
    networks[1 - chosen][1].eval()
    assert not said(networks, caplog)
    networks[1].eval()  # as a whole, as networks are after an evaluation
    assert not said(networks, caplog)
