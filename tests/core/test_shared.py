"""Own and shared tensors: one constructor splits them, and what no member trains and all have alike is stored once."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.particles import Particles
from refusals import refuses


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


OWN = Path(__file__).parents[1] / "folders" / "frozen"  # its tensors are all each member's own


def backbone():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())


def on_one_backbone(members=3):
    """Heads of their own on copies of one frozen backbone."""
    torch.manual_seed(0)
    first = backbone()
    with torch.no_grad():
        first[1].running_mean.normal_()
    networks = [nn.Sequential(copy.deepcopy(first), nn.Linear(36, 3)).double() for _ in range(members)]
    for network in networks:
        network[0].requires_grad_(False)
    return networks


x = torch.randn(6, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
y = torch.arange(6) % 3


def test_equal_frozen_tensors_are_stored_once():
    posterior = ds.DeepEnsemble(on_one_backbone())
    assert posterior.particles.own_parameters().keys() == {"network.1.weight", "network.1.bias"}
    assert posterior.particles.shared_buffers().keys() >= {"network.0.1.running_mean", "network.0.1.running_var"}
    assert posterior.particles.how == "vectorised"
    frozen = sum(tensor.numel() for tensor in backbone().parameters())
    assert sum(tensor.numel() for tensor in posterior.parameters()) == frozen + 3 * 111


def test_what_is_trained_or_differs_stays_each_members_own():
    networks = on_one_backbone()
    networks[1][0][0].weight.data.add_(1)
    for network in networks:
        network[0][1].weight.requires_grad_(True)
    particles = ds.DeepEnsemble(networks).particles
    assert particles.shared_parameters().keys() == {"network.0.0.bias", "network.0.1.bias"}
    assert "network.0.1.running_mean" in particles.own_buffers()  # its layer trains
    assert not ds.DeepEnsemble(on_one_backbone(1)).particles.shared_parameters()


def test_networks_frozen_throughout_keep_a_member_axis():
    networks = [tiny.mlp().double() for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    for network in networks:
        network.requires_grad_(False)
    assert ds.DeepEnsemble(networks)(tiny.points()[0]).shape == (2, 12, 3)


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_heads_on_one_backbone_train_as_each_alone(engine):
    networks = on_one_backbone()
    posterior = ds.DeepEnsemble(copy.deepcopy(networks))
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    ds.fit(posterior, [(x, y)], epochs=2, optimizer=optimizer, progress=False, engine=engine)
    for i, network in enumerate(networks):
        alone = torch.optim.SGD(network[1].parameters(), lr=0.1)
        for _ in range(2):
            alone.zero_grad()
            nn.functional.cross_entropy(network.eval()(x), y).backward()
            alone.step()
        assert tiny.largest_difference(tiny.state(posterior.member(i)), tiny.state(network)) < 1e-12


def test_a_norm_layer_that_is_frozen_runs_in_eval_mode_and_is_named_once(caplog):
    for build in (lambda nets: ds.DeepEnsemble(nets), lambda nets: ds.MAP(nets[0])):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="dissensus"):
            posterior = build(on_one_backbone())
            before = posterior.particles.member(0)[0][1].running_mean
            ds.fit(posterior, [(x, y)], epochs=2, progress=False, engine="loop")
        assert torch.equal(posterior.particles.member(0)[0][1].running_mean, before)
        assert len([r for r in caplog.records if "network.0.1: kept in eval mode" in r.getMessage()]) == 1


def test_the_statistics_of_a_frozen_layer_are_not_estimated_anew():
    network = on_one_backbone()[0]
    posterior = ds.GaussianPerturbation(network, samples=2)
    ds.refresh(posterior, [(x, y)])
    assert torch.equal(posterior.member(0)[0][1].running_mean, network[0][1].running_mean)


def test_thawing_what_is_stored_once_is_a_clear_error():
    posterior = ds.DeepEnsemble(on_one_backbone())
    posterior.requires_grad_(True)
    for road in (posterior.backward, posterior.loss):
        with pytest.raises(ValueError, match=r"expected 'network.0.0.weight' to stay frozen"):
            road(x, y)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_saved_posterior_with_frozen_tensors_loads_whatever_the_template_freezes(tmp_path, frozen):
    posterior = ds.DeepEnsemble(on_one_backbone())
    ds.fit(posterior, [(x, y)], epochs=1, progress=False, engine="loop")
    ds.save(posterior, tmp_path)
    template = nn.Sequential(backbone(), nn.Linear(36, 3)).double()
    template[0].requires_grad_(not frozen)
    loaded = ds.load(tmp_path, template)
    assert tiny.largest_difference(tiny.state(loaded), tiny.state(posterior)) == 0
    assert repr(loaded) == repr(posterior)
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    loaded.train().backward(x, y)  # its statistics are kept
    assert tiny.largest_difference(tiny.state(loaded), tiny.state(posterior)) == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_a_folder_in_which_frozen_tensors_are_own_still_loads(frozen):
    template = tiny.mlp().double()
    template[:2].requires_grad_(not frozen)
    loaded = ds.load(OWN, template)
    stored = load_file(OWN / "posterior.safetensors")
    assert tiny.largest_difference(tiny.state(loaded), stored) == 0
    inputs = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    known = torch.tensor([0.24501170719499146, 0.3312808424462718, 0.4237074503587366], dtype=torch.float64)
    torch.testing.assert_close(loaded.predict(inputs).mean[0], known, rtol=0, atol=1e-12)


def test_a_state_of_either_form_is_taken():
    posterior = ds.DeepEnsemble(on_one_backbone())
    state = posterior.state_dict()
    shared = "particles.shared."
    own = {k.replace(shared, "particles.own."): v.expand(3, *v.shape) if shared in k else v for k, v in state.items()}
    other = ds.DeepEnsemble(on_one_backbone())
    other.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in own.items()})
    other.load_state_dict(own)
    assert tiny.largest_difference(tiny.state(other), tiny.state(posterior)) == 0
    networks = on_one_backbone()
    networks[1][0][0].weight.data.add_(1)
    several = ds.DeepEnsemble(networks)  # that kernel is own here
    several.load_state_dict(state)
    assert torch.equal(several.member(1)[0][0].weight, posterior.member(1)[0][0].weight)


def test_a_shared_head_does_not_hide_that_a_frozen_backbone_is_trained():
    posterior = ds.FeatureRDE(trained_twice(on_one_backbone()), layer="1", head="2")
    posterior.particles.shared_parameters()["network.0.0.weight"].requires_grad_(True)
    refuses(lambda: posterior.backward(x, y), r"expected 'network.0.0.weight' to stay frozen")


def trained_twice(networks):
    """A layer between backbone and head that is each member's own."""
    return [nn.Sequential(network[0], nn.Linear(36, 8).double(), nn.Linear(8, 3).double()) for network in networks]
