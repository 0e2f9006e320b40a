"""The networks: shapes, parameter counts known from the literature, rebuilt from their config, and with every posterior."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus.bench.run.build import required_keywords
from dissensus.core import batch as batches
from dissensus.nets import NETS
from dissensus.nets.resnet import features
from dissensus.nets.segmentation_nets import unpool
from refusals import refuses
from thinning import often

BUILT = {
    "MLP": (lambda: ds.nets.MLP(12, 5, hidden=(7, 6), activation="gelu", batch_norm=True, dropout=0.2), (3, 3, 4)),
    "ConvNet": (lambda: ds.nets.ConvNet(1, 5, size=12, width=4, hidden=8, dropout=0.1), (3, 1, 12, 12)),
    "AlexNet": (lambda: ds.nets.AlexNet(5, channels=1, hidden=6, dropout=0.1), (2, 1, 63, 64)),
    "LeNet": (lambda: ds.nets.LeNet(5, channels=2, size=17), (3, 2, 17, 17)),
    "ENet": (lambda: ds.nets.ENet(5, channels=1, dropout=0.2), (2, 1, 13, 18)),
    "PSPNet": (lambda: ds.nets.PSPNet(5, dropout=0.2), (2, 3, 17, 24)),
    "ResNet": (lambda: ds.nets.ResNet(20, 5), (2, 3, 16, 16)),
    "ResNet50": (lambda: ds.nets.ResNet50(5), (2, 3, 40, 32)),
    "VGG16": (lambda: ds.nets.VGG16(5, channels=1, dropout=0.1), (2, 1, 32, 32)),
    "WideResNet": (lambda: ds.nets.WideResNet(10, 2, 5, channels=1, dropout=0.1), (2, 1, 16, 16)),
}
SEGMENTING = ("ENet", "PSPNet")
LARGE = ("PSPNet", "ResNet50", "VGG16", "ENet")


def test_every_network_is_tried():
    assert BUILT.keys() == NETS.keys()


@pytest.mark.parametrize("name", often([name for name in NETS if name not in LARGE], LARGE))
def test_a_network_rebuilds_from_its_config(name):
    make, shape = BUILT[name]
    network = make()
    outputs = batches.call_network(network, torch.randn(shape))
    assert outputs.shape == (shape[0], 5, *(shape[2:] if name in SEGMENTING else ()))
    other = NETS[name](**json.loads(json.dumps(network.config)))
    other.load_state_dict(network.state_dict())
    x = torch.randn(shape)
    assert torch.equal(other.eval()(x), network.eval()(x))


@pytest.mark.parametrize("name", often([name for name in NETS if name not in LARGE], LARGE))
def test_a_saved_posterior_of_it_needs_no_network_to_load(name, tmp_path):
    make, shape = BUILT[name]
    posterior = ds.MAP(make())
    ds.save(posterior, tmp_path)
    x = torch.randn(shape)
    assert torch.equal(ds.load(tmp_path).predict(x).mean, posterior.predict(x).mean)


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.usefixtures("on_meta")
def test_parameter_counts_are_those_of_the_papers():
    # Table 6 of He et al. 2016: 0.27, 0.46, 0.66, 0.85, 1.7 million; the CIFAR ResNet-18 in general use: 11,173,962.
    assert parameters(ds.nets.ResNet(20)) == 269_722
    millions = [round(parameters(ds.nets.ResNet(depth)) / 1e6, 2) for depth in (20, 32, 44, 56)]
    assert millions == [0.27, 0.46, 0.66, 0.85]
    assert parameters(ds.nets.ResNet(18)) == 11_173_962
    assert parameters(ds.nets.ResNet50()) == 25_557_032  # torchvision's
    assert round(parameters(ds.nets.ENet(11)) / 1e6, 2) == 0.36  # the paper: 0.36 or 0.37 million


def test_a_residual_network_without_skips_is_its_layers_one_after_the_other():
    plain, skipping = (ds.nets.ResNet(20, 5, skip=skip).eval() for skip in (False, True))
    plain.load_state_dict(skipping.state_dict())  # shortcuts of the thin family have no parameters
    x = torch.randn(2, 3, 8, 8)
    block = plain.layer2[0]
    z = torch.randn(2, 16, 8, 8)
    branch = nn.Sequential(block.conv1, block.bn1, nn.ReLU(), block.conv2, block.bn2, nn.ReLU())
    torch.testing.assert_close(block(z), branch(z), rtol=0, atol=0)
    assert not torch.allclose(plain(x), skipping(x))
    assert ds.nets.ResNet(**plain.config).layer2[0].shortcut is None
    # ResNet-18 has three 1×1 shortcuts with norm layers
    removed = sum(a * b + 2 * b for a, b in ((64, 128), (128, 256), (256, 512)))
    assert parameters(ds.nets.ResNet(18, skip=False)) == 11_173_962 - removed
    assert parameters(ds.nets.MLP(784, 10, hidden=(200, 200, 200))) == 785 * 200 + 2 * 201 * 200 + 201 * 10


def layer_inputs(network: nn.Module) -> list[int]:
    """Input channels or features of every layer with weights, norm layers apart."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    return [layer.in_channels if isinstance(layer, nn.Conv2d) else layer.in_features for layer in layers]


