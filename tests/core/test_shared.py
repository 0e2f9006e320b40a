"""Own and shared tensors: one constructor splits them, and what is vectorised follows from which are own."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.particles import Particles


def convolving():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)).double()


def heads(name):
    return name.startswith("network.4.") or "running" in name or "tracked" in name


def test_a_rule_splits_own_from_shared_tensors():
    networks = [convolving() for _ in range(3)]
    particles = Particles.stack(networks, ds.Classification(), own=heads)
    assert particles.own_parameters().keys() == {"network.4.weight", "network.4.bias"}
    assert particles.own_buffers()["network.1.running_mean"].shape == (3, 4)
    shared = particles.shared_parameters()
    assert shared.keys() == {"network.0.weight", "network.0.bias", "network.1.weight", "network.1.bias"}
    assert torch.equal(shared["network.0.weight"], networks[0][0].weight)
    assert shared["network.0.weight"].data_ptr() != networks[0][0].weight.data_ptr()
    for i, network in enumerate(networks):
        assert torch.equal(particles.member(i)[4].weight, network[4].weight)
        assert torch.equal(particles.member(i)[0].weight, networks[0][0].weight)


def test_only_own_kernels_force_the_loop():
    networks = [convolving() for _ in range(3)]
    assert Particles.stack(networks, ds.Classification()).how == "loop"
    assert Particles.stack(networks, ds.Classification(), own=heads).how == "vectorised"
    biases = Particles.stack(networks, ds.Classification(), own=lambda name: name.endswith(".0.weight"))
    assert biases.how == "loop"


def test_a_tied_own_kernel_is_seen_under_its_other_name():
    def tied():
        first, second = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        second.weight = first.weight
        return nn.Sequential(nn.ModuleDict({"held": first}), second)

    particles = Particles.stack([tied() for _ in range(2)], ds.Classification(), own=lambda name: "held.weight" in name)
    assert particles.how == "loop"


def test_only_linear_layers_with_own_weights_are_rewritten():
    networks = [tiny.mlp() for _ in range(3)]
    every = Particles.stack(networks, ds.Classification())
    last = Particles.stack(networks, ds.Classification(), own=lambda name: name.startswith("network.3."))
    linear = [layer for layer in every.template.network if type(layer) is nn.Linear]
    assert [layer for layer, _ in every.runner.linear.forwards] == linear
    assert [layer for layer, _ in last.runner.linear.forwards] == [last.template.network[3]]


@pytest.mark.parametrize("make", [convolving, tiny.mlp], ids=["convolution", "mlp"])
def test_members_with_shared_tensors_train_alike_however_they_run(make):
    torch.manual_seed(0)
    networks = [make() for _ in range(3)]
    last = f"network.{len(networks[0]) - 1}."
    x = torch.randn(6, 2, 5, 5, dtype=torch.float64) if make is convolving else tiny.points(6)[0]
    y, found = torch.arange(6) % 3, []
    for how in ("loop", "vectorised"):
        own = lambda name: name.startswith(last) or "running" in name or "tracked" in name  # noqa: E731
        posterior = tiny.Given(Particles.stack(networks, ds.Classification(), own=own)).double()
        posterior.particles.how = how
        posterior.backward(x, y)
        assert posterior.particles.how == how
        found.append((tiny.gradients(posterior), tiny.state(posterior)))
    for a, b in zip(*found, strict=True):
        assert tiny.largest_difference(a, b) < 1e-10
