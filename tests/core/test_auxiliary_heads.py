"""Auxiliary heads: in training the loss is that of "out" plus `auxiliary_weight` times that of "aux", in every method."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.layers.call_order import end_layers, trace_calls
from dissensus.nets.segmentation_nets import PSPNet
from refusals import refuses
from thinning import often

EXACTLY = {"rtol": 0, "atol": 1e-10}


def two_heads(seed: int = 0, *, always: bool = True, **settings: float) -> nn.Module:
    """(B, 2, H, W) -> {"out": (B, 3, H, W), "aux": the same}, as torchvision's; not `always`: in eval mode "out" alone."""

    def run(net: nn.Module, x: Tensor) -> Tensor | dict[str, Tensor]:
        hidden = net.norm(net.body(x)).tanh()
        out = net.head(net.last(hidden).tanh())
        return {"out": out, "aux": net.aux(hidden)} if always or net.training else out

    torch.manual_seed(seed)
    layers = {"body": nn.Conv2d(2, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "last": nn.Conv2d(4, 4, 1)}
    heads = {name: nn.Conv2d(4, 3, 1) for name in ("head", "aux")}
    return tiny.Network(run, **layers, **heads, **settings).double()


def scenes(n: int = 4, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 5, 6, dtype=torch.float64, generator=made)
    return x, torch.randint(3, (n, 5, 6), generator=made)


def loss_by_hand(network: nn.Module, x: Tensor, y: Tensor, weight: float, **how: int) -> Tensor:
    outputs = network(x)
    return F.cross_entropy(outputs["out"], y, **how) + weight * F.cross_entropy(outputs["aux"], y, **how)


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_loss_and_gradient_are_those_of_both_heads_by_hand(how):
    x, y = scenes()
    y[:, :2] = 255
    networks = [two_heads(seed, auxiliary_weight=0.4) for seed in range(2)]
    posterior = ds.DeepEnsemble(copy.deepcopy(networks), likelihood=ds.Classification(ignore_index=255))
    posterior.particles.how = how
    losses = posterior.backward(x, y)
    assert posterior.particles.how == how
    expected = [loss_by_hand(network, x, y, 0.4, ignore_index=255) for network in networks]
    torch.testing.assert_close(losses, torch.stack(expected).detach(), **EXACTLY)
    sum(expected).backward()
    found = tiny.gradients(posterior)
    for name, parameter in networks[0].named_parameters():
        rows = torch.stack([parameter.grad, networks[1].get_parameter(name).grad])
        torch.testing.assert_close(found[f"particles.own.network.{name}"], rows, **EXACTLY)


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_three_steps_are_those_of_plain_torch_and_validation_is_of_the_outputs_alone(engine):
    batches, held_out = [scenes(seed=seed) for seed in range(3)], scenes(seed=3)
    network = two_heads(auxiliary_weight=0.4)
    posterior = ds.MAP(copy.deepcopy(network))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        loss_by_hand(network, x, y, 0.4).backward()
        optimizer.step()
    mine = torch.optim.SGD(posterior.parameter_groups(lr=0.3), lr=0.3, momentum=0.9)
    history = ds.fit(posterior, batches, epochs=1, optimizer=mine, validation=[held_out], engine=engine, progress=False)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(posterior.member(0).state_dict()[name], tensor, **EXACTLY)
    expected = F.cross_entropy(network.eval()(held_out[0])["out"], held_out[1]).item()
    assert history.epochs[0].validation == pytest.approx(expected, abs=1e-10)
    assert ds.evaluate(posterior, [held_out]).metrics["nll"] == pytest.approx(expected, abs=1e-10)


def test_the_head_is_ignored_without_a_weight_and_in_eval_mode():
    x, y = scenes()
    networks = [two_heads(), two_heads(auxiliary_weight=0.0), two_heads(auxiliary_weight=0.4).eval()]
    for network in networks:
        expected = F.cross_entropy(network(x)["out"], y)
        torch.testing.assert_close(ds.MAP(network).loss(x, y).reshape(()), expected, **EXACTLY)
    plain = tiny.Network(lambda net, x: {"out": net.layer(x)}, layer=nn.Conv2d(2, 3, 1).double(), auxiliary_weight=0.4)
    told = 'expected "out" and "aux" of a network with auxiliary_weight, got others; return a dict of both'
    refuses(lambda: ds.MAP(plain).loss(x, y), told, TypeError)
    pair = tiny.Network(lambda net, x: (net.layer(x), x), layer=nn.Conv2d(2, 3, 1).double(), auxiliary_weight=0.4)
    refuses(lambda: ds.MAP(pair).loss(x, y), told, TypeError)


METHODS = {
    "map": lambda make: ds.MAP(make()),
    "function_rde": lambda make: ds.FunctionRDE([make(seed) for seed in range(2)], data_size=8),
    "forde": lambda make: ds.FoRDE([make(seed) for seed in range(2)], data_size=8),
    "svgd": lambda make: ds.SVGD([make(seed) for seed in range(2)], space="function", data_size=8),
    "feature_rde": lambda make: ds.FeatureRDE(
        [make(seed) for seed in range(2)], data_size=8, layer="last", head="head"
    ),
    "swag": lambda make: ds.SWAG(make(), samples=2),
    "mc_dropout": lambda make: ds.MCDropout(make(), rate=0.2, samples=2),
    "batch_ensemble": lambda make: ds.BatchEnsemble(make(), members=2, modulation=ds.Modulation.normal(1.0, 0.1)),
    "dropout_ensemble": lambda make: ds.DropoutEnsemble(make(), members=2, rate=0.3),
    "node_bnn": lambda make: ds.NodeBNN(make(), data_size=8, components=2, samples=2),
    "mean_field_vi": lambda make: ds.MeanFieldVI(make(), data_size=8, samples=2),
}  # fmt: skip
OFTEN = ["forde", "function_rde", "svgd", "batch_ensemble", "node_bnn"]  # each finds its loss in its own way
SPLIT = OFTEN, [name for name in METHODS if name not in OFTEN]


@pytest.mark.parametrize("method", often(*SPLIT))
@pytest.mark.parametrize("always", [True, False])
def test_every_method_adds_the_head_to_its_loss_and_comes_back(method, always, tmp_path, caplog):
    x, y = scenes()
    losses = []
    for weight in (0.0, 0.4, 0.8):
        torch.manual_seed(0)
        posterior = METHODS[method](partial(two_heads, always=always, auxiliary_weight=weight))
        torch.manual_seed(1)  # the same noise
        losses.append(posterior.backward(x, y))
    assert any(bool(grad.any()) for name, grad in tiny.gradients(posterior).items() if ".aux." in name)
    assert bool((losses[1] > losses[0]).all())
    torch.testing.assert_close(losses[2] - losses[0], 2 * (losses[1] - losses[0]), **EXACTLY)
    ds.fit(posterior, [(x, y)] * 2, epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, two_heads(always=always, auxiliary_weight=0.8).eval())
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    assert "no effect" not in caplog.text


def test_in_svgds_function_space_the_head_counts_as_much_as_the_outputs():
    """Its gradient is that of the loss by hand times (1/M) Σ_j k_ij, between 1/M and 1."""
    x, y = scenes()
    networks = [two_heads(seed, auxiliary_weight=0.4) for seed in range(3)]
    posterior = ds.SVGD(copy.deepcopy(networks), space="function", data_size=8)
    posterior.backward(x, y)
    found = tiny.gradients(posterior)["particles.own.network.aux.weight"]
    for network, row in zip(networks, found, strict=True):
        loss_by_hand(network, x, y, 0.4).backward()
        ratio = row / network.aux.weight.grad
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), **EXACTLY)
        assert 1 / 3 < float(ratio.mean()) < 1