@pytest.mark.usefixtures("on_meta")
def test_vgg16_is_that_of_the_papers():
    """Trinh et al. 2022: 5,251 node latents at the inputs of 13 convolutions and 3 linear layers of 512."""
    plain, normed = (ds.nets.VGG16(batch_norm=batch_norm) for batch_norm in (False, True))
    for network in (plain, normed):
        inputs = layer_inputs(network)
        assert len(inputs) == 16
        assert inputs[-3:] == [512, 512, 512]
        assert sum(inputs) == 5_251
    convolutions = 9 * (3 * 64 + 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 2 * 256 * 256 + 256 * 512 + 5 * 512 * 512)
    assert parameters(plain) == convolutions + 4_224 + 2 * 513 * 512 + 513 * 10 == 15_245_130
    assert parameters(normed) == 15_245_130 + 2 * 4_224  # a scale and a shift for each of 4,224 channels
    with torch.no_grad():
        assert normed.eval()(torch.randn(2, 3, 64, 64)).shape == (2, 10)  # larger images are averaged


def test_a_large_head_of_vgg16_takes_small_images_too():
    network = ds.nets.VGG16(5, head="large", hidden=6, batch_norm=False).eval()
    assert network.head[0].in_features == 512 * 49
    with torch.no_grad():
        last = network.features(x := torch.randn(2, 3, 32, 32))  # (2, 512, 1, 1), seen 49 times
        torch.testing.assert_close(network(x), network.head(last.expand(-1, -1, 7, 7).flatten(1)))
    names = {name for name, _ in ds.nets.AlexNet(2, hidden=2).named_parameters()}
    assert {f"classifier.{i}.weight" for i in (1, 4, 6)} <= names  # torchvision's


@pytest.mark.usefixtures("on_meta")
def test_wide_resnet_is_that_of_the_papers():
    """Zagoruyko & Komodakis 2016: 36.5, 17.2, 11.0 and 8.9 million (28-10, 22-8, 16-8, 40-4); 9,475 layer inputs."""
    network = ds.nets.WideResNet(28, 10)
    assert parameters(network) == 36_479_194
    assert sum(layer_inputs(network)) == 9_475
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.in_channels for layer in convolutions if layer.kernel_size == (1, 1)] == [16, 160, 320]
    assert sum(layer.kernel_size == (3, 3) for layer in convolutions) == 28 - 3
    millions = [round(parameters(ds.nets.WideResNet(*size)) / 1e6, 1) for size in ((22, 8), (16, 8), (40, 4))]
    assert millions == [17.2, 11.0, 8.9]


def test_a_wide_block_is_a_sum():
    """With its last convolution at zero a block is its shortcut: x itself, or a 1×1 convolution of the activated x."""
    network = ds.nets.WideResNet(16, 1, 5).eval()
    x = torch.randn(2, 16, 8, 8)
    same, halving = network.blocks[0], network.blocks[2]
    for block in (same, halving):
        nn.init.zeros_(block.conv2.weight)
    assert torch.equal(same(x), x)
    expected = nn.functional.conv2d(halving.bn1(x).relu(), halving.shortcut.weight, stride=2)
    torch.testing.assert_close(halving(x), expected)
    refuses(lambda: ds.nets.WideResNet(20), r"expected a depth of 6n \+ 4 .* got 20")
    refuses(lambda: ds.nets.WideResNet(16, 0), "expected width of at least 1, got 0")


