"""MAP and deep ensembles: ridge regression, and members that train exactly as each would alone."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import dissensus as ds
import tiny
from refusals import refuses
from thinning import thinned


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_prior_is_sgd_with_weight_decay(momentum):
    """wd = 1/(N σ²) on weights and biases, none on norm layers."""
    size, std = 12, 0.4
    first, second = tiny.mlp().double(), tiny.mlp().double()
    second.load_state_dict(first.state_dict())
    prior = ds.MAP(first, weight_prior_std=std, data_size=size)
    decayed = ds.MAP(second)
    norms = {id(p) for p in second[1].parameters()}
    others = [p for p in second.parameters() if id(p) not in norms]
    groups = [
        {"params": others, "weight_decay": 1 / (size * std**2)},
        {"params": list(second[1].parameters()), "weight_decay": 0.0},
    ]
    one = torch.optim.SGD(prior.parameters(), lr=0.1, momentum=momentum)
    other = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
    x, y = tiny.points(size)
    for _ in range(20):
        for posterior, optimizer in ((prior, one), (decayed, other)):
            posterior.zero_grad()
            posterior.backward(x, y)
            optimizer.step()
    assert tiny.largest_difference(tiny.state(first), tiny.state(second)) < 1e-10


def test_a_linear_gaussian_model_is_ridge_regression():
    """argmin Σ (y − Xw)²/(2s²) + ‖w‖²/(2σ²) = (XᵀX + (s²/σ²) I)⁻¹ Xᵀ y."""
    noise, std, size = 0.3, 0.5, 40
    x, _ = tiny.points(size)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]], dtype=torch.float64)
    y = y + noise * torch.randn(size, 1, dtype=torch.float64)
    network = nn.Linear(4, 1, bias=False).double()
    posterior = ds.MAP(network, likelihood=ds.Regression(noise=noise), weight_prior_std=std, data_size=size)
    exactly = {"max_iter": 100, "tolerance_grad": 1e-13, "tolerance_change": 0}
    tiny.minimise(posterior.parameters(), lambda: posterior.loss(x, y), **exactly)
    ridge = torch.linalg.solve(x.T @ x + (noise / std) ** 2 * torch.eye(4, dtype=torch.float64), x.T @ y)
    torch.testing.assert_close(network.weight.detach().T, ridge, rtol=0, atol=1e-8)
    torch.testing.assert_close(posterior.predict(x).mean, x @ ridge, rtol=0, atol=1e-8)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_a_posterior_is_where_its_network_is(device):
    posterior = ds.MAP(tiny.mlp().to(device))
    assert posterior.device.type == posterior.steps.device.type == device


def test_map_is_the_network():
    network, (x, _) = tiny.mlp().double(), tiny.points()
    posterior = ds.MAP(network)
    assert torch.equal(posterior.eval()(x)[0], network(x))
    torch.testing.assert_close(posterior.predict(x).mean, network(x).softmax(1), rtol=0, atol=1e-12)
    assert {id(p) for p in posterior.parameters()} == {id(p) for p in network.parameters()}
    assert float(posterior.predict(x).epistemic.abs().max()) < 1e-12


def test_a_posterior_is_no_network():
    network = tiny.mlp()
    for wrong in (
        lambda: ds.MAP(ds.MAP(network)),
        lambda: ds.DeepEnsemble([ds.MAP(network), ds.MAP(tiny.mlp())]),
        lambda: ds.BatchEnsemble(ds.MAP(network), modulation=ds.Modulation.sign()),
        lambda: ds.NodeBNN(ds.MAP(network), data_size=9),
    ):
        refuses(wrong, "expected a network, got the posterior MAP; pass the network", TypeError)


OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.01),
    "adam fused": lambda p: Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw foreach": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
}


def deep():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize(("name", "how"), thinned(list(OPTIMIZERS), ["loop", "vectorised"], every=2))
def test_stacked_training_equals_separate_training(name, how):
    optimizer = OPTIMIZERS[name]
    networks = [deep().double() for _ in range(3)]
    posterior = ds.DeepEnsemble(networks)
    posterior.particles.how = how
    x, y = tiny.points()
    together = optimizer(posterior.parameters())
    apart = [optimizer(net.parameters()) for net in networks]
    for _ in range(5):
        posterior.zero_grad()
        posterior.backward(x, y)
        together.step()
        for net, own in zip(networks, apart, strict=True):
            own.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            own.step()
    for i, net in enumerate(networks):
        assert tiny.largest_difference(tiny.state(posterior.member(i)), tiny.state(net)) < 1e-8


@pytest.mark.parametrize(
    ("name", "engine", "how"),
    thinned(["sgd", "adam", "adamw fused"], ["loop", "vectorised"], [(None, 1), (0.1, 1), (0.1, 2)], every=3),
)
def test_fit_trains_members_as_alone(name, engine, how):
    optimizer, (clip, accumulate) = OPTIMIZERS[name], how
    networks = [deep().double() for _ in range(3)]
    posterior = ds.DeepEnsemble(networks)
    loader = tiny.point_batches(24, 6)
    settings = {"epochs": 2, "clip": clip, "accumulate": accumulate, "progress": False}
    ds.fit(posterior, loader, optimizer=optimizer(posterior.parameters()), engine=engine, **settings)
    for i, net in enumerate(networks):
        alone = ds.MAP(net)
        ds.fit(alone, loader, optimizer=optimizer(net.parameters()), engine="loop", **settings)
        assert tiny.largest_difference(tiny.state(posterior.member(i)), tiny.state(net)) < 1e-8


def test_clipping_in_fit_is_that_of_torch_up_to_its_epsilon():
    network = deep().double()
    alone, (x, y) = copy.deepcopy(network), tiny.points()
    ds.fit(ds.MAP(network), [(x, y)], epochs=5, clip=0.1, optimizer=SGD(network.parameters(), lr=0.1), progress=False)
    optimizer = SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
    assert tiny.largest_difference(tiny.state(network), tiny.state(alone)) < 1e-6


def test_an_ensemble_of_one_is_the_model():
    network, (x, y) = deep().double(), tiny.points()
    posterior = ds.DeepEnsemble([network])
    assert torch.equal(posterior.eval()(x)[0], network.eval()(x))
    torch.testing.assert_close(posterior.predict(x).mean, network(x).softmax(1), rtol=0, atol=1e-12)
    assert float(posterior.predict(x).epistemic.abs().max()) < 1e-12
    losses = posterior.train().backward(x, y)
    loss = nn.functional.cross_entropy(network.train()(x), y)
    loss.backward()
    assert float(losses[0]) == pytest.approx(loss.item(), abs=1e-12)
    grads = {f"particles.own.network.{n}": p.grad[None] for n, p in network.named_parameters()}
    assert tiny.largest_difference(tiny.gradients(posterior), grads) < 1e-12


def test_members_are_what_the_caller_built():
    networks = [deep() for _ in range(3)]
    posterior = ds.DeepEnsemble(nn.ModuleList(networks))
    for i, net in enumerate(networks):
        assert tiny.largest_difference(tiny.state(posterior.member(i)), tiny.state(net)) == 0
    assert len(posterior.state_dict()) == len(networks[0].state_dict()) + 3  # and temperature, steps, description
    assert ds.DeepEnsemble(deep() for _ in range(2)).particles.members == 2


def activation(setting):
    return nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(setting), nn.Linear(6, 3))


def tied(together):
    layers = {name: nn.Linear(3, 3, bias=False) for name in "ab"}
    if together:
        layers["b"].weight = layers["a"].weight
    return nn.ModuleDict(layers)


def frozen():
    network = nn.Linear(4, 3)
    network.bias.requires_grad_(False)
    return network


@pytest.mark.parametrize(("networks", "text"), [
    (lambda: [nn.Linear(4, 3), nn.Linear(4, 2)], "''.*out_features=3.*in member 0.*out_features=2.*in member 1"),
    (lambda: [activation(0.1), activation(0.1), activation(0.2)], "layer '1'.*0.1.*in member 0.*0.2.*in member 2"),
    (lambda: [nn.Linear(4, 3), nn.Linear(4, 3).double()], "float32 in member 0.*float64 in member 1"),
    (lambda: [tied(True), tied(False)], "parameter 'b.weight'.*tied to a.weight in member 0"),
    (lambda: [nn.Linear(4, 3), frozen()], "parameter 'bias'.*frozen in member 1"),
    (lambda: [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3))], "layer ''.*Linear.*in member 0, Sequential"),
    (lambda: [nn.Linear(4, 3), nn.Linear(4, 3, bias=False)], "bias=True.*in member 0.*bias=False.*in member 1"),
    (lambda: [nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.5)], "momentum=0.1.*momentum=0.5"),
], ids=["width", "activation", "dtype", "tying", "freezing", "nesting", "bias", "momentum"])  # fmt: skip
def test_networks_of_different_architecture_are_refused(networks, text):
    told = f"expected members of one architecture, got .*{text}.*; build all members the same way"
    refuses(lambda: ds.DeepEnsemble(networks()), told)


def test_what_makes_no_ensemble_is_refused():
    network = deep()
    equal = (
        r"expected members that start at different weights, got members 0 and 2 equal; initialise each one separately"
    )
    for again in (network, copy.deepcopy(network)):
        refuses(partial(ds.DeepEnsemble, [network, deep(), again]), rf"{equal}, .* instead of copying")
    refuses(lambda: ds.DeepEnsemble([]), "expected at least one module, got none")
    refuses(lambda: ds.DeepEnsemble([nn.Linear, nn.Linear]), r"expected an nn\.Module, got type", TypeError)
    for module in (deep(), nn.Linear(4, 3)):
        refuses(partial(ds.DeepEnsemble, module), "expected a sequence of modules, got one module", TypeError)


def test_a_function_that_makes_networks_makes_as_many_as_members():
    torch.manual_seed(0)
    made = ds.DeepEnsemble(tiny.mlp, members=3)
    torch.manual_seed(0)
    listed = ds.DeepEnsemble([tiny.mlp() for _ in range(3)])
    assert tiny.largest_difference(tiny.state(made), tiny.state(listed)) == 0
    assert ds.SVGD(tiny.mlp, members=2, data_size=8).particles.members == 2
    told = r"a function that makes one and members=.*DeepEnsemble\(make, members=3\)"
    for networks, members in ((tiny.mlp, {}), ([tiny.mlp()], {"members": 3}), (tiny.mlp(), {"members": 3})):
        refuses(partial(ds.DeepEnsemble, networks, **members), told)