def test_the_head_is_no_output_layer():
    network = two_heads()
    names = ["body", "last", "head", "aux"]
    assert end_layers(names, trace_calls(network, names)) == (["body"], ["head"])
    account = ds.BatchEnsemble(network, members=2, modulation=ds.Modulation.sign()).account.converted
    assert "own bias" in account["head"]
    assert "own bias" not in account["aux"]


@pytest.mark.usefixtures("on_meta")
def test_pspnet_has_the_head_of_the_paper_in_training():
    with_head, without = PSPNet(5), PSPNet(5, auxiliary_weight=0)
    more = sum(p.numel() for p in with_head.parameters()) - sum(p.numel() for p in without.parameters())
    assert more == 9 * 1024 * 256 + 2 * 256 + 257 * 5
    assert with_head.auxiliary_weight == 0.4
    x = torch.randn(2, 3, 24, 32)
    assert {name: each.shape for name, each in with_head(x).items()} == dict.fromkeys(("out", "aux"), (2, 5, 24, 32))
    assert with_head.eval()(x).shape == without(x).shape == (2, 5, 24, 32)


@pytest.mark.slow
def test_pspnet_predicts_the_same_without_the_head_and_trains_with_it():
    with_head, without = PSPNet(5).double(), PSPNet(5, auxiliary_weight=0).double()
    found = without.load_state_dict(with_head.state_dict(), strict=False)
    assert not found.missing_keys
    assert {name.partition(".")[0] for name in found.unexpected_keys} == {"auxiliary"}
    x, y = torch.randn(2, 3, 17, 24, dtype=torch.float64), torch.randint(5, (2, 17, 24))
    assert torch.equal(with_head.eval()(x), without.eval()(x))
    for part in with_head.train().modules():
        part.p = 0.0 if isinstance(part, nn.Dropout2d) else None
    expected = loss_by_hand(with_head, x, y, 0.4).detach()
    torch.testing.assert_close(ds.MAP(with_head).loss(x, y).detach().reshape(()), expected, **EXACTLY)
