"""The order of calls is found without an input, and without leaving a trace in the network."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus.layers.call_order import call_order, trace_calls


def in_order(network, names):
    return call_order(names, trace_calls(network, names))


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
    assert in_order(network, weighted(network)) == ["a", "b", "c"]
    assert all("forward" not in vars(part) for part in network.modules())
    network(torch.randn(3, 2))


def test_a_forward_that_asks_for_sizes_leaves_the_order_of_registration():
    network = Asking()
    assert in_order(network, weighted(network)) == ["c", "b", "a"]
    assert all("forward" not in vars(part) for part in network.modules())


@pytest.mark.parametrize("make", [lambda: ds.nets.ResNet(20), lambda: ds.nets.WideResNet(10, 1), ds.nets.VGG16])
def test_networks_of_the_library_are_run_on_symbols(make):
    network = make()
    names = weighted(network)
    met = in_order(network, list(reversed(names)))
    assert met[0] == names[0]
    assert met[-1] == names[-1]


def test_the_network_itself_may_be_the_layer():
    assert in_order(nn.Linear(2, 2), [""]) == [""]


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
    assert in_order(network, ["b", "a"]) == ["a", "b"]
    assert (network.last, network.count, seen) == (None, 0, [])


def without_gradients(network, hidden):
    with torch.no_grad():
        doubled = 2 * network.middle.weight
    return F.linear(hidden, doubled)


READS = {
    "called with a symbol": lambda network, hidden: F.linear(hidden, network.middle.weight),
    "multiplied by a symbol": lambda network, hidden: network.middle.weight @ hidden,
    "transposed": lambda network, hidden: hidden @ network.middle.weight.T,
    "detached": lambda network, hidden: F.linear(hidden, network.middle.weight.detach()),
    "data": lambda network, hidden: hidden + network.middle.bias.data,
    "without gradients": without_gradients,
    "a number": lambda network, hidden: hidden * network.middle.weight.detach().norm().item(),
    "a condition": lambda network, hidden: 2 * hidden if network.middle.bias.sum() > 100 else hidden,
    "by name": lambda network, hidden: hidden * dict(network.named_parameters())["middle.weight"].norm(),
}
NO_READS = {
    "none": lambda network, hidden: hidden,
    "dtype": lambda network, hidden: hidden.to(network.middle.weight.dtype),
    "size": lambda network, hidden: hidden * network.middle.weight.shape[0],
    "zeros": lambda network, hidden: (
        hidden + network.middle.weight.new_zeros(4) + torch.zeros_like(network.middle.bias)
    ),
}


class Reading(nn.Module):
    """A network that does something beside calling its layers."""

    def __init__(self, past):
        super().__init__()
        self.first, self.middle, self.head, self.past = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), past

    def forward(self, x):
        return self.head(self.past(self, torch.tanh(self.middle(torch.tanh(self.first(x))))))


@pytest.mark.parametrize("past", [*READS, *NO_READS])
def test_a_weight_is_read_where_something_is_computed_with_it_past_its_layer(past):
    followed = trace_calls(Reading({**READS, **NO_READS}[past]), ["first", "middle", "head"])
    assert followed.calls == ["first", "middle", "head"]
    assert followed.read_directly == ({"middle"} if past in READS else set())


@pytest.mark.parametrize("past", ["detached", "without gradients", "a number", "data"])
def test_members_compute_what_the_ensemble_does_where_a_weight_is_read_without_a_gradient(past):
    torch.manual_seed(0)
    network = Reading(READS[past]).double()
    posterior = ds.BatchEnsemble(network, members=3, modulation=ds.Modulation.normal(1, 0.5)).eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    for m, outputs in enumerate(posterior(x)):
        torch.testing.assert_close(posterior.member(m)(x), outputs, rtol=0, atol=1e-12)
