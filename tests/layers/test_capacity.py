"""Weights and nodes: the published counts, and that they are NodeBNN's own."""

import pytest
import torch
from torch import nn

import dissensus as ds
from thinning import thinned


def test_the_talks_lenet_is_its_dense_weights_and_its_channels():
    network = ds.nets.LeNet()
    assert ds.capacity(network, layers=["head.*"]).weights == 41_640
    convolutions = ds.capacity(network, layers=["features.*"])
    assert convolutions.nodes + network.features[3].out_channels == 23
    assert ds.capacity(ds.nets.LeNet(size=32)).parameters == 61_706  # the paper's size, all maps connected


def test_a_large_network_is_counted_without_its_values():
    with torch.device("meta"):
        network = ds.nets.VGG16(1000, head="large", batch_norm=False)
    assert ds.capacity(network).nodes == 36_995
    assert all(parameter.is_meta for parameter in network.parameters())


class Tied(nn.Module):
    """Two layers with one weight, one of them under two names, beside an embedding and a norm layer."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight, self.again = self.first.weight, self.first
        self.grouped = nn.Conv1d(4, 6, 1, groups=2)

    def forward(self, x):
        return self.grouped(self.second(self.again(self.norm(x)))[..., None])[..., 0]


NETS = {
    "LeNet": ds.nets.LeNet,
    "MLP": lambda: ds.nets.MLP(5, 3),
    "ResNet": lambda: ds.nets.ResNet(20),
    "ENet": lambda: ds.nets.ENet(3),
    "AlexNet": lambda: ds.nets.AlexNet(3, hidden=4),
    "Tied": Tied,
    "a layer": lambda: nn.Linear(3, 2),
}


@pytest.mark.parametrize(("name", "mode"), thinned(list(NETS), ["in", "out", "both"], every=3))
def test_nodes_are_the_latents_of_node_bnn(name, mode):
    network = NETS[name]()
    found = ds.capacity(network, mode=mode)
    posterior = ds.NodeBNN(network, data_size=1, components=1, mode=mode)
    assert found.nodes == posterior.latents
    assert found.layers.keys() == posterior.account.converted.keys()
    assert found.left == posterior.account.left


def test_a_tied_weight_counts_once_and_what_has_no_nodes_is_named():
    found = ds.capacity(Tied())
    assert found.layers == {"first": (16, 4), "second": (0, 4), "grouped": (12, 4)}
    assert (found.weights, found.nodes, found.parameters) == (28, 12, 28 + 28 + 8 + 4 + 4 + 6)
    assert found.left == {"words": "an embedding: a lookup, no product"}
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "weights", "nodes"]
    assert lines[4].split() == ["all", "28", "12"]
    assert "left out: an embedding" in lines[5]


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="uninitialized parameter"):
        ds.capacity(nn.Sequential(nn.LazyLinear(3)))  # would count 0 nodes
    with pytest.raises(ValueError, match="expected a network with a linear or convolutional layer, got ReLU"):
        ds.capacity(nn.ReLU())
    with pytest.raises(ValueError, match="expected mode of in, out, both, got 'inside'"):
        ds.capacity(nn.Linear(2, 2), mode="inside")