def test_one_width_is_one_hidden_layer():
    assert ds.nets.MLP(4, 3, hidden=8).config == ds.nets.MLP(4, 3, hidden=(8,)).config
    assert ds.nets.MLP(**ds.nets.MLP(4, 3, hidden=8).config).layers[0].out_features == 8
    refuses(lambda: ds.nets.MLP(4, 3, hidden=8.0), r"expected hidden as a whole number, got 8\.0", TypeError)
    refuses(lambda: ds.nets.MLP(4, 3, hidden=(8, 0)), "expected hidden of at least 1, got 0")


def test_an_mlp_with_skips_adds_what_came_in():
    plain, skipping = (ds.nets.MLP(4, 3, hidden=(5, 6, 6, 6), init="he", skip=skip) for skip in (False, True))
    assert not skipping.layers[4].branch[0].bias.any()  # drawn as the others are
    for to, source in zip(skipping.parameters(), plain.parameters(), strict=True):
        to.data.copy_(source.data)
    x = torch.randn(7, 4)
    h = plain.layers[3](plain.layers[2](plain.layers[1](plain.layers[0](x))))  # to 6, where nothing can be added
    for i in (4, 6):
        h = h + plain.layers[i](h).relu()
    torch.testing.assert_close(skipping(x), plain.layers[8](h))
    assert ds.nets.MLP(**skipping.config).config == skipping.config


def test_an_mlp_in_ntk_form_is_the_standard_one_with_the_factor_outside():
    torch.manual_seed(0)
    network = ds.nets.MLP(6, 3, hidden=(50, 40), parameterization="ntk").double()
    standard = ds.nets.MLP(6, 3, hidden=(50, 40)).double()
    for ours, theirs in zip(network.layers, standard.layers, strict=True):
        if isinstance(theirs, nn.Linear):
            assert isinstance(ours, ds.nets.NTKLinear)
            with torch.no_grad():
                theirs.weight.copy_(ours.weight / theirs.in_features**0.5)
                theirs.bias.copy_(ours.bias)
    x, exactly = torch.randn(9, 6, dtype=torch.float64), {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(network(x), standard(x), **exactly)
    network(x).sum().backward()
    standard(x).sum().backward()
    for ours, theirs in zip(network.layers, standard.layers, strict=True):
        if isinstance(theirs, nn.Linear):
            torch.testing.assert_close(ours.weight.grad, theirs.weight.grad / theirs.in_features**0.5, **exactly)
            torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, **exactly)
    rebuilt = ds.nets.MLP(**json.loads(json.dumps(network.config)))
    assert [type(layer) for layer in rebuilt.layers] == [type(layer) for layer in network.layers]


def test_weights_in_ntk_form_have_the_variances_asked_for():
    torch.manual_seed(0)
    for keywords, weight, bias in (({}, 2.0, 0.0), ({"weight_variance": 1.5, "bias_variance": 0.3}, 1.5, 0.3)):
        network = ds.nets.MLP(300, 200, hidden=(400,), parameterization="ntk", **keywords)
        for layer in (layer for layer in network.layers if isinstance(layer, ds.nets.NTKLinear)):
            for tensor, variance in ((layer.weight, weight), (layer.bias, bias)):
                found = float(tensor.detach().square().mean())
                assert found == pytest.approx(variance, rel=4 * (2 / tensor.numel()) ** 0.5)


