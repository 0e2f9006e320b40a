"""The networks: shapes, parameter counts known from the literature, and that they rebuild from their config."""

import json

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.nets import NETS

BUILT = {
    "MLP": (lambda: ds.nets.MLP(12, 5, hidden=(7, 6), activation="gelu", batch_norm=True, dropout=0.2), (3, 3, 4)),
    "ConvNet": (lambda: ds.nets.ConvNet(1, 5, size=12, width=4, hidden=8, dropout=0.1), (3, 1, 12, 12)),
    "ResNet": (lambda: ds.nets.ResNet(20, 5), (2, 3, 16, 16)),
}


def test_every_network_is_tried():
    assert BUILT.keys() == NETS.keys()


@pytest.mark.parametrize("name", NETS)
def test_a_network_rebuilds_from_its_config(name):
    make, shape = BUILT[name]
    network = make()
    assert network(torch.randn(shape)).shape == (shape[0], 5)
    other = NETS[name](**json.loads(json.dumps(network.config)))
    other.load_state_dict(network.state_dict())
    x = torch.randn(shape)
    assert torch.equal(other.eval()(x), network.eval()(x))


@pytest.mark.parametrize("name", NETS)
def test_a_saved_posterior_of_it_needs_no_network_to_load(name, tmp_path):
    make, shape = BUILT[name]
    posterior = ds.MAP(make())
    ds.save(posterior, tmp_path)
    x = torch.randn(shape)
    assert torch.equal(ds.load(tmp_path).predict(x).mean, posterior.predict(x).mean)


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_parameter_counts_are_those_of_the_papers():
    # Table 6 of He et al. 2016: 0.27, 0.46, 0.66, 0.85, 1.7 million; the CIFAR ResNet-18 in general use: 11,173,962.
    assert parameters(ds.nets.ResNet(20)) == 269_722
    millions = [round(parameters(ds.nets.ResNet(depth)) / 1e6, 2) for depth in (20, 32, 44, 56)]
    assert millions == [0.27, 0.46, 0.66, 0.85]
    assert parameters(ds.nets.ResNet(18)) == 11_173_962
    assert parameters(ds.nets.MLP(784, 10, hidden=(200, 200, 200))) == 785 * 200 + 2 * 201 * 200 + 201 * 10


def test_layers_come_in_the_order_the_docstring_says():
    network = ds.nets.MLP(4, 2, hidden=(3,), activation="tanh", batch_norm=True, dropout=0.5)
    assert [type(m) for m in network.layers] == [nn.Linear, nn.BatchNorm1d, nn.Tanh, nn.Dropout, nn.Linear]
    assert [type(m) for m in ds.nets.MLP(4, 2, hidden=()).layers] == [nn.Linear]


def test_dropout_may_differ_from_layer_to_layer_and_weights_may_start_as_he_has_them():
    torch.manual_seed(0)
    network = ds.nets.MLP(300, 10, hidden=(200, 100), dropout=(0.0, 0.1), init="he")
    assert [type(m) for m in network.layers] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
    for layer in (m for m in network.layers if isinstance(m, nn.Linear)):
        # A sample variance of n normals has a relative deviation of √(2/n).
        expected, n = 2 / layer.in_features, layer.weight.numel()
        assert float(layer.weight.detach().square().mean()) == pytest.approx(expected, rel=4 * (2 / n) ** 0.5)
        assert not layer.bias.any()
    assert ds.nets.MLP(**network.config).config == network.config


def test_the_parameter_free_shortcut_halves_and_pads():
    from dissensus.nets.resnet import PaddedShortcut

    x = torch.randn(2, 4, 6, 6)
    out = PaddedShortcut(8)(x)
    assert out.shape == (2, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert float(out[:, :2].abs().max()) == float(out[:, 6:].abs().max()) == 0


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="expected an activation of relu, tanh, gelu, silu, got 'rely'"):
        ds.nets.MLP(4, 2, activation="rely")
    with pytest.raises(ValueError, match="expected one dropout rate or 2, got 1"):
        ds.nets.MLP(4, 2, hidden=(3, 3), dropout=(0.1,))
    with pytest.raises(ValueError, match=r"expected init of torch, he.* got 'xavier'"):
        ds.nets.MLP(4, 2, init="xavier")
    with pytest.raises(ValueError, match=r"expected a depth of .*18, 20.* got 19"):
        ds.nets.ResNet(19)
