"""Latents on nodes: a layer with them, folded into its weights, the published counts, and an axis that is not the batch."""

import copy
import sys

import pytest
import torch
from torch import nn

import dissensus as ds
import dissensus.layers
import tiny
from dissensus.kernels import channel_launch as kernels
from dissensus.layers.conversion import fold_layers
from dissensus.layers.factored import Factors, folded_kernel, scale_channels
from dissensus.layers.nodes import add_node_latents, split_by_layer, use_latents
from dissensus.nets import NTKLinear
from refusals import refuses
from thinning import thinned

LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (5, 4)),
    "linear on tokens": (lambda: nn.Linear(4, 6), (5, 3, 4)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), (5, 4)),
    "ntk linear": (lambda: NTKLinear(4, 6), (5, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (5, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (5, 4, 7, 6)),
    "conv2d, reflecting": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (5, 4, 7, 6)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2), (5, 4, 3, 3, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (5, 4, 7, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (5, 4, 7, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (5, 4, 3, 3)),
    "transposed and grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (5, 4, 3, 3)),
}


def draws(made, rows=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (made.latents,) if rows is None else (rows, made.latents)
    return 1 + 0.5 * torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("kind", "mode"), thinned(list(LAYERS), ["in", "out", "both"], every=2))
def test_latents_folded_into_the_weights_do_what_they_do_on_activations(kind, mode):
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer = make().to(torch.float64)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    made = add_node_latents(nn.Sequential(layer), mode, bias=True)
    x, z = torch.randn(shape, dtype=torch.float64), draws(made)
    nodes = split_by_layer(made.sites, z)
    with use_latents(made.network, nodes):
        on_activations = made.network(x)
    with use_latents(made.network, split_by_layer(made.sites, z.expand(5, -1))):
        per_example = made.network(x)
    weight, bias = folded_kernel(layer, nodes["0"])
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    expected = torch.func.functional_call(layer, state, (x,))
    torch.testing.assert_close(on_activations, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(per_example, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, layer(x), atol=0.01)


def test_each_example_has_latents_of_its_own():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
    made = add_node_latents(nn.Sequential(*layers).double(), "both")
    x, z = torch.randn(5, 2, 4, 4, dtype=torch.float64), draws(made, rows=5)
    with use_latents(made.network, split_by_layer(made.sites, z)):
        together = made.network(x)
    for i in range(5):
        with use_latents(made.network, split_by_layer(made.sites, z[i])):
            torch.testing.assert_close(made.network(x[i : i + 1]), together[i : i + 1], rtol=0, atol=1e-12)


def test_iBNNs_bias_latent_is_one_number_for_each_layer_with_a_bias():
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
    made = add_node_latents(network, "in", bias=True)
    assert [(site.layer, site.part, site.width) for site in made.sites] == [
        ("0", "before", 4), ("0", "bias", 1), ("1", "before", 6),
    ]  # fmt: skip
    assert (made.latents, made.widths) == (11, (5, 6))
    x, z = torch.randn(2, 4), torch.rand(made.latents) + 0.5
    layer = made.network[0]
    with use_latents(made.network, split_by_layer(made.sites, z)):
        torch.testing.assert_close(layer(x), (x * z[:4]) @ layer.weight.T + z[4] * layer.bias)


def test_layers_are_chosen_by_pattern_and_the_account_says_which():
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))
    made = add_node_latents(network, "in", layers=["2"])
    assert made.account.converted == {"2": "latents: 12 on input nodes"}
    assert made.account.left == {"0": "not selected by layers="}
    assert made.latents == 12
    assert type(network[2]) is nn.Linear  # the caller's network is left alone


def test_a_layer_whose_first_axis_is_not_the_batch_is_an_error_that_names_it():
    turned = tiny.Network(lambda self, x: self.mixer(x.transpose(0, 1)), mixer=nn.Linear(4, 4))
    made = add_node_latents(turned, "in")
    with (
        use_latents(made.network, split_by_layer(made.sites, torch.ones(5, 4))),
        pytest.raises(ValueError, match=r"expected the 5 examples .* layer 'mixer', got a tensor of shape \(3, 5, 4\)"),
    ):
        made.network(torch.randn(5, 3, 4))
    assert made.network.mixer.nodes is None


def test_folding_a_tied_layer_leaves_the_other_alone():
    layers = {"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)}
    layers["head"].weight = layers["embed"].weight
    made = add_node_latents(tiny.Network(lambda self, x: self.head(self.embed(x)), **layers), "out")
    x, z = torch.arange(7), 0.5 + torch.rand(7)
    with use_latents(made.network, split_by_layer(made.sites, z)):
        expected = made.network(x)
    plain = copy.deepcopy(made.network)
    plain.head.nodes = Factors(behind=z)
    torch.testing.assert_close(fold_layers(plain)(x), expected)


def test_an_unknown_mode_is_a_clear_error():
    refuses(lambda: add_node_latents(nn.Linear(2, 2), "input"), "expected mode of in, out, both, got 'input'")


@pytest.mark.parametrize("alone", [True, False])
def test_the_short_backward_pass_is_the_gradient(alone):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    s = torch.randn(2, 2, 1, 1, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, s: scale_channels(x, s, alone=alone).sin() * 2, (x, s))
    torch.autograd.gradgradcheck(lambda x, s: scale_channels(x, s, alone=alone).sin() * 2, (x, s))


def test_a_gradient_that_others_hold_is_not_written_over():
    """A residual sum hands one gradient tensor to both of its branches."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    s = torch.full((3, 4), 2.0, dtype=torch.float64)
    (scale_channels(x, s, alone=False) + x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))


def test_where_kernels_cannot_be_built_the_log_says_so_and_torch_computes(caplog, monkeypatch):
    caplog.set_level("INFO", "dissensus")
    kernels.find_triton.cache_clear()
    monkeypatch.setitem(sys.modules, "dissensus.kernels.triton_channels", None)  # as where there is no triton
    monkeypatch.delattr(dissensus.layers, "channel_programs", raising=False)
    try:
        assert kernels.find_triton() is None
        assert kernels.find_triton() is None
    finally:
        kernels.find_triton.cache_clear()
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "latents and frozen batch norm run without the library's fast kernels"
    ]
    assert kernels.channel_layout(torch.ones(200, 3, 4)) is None  # no GPU's tensor


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


def tied():
    """Two layers with one weight, one of them under two names, beside an embedding and a norm layer."""
    layers = {"words": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    layers["second"].weight = layers["first"].weight
    layers |= {"again": layers["first"], "grouped": nn.Conv1d(4, 6, 1, groups=2)}
    return tiny.Network(lambda net, x: net.grouped(net.second(net.again(net.norm(x)))[..., None])[..., 0], **layers)


NETS = {
    "LeNet": ds.nets.LeNet, "MLP": lambda: ds.nets.MLP(5, 3), "ResNet": lambda: ds.nets.ResNet(20),
    "ENet": lambda: ds.nets.ENet(3), "AlexNet": lambda: ds.nets.AlexNet(3, hidden=4), "Tied": tied,
    "a layer": lambda: nn.Linear(3, 2),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), thinned(list(NETS), ["in", "out", "both"], every=3))
def test_nodes_are_the_latents_of_node_bnn(name, mode):
    network = NETS[name]()
    found = ds.capacity(network, mode=mode)
    posterior = ds.NodeBNN(network, data_size=1, components=1, mode=mode)
    assert found.nodes == posterior.latents
    assert found.layers.keys() == posterior.account.converted.keys()
    assert found.left == posterior.account.left


def test_a_tied_weight_counts_once_and_what_has_no_nodes_is_named():
    found = ds.capacity(tied())
    assert found.layers == {"first": (16, 4), "second": (0, 4), "grouped": (12, 4)}
    assert (found.weights, found.nodes, found.parameters) == (28, 12, 28 + 28 + 8 + 4 + 4 + 6)
    assert found.left == {"words": "an embedding: a lookup, no product"}
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "weights", "nodes"]
    assert lines[4].split() == ["all", "28", "12"]
    assert "left out: an embedding" in lines[5]


def test_what_cannot_be_counted_is_refused():
    refuses(lambda: ds.capacity(nn.Sequential(nn.LazyLinear(3))), "uninitialized parameter")
    refuses(lambda: ds.capacity(nn.ReLU()), "expected a network with a linear or convolutional layer, got ReLU")
    refuses(lambda: ds.capacity(nn.Linear(2, 2), mode="inside"), "expected mode of in, out, both, got 'inside'")