def test_an_ensemble_in_ntk_form_trains_predicts_and_is_saved(tmp_path):
    posterior = ds.DeepEnsemble([ds.nets.MLP(4, 3, hidden=(8,), parameterization="ntk") for _ in range(3)])
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)
    history = ds.fit(posterior, [(x, y)], epochs=3, optimizer=optimizer, progress=False)
    assert history.epochs[-1].loss < history.epochs[0].loss
    ds.save(posterior, tmp_path)
    assert torch.equal(ds.load(tmp_path).predict(x).member_means, posterior.predict(x).member_means)


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
    refuses(lambda: ds.nets.MLP(4, 2, activation="rely"), "expected activation of relu, tanh, gelu, silu, got 'rely'")
    refuses(lambda: ds.nets.MLP(4, 2, hidden=(3, 3), dropout=(0.1,)), "expected one dropout rate or 2, got 1")
    refuses(lambda: ds.nets.MLP(4, 2, init="xavier"), r"expected init of torch, he.* got 'xavier'")
    refuses(lambda: ds.nets.MLP(4, 2, parameterization="mup"), r"expected parameterization of standard, ntk, got 'mup'")
    one = r"expected inputs that the network can take, got \(4,\).*single example as x\[None\]"
    refuses(lambda: ds.MAP(ds.nets.MLP(4, 2)).predict(torch.zeros(4)), one)
    ntk = partial(ds.nets.MLP, 4, 2, parameterization="ntk")
    refuses(lambda: ntk(init="he"), r"expected no init with parameterization=\"ntk\", got 'he'")
    refuses(lambda: ntk(weight_variance=0.0), r"expected weight_variance above 0, got 0.0")
    elsewhere = r"expected variances with parameterization=\"ntk\" only, got some"
    refuses(lambda: ds.nets.MLP(4, 2, weight_variance=2.0), elsewhere)
    refuses(lambda: ds.nets.ResNet(19), r"expected depth of .*18, 20.* got 19")


def test_a_zero_head_makes_all_classes_equally_probable():
    network = ds.nets.ResNet(8, 5, zero_head=True)
    assert network(torch.randn(2, 3, 16, 16)).abs().max() == 0
    assert ds.nets.ResNet(**network.config).config["zero_head"]
    assert "zero_head" not in ds.nets.ResNet(8, 5).config  # files of networks without one stay as they were


# -------------------------------------------------- every posterior trains a step, predicts and comes back bit for bit
# name -> (one network, inputs): as small as these networks take them
SMALL_NETS = {
    "LeNet": (lambda: ds.nets.LeNet(3, size=16), (1, 16, 16)),
    "AlexNet": (lambda: ds.nets.AlexNet(3, channels=1, hidden=4), (1, 63, 63)),
    "VGG16": (lambda: ds.nets.VGG16(3, head="large", hidden=4, dropout=0.1, batch_norm=False), (3, 32, 32)),
    "ENet": (lambda: ds.nets.ENet(3, dropout=0.2), (3, 16, 24)),
}
PIXELS = [
    "deep_ensemble", "mc_dropout", "gaussian_perturbation", "swag", "tradi", "batch_ensemble", "node_bnn", "forde",
]  # fmt: skip
ENDS = {"LeNet": "head", "AlexNet": "classifier", "VGG16": "head"}  # the last linear layers, one Sequential
KEYWORDS = {
    "mc_dropout": {"rate": 0.1, "samples": 2},
    "lit": {"strength": 0.1},
    "batch_ensemble": {"members": 2, "modulation": ds.Modulation.normal(1.0, 0.1)},
    "dropout_ensemble": {"members": 2},
    "tradi": {"samples": 2},
    "swag": {"samples": 2, "rank": 2, "start": 0, "every": 1},
    "swa": {"start": 0, "every": 1},
    "snapshot_ensemble": {"members": 2},
    "gaussian_perturbation": {"samples": 2},
    "laplace": {"samples": 2},
    "node_bnn": {"components": 2, "samples": 2, "train_samples": 2},
    "rank_one_bnn": {"components": 2, "samples": 2, "train_samples": 2},
    "mean_field_vi": {"samples": 2},
    "sghmc": {"members": 2},
    "hmc": {"samples": 2, "warmup": 1, "leapfrog": 1, "weight_prior_std": 1.0},
}
QUICK = ("map", "deep_ensemble", "forde", "batch_ensemble", "swag", "laplace", "rank_one_bnn")
OFTEN = {*(("LeNet", method) for method in QUICK), ("AlexNet", "node_bnn")}


