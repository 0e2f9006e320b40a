"""A posterior is saved and loaded with the network it was given, also where the method cuts layers or is one's own."""

import json

import pytest
import torch

import dissensus as ds
import tiny
from dissensus.storage import blueprints
from refusals import refuses
from small_cut import ScaledEnsemble


@pytest.fixture
def trained(tmp_path):
    """(posterior, plain network, inputs, targets), saved in tmp_path."""
    plain, (x, y) = tiny.mlp().double(), tiny.points()
    posterior = ScaledEnsemble(plain)
    ds.fit(posterior, [(x, y)], epochs=2, progress=False)
    ds.save(posterior, tmp_path)
    return posterior, plain, x, y


def test_a_method_that_cuts_layers_is_loaded_around_the_plain_network(trained, tmp_path):
    posterior, plain, x, _ = trained
    assert blueprints.layer_lines(posterior.plain_network()) == blueprints.layer_lines(plain)
    assert blueprints.layer_lines(posterior.member(0)) != blueprints.layer_lines(plain)  # the function, as it is
    assert json.loads((tmp_path / "config.json").read_text())["network"]["structure"] == blueprints.layer_lines(plain)
    before = tiny.state(plain)
    loaded = ds.load(tmp_path, plain, method=ScaledEnsemble)
    assert tiny.largest_difference(before, tiny.state(plain)) == 0
    assert tiny.largest_difference(tiny.state(loaded), tiny.state(posterior)) == 0
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    with pytest.raises(ValueError, match="expected a network with layer '0: Linear"):
        ds.load(tmp_path, posterior.member(0), method=ScaledEnsemble)


def test_what_was_given_has_a_members_tensors_and_shares_nothing(trained):
    posterior, _, x, _ = trained
    given, before = posterior.plain_network(), posterior.predict(x).member_means
    assert torch.equal(given[0].weight, posterior.particles.shared_parameters()["network.0.linear.weight"])
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.add_(1.0)
    assert torch.equal(posterior.predict(x).member_means, before)


def test_a_network_of_the_library_that_was_cut_is_built_again(tmp_path):
    x, y = tiny.points()
    posterior = ScaledEnsemble(ds.nets.MLP(4, 3, hidden=(5,)).double())
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, method=ScaledEnsemble)
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_a_cut_network_far_larger_than_its_file_is_not_built():
    with torch.device("meta"):
        lines = blueprints.layer_lines(ds.nets.MLP(4, 3, hidden=(5000,)))
    saved = {"name": "MLP", "arguments": {"inputs": 4, "outputs": 3, "hidden": [5000]}, "structure": lines, "cut": True}
    with pytest.raises(
        ValueError, match="expected a network of at most 64 times the 12 numbers in the file, got 40003"
    ):
        blueprints.build_network(saved, None, {"a": (3, 4)})


@pytest.mark.parametrize("known", [False, True])
def test_members_that_are_no_plain_networks_are_summarised_as_a_whole(trained, tmp_path, monkeypatch, known):
    """Also where the library knows the method, and would read members one by one."""
    posterior, plain, x, y = trained
    keywords = {"method": ScaledEnsemble}
    if known:
        monkeypatch.setitem(blueprints.METHODS, ScaledEnsemble.name, ScaledEnsemble)
        ds.save(posterior, tmp_path)
        keywords = {}
    found = ds.summarise(tmp_path, [(x, y)], network=plain, **keywords)
    torch.testing.assert_close(found.mean, posterior.predict(x).mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("read", [ds.load, lambda *a, **k: ds.summarise(a[0], [tiny.points()], network=a[1], **k)])
def test_a_method_of_ones_own_must_be_named_and_be_the_one_that_was_saved(trained, tmp_path, read):
    _, plain, _, _ = trained
    refuses(lambda: read(tmp_path, plain), "expected method=ScaledEnsemble to load into, got none")
    with pytest.raises(ValueError, match="expected a folder of the method 'map', got one of 'scaled_ensemble'"):
        read(tmp_path, plain, method=ds.MAP)
    with pytest.raises(TypeError, match="expected a class of posteriors as method, got 'scaled_ensemble'"):
        read(tmp_path, plain, method="scaled_ensemble")


def test_a_class_of_ones_own_is_not_loaded_as_the_one_whose_name_it_has(tmp_path):
    posterior, (x, _) = tiny.Repelling([tiny.mlp().double() for _ in range(3)]), tiny.points()
    ds.save(posterior, tmp_path)
    refuses(lambda: ds.load(tmp_path, tiny.mlp()), "expected method=Repelling to load into")
    loaded = ds.load(tmp_path, tiny.mlp(), method=tiny.Repelling)
    assert type(loaded) is tiny.Repelling
    assert torch.equal(loaded.predict(x).member_means, posterior.eval().predict(x).member_means)
