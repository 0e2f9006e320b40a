"""The order of calls is found without an input, and without leaving a trace in the network."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.surgery.order import call_order


def weighted(network):
    return [name for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.b, self.a, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x, scale=1.0):
        x = self.a(x.flatten(1)) * scale
        return self.c(self.norm(torch.relu(self.b(x)) + x)).softmax(-1)


class Asking(Backwards):
    """A forward that needs to know sizes."""

    def forward(self, x):
        return self.c(x) if len(x) > 1 else self.a(self.b(x))


def test_layers_stand_in_the_order_of_calls():
    network = Backwards()
    assert call_order(network, weighted(network)) == ["a", "b", "c"]
    assert all("forward" not in vars(part) for part in network.modules())
    network(torch.randn(3, 2))


def test_a_forward_that_asks_for_sizes_leaves_the_order_of_registration():
    network = Asking()
    assert call_order(network, weighted(network)) == ["c", "b", "a"]
    assert all("forward" not in vars(part) for part in network.modules())


@pytest.mark.parametrize("make", [lambda: ds.nets.ResNet(20), lambda: ds.nets.WideResNet(10, 1), ds.nets.VGG16])
def test_networks_of_the_library_are_run_on_symbols(make):
    network = make()
    names = weighted(network)
    met = call_order(network, list(reversed(names)))
    assert met[0] == names[0]
    assert met[-1] == names[-1]


def test_the_network_itself_may_be_the_layer():
    assert call_order(nn.Linear(2, 2), [""]) == [""]


def test_neither_hooks_nor_the_network_keep_a_symbol():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last, self.count = nn.Linear(2, 2), nn.Linear(2, 2), None, 0

        def forward(self, x):
            self.count += 1
            self.last = self.a(x)
            return self.b(self.last)

    network, seen = Keeping(), []
    network.a.register_forward_hook(lambda *_: seen.append(1))
    network.register_forward_pre_hook(lambda *_: seen.append(1))
    assert call_order(network, ["b", "a"]) == ["a", "b"]
    assert (network.last, network.count, seen) == (None, 0, [])