def pairs():
    for network in SMALL_NETS:
        for method in PIXELS if network == "ENet" else ds.METHODS:
            quick = (network, method) in OFTEN
            yield pytest.param(network, method, marks=() if quick else pytest.mark.slow, id=f"{network}-{method}")


@pytest.mark.parametrize(("network", "method"), [*pairs()])
def test_it_trains_predicts_and_comes_back(network, method, tmp_path):
    torch.manual_seed(0)
    (make, shape), kind = SMALL_NETS[network], ds.METHODS[method]
    keywords = dict(KEYWORDS.get(method, {}))
    if method == "mc_dropout" and network != "LeNet":
        del keywords["rate"]  # they have dropout of their own
    several = kind.networks_taken == "several"
    if "data_size" in (needed := required_keywords(kind)):
        keywords["data_size"] = 4
    if "layer" in needed:
        last = list(dict(make().get_submodule(ENDS[network]).named_children()))
        keywords |= {"layer": f"{ENDS[network]}.{last[-2]}", "head": f"{ENDS[network]}.{last[-1]}"}
    posterior = kind([make(), make()] if several else make(), **keywords)
    x, y = torch.randn(4, *shape), torch.tensor([0, 1, 2, 0])
    if network == "ENet":  # a class for every pixel
        y = y[:, None, None].expand(4, *shape[1:])
    if hasattr(posterior, "fit_posthoc"):
        posterior.fit_posthoc([(x, y)])
    else:
        ds.fit(posterior, [(x, y), (x.flip(0), y.flip(0))], epochs=1, progress=False)
    predictive = posterior.predict(x)
    assert predictive.member_means.shape[1:3] == (4, 3)
    assert predictive.member_means.isfinite().all()
    ds.save(posterior, tmp_path / "posterior")
    assert torch.equal(ds.load(tmp_path / "posterior").predict(x).member_means, predictive.member_means)


# ---------------------------------------------------------------------------------------------------------------- ENet
@pytest.mark.parametrize("size", [(180, 240), (23, 45), (16, 8), (9, 10)])
def test_outputs_have_the_size_of_the_image(size):
    assert ds.nets.ENet(3).eval()(torch.randn(1, 3, *size)).shape == (1, 3, *size)


@pytest.mark.parametrize("size", [(6, 8), (7, 8), (5, 7)])
def test_values_are_put_back_as_torch_does(size):
    x = torch.randn(2, 3, *size)
    pooled, places = F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)
    assert torch.equal(unpool(pooled, places, x.shape[2:]), F.max_unpool2d(pooled, places, 2, output_size=size))


def test_members_side_by_side_are_those_of_the_loop():
    ensemble = ds.DeepEnsemble([ds.nets.ENet(3).double() for _ in range(2)]).eval()
    x = torch.randn(1, 3, 13, 18, dtype=torch.float64)
    ensemble.particles.how = "vectorised"
    side_by_side = ensemble(x)
    assert ensemble.particles.how == "vectorised"  # nothing had to be run in a loop instead
    ensemble.particles.how = "loop"
    torch.testing.assert_close(ensemble(x), side_by_side, rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------------------------ ResNet-50 and PSPNet
@pytest.mark.usefixtures("on_meta")
def test_features_are_an_eighth_of_the_image_and_the_dilated_trunk_has_the_plain_ones_weights():
    segmenting, plain = ds.nets.PSPNet(5), ds.nets.ResNet50(5)
    found = segmenting.load_state_dict(plain.state_dict(), strict=False)
    assert set(found.unexpected_keys) == {"fc.weight", "fc.bias"}
    assert not any(name.startswith(("conv1", "bn1", "layer")) for name in found.missing_keys)
    x = torch.randn(1, 3, 64, 96)
    assert features(segmenting.eval(), x).shape == (1, 2048, 8, 12)
    assert features(plain.eval(), x).shape == (1, 2048, 2, 3)


def test_it_computes_what_torchvisions_does():
    models = pytest.importorskip("torchvision.models")
    theirs, mine = models.resnet50().eval(), ds.nets.ResNet50().eval()
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(mine(x), theirs(x))
