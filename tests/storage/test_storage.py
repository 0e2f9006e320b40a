"""Files: whole or not there, the same bit for bit, and one clear error for each way to be damaged."""

import copy
import json
import os
import pickle
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn
from torch.nn.utils import prune

import dissensus as ds
import tiny
from dissensus.storage.atomic_files import write_atomically
from dissensus.storage.folder import METADATA, serialise_posterior
from refusals import refuses
from saved_files import config_of, reseal, tamper
from thinning import thinned

x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def mlp(**keywords) -> nn.Module:
    return ds.nets.MLP(4, 3, hidden=(6,), **keywords)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run"
    ds.save(ds.DeepEnsemble([mlp(), mlp()]), path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    """A saved ensemble of two."""
    return shutil.copytree(saved, tmp_path / "run")


def test_settings_may_be_numpys_numbers(tmp_path):
    settings = {
        "data_size": np.int64(24), "components": np.int64(2), "prior_std": np.float32(0.5), "samples": np.int64(4),
    }  # fmt: skip
    posterior = ds.NodeBNN(mlp(), bias_latent=np.bool_(True), **settings)
    ds.save(posterior, tmp_path / "run")
    read = ds.load(tmp_path / "run")
    assert read.config() == posterior.config()
    assert all(type(value).__module__ != "numpy" for value in read.config().values())
    network = posterior.particles.template.network
    network.config = {**network.config, "outputs": object()}
    with pytest.raises(TypeError, match="expected settings of text, numbers and lists, got <object"):
        ds.save(posterior, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_two_plain_files_are_written(folder):
    assert sorted(os.listdir(folder)) == ["config.json", "posterior.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["method"] == "deep_ensemble"
    assert config["arguments"] == {"members": 2, "weight_prior_std": None, "data_size": None}
    assert config["network"]["name"] == "MLP"
    with safe_open(folder / "posterior.safetensors", framework="pt") as file:
        assert file.get_tensor("particles.own.network.layers.0.weight").shape == (2, 6, 4)
    for name in os.listdir(folder):
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, UnicodeDecodeError)):
            pickle.loads((folder / name).read_bytes())


def test_saving_again_replaces_what_was_there(folder):
    posterior = ds.MAP(mlp())
    ds.save(posterior, folder)
    loaded = ds.load(folder)
    assert isinstance(loaded, ds.MAP)
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


def test_parameters_in_one_piece_of_memory_can_be_saved_to_a_folder_in_one_that_is_not_there(tmp_path):
    network = mlp()
    flat = nn.utils.parameters_to_vector(network.parameters())
    nn.utils.vector_to_parameters(flat, network.parameters())
    posterior, place = ds.MAP(network), str(tmp_path / "a" / "b")
    ds.save(posterior, place)
    assert torch.equal(ds.load(place).predict(x).mean, posterior.predict(x).mean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_comes_from_the_file(dtype, tmp_path):
    posterior = ds.DeepEnsemble([mlp(), mlp()]).to(dtype)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(loaded.predict(x.to(dtype)).member_means, posterior.predict(x.to(dtype)).member_means)


def test_a_loaded_posterior_is_in_eval_mode_and_can_be_trained_on(tmp_path):
    posterior = ds.DeepEnsemble([mlp(batch_norm=True), mlp(batch_norm=True)])
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path)
    assert not any(module.training for module in [*loaded.modules(), *loaded.particles.template.modules()])
    y = torch.arange(5) % 3
    states = []
    for each in (posterior, loaded):
        ds.fit(each, [(x, y)], epochs=3, progress=False, engine="loop")
        states.append(tiny.state(each))
    assert tiny.largest_difference(*states) == 0


@pytest.mark.parametrize("likelihood", [
    ds.Classification(ignore_index=255), ds.Regression(noise=0.3), ds.Regression(initial=2.0),
    ds.HeteroscedasticRegression(),
], ids=["ignore_index", "fixed noise", "learned noise", "heteroscedastic"])  # fmt: skip
def test_likelihoods_come_back(likelihood, tmp_path):
    posterior = ds.MAP(ds.nets.MLP(4, 2, hidden=(3,)), likelihood=likelihood)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path)
    assert type(loaded.likelihood) is type(likelihood)
    assert loaded.likelihood.config() == likelihood.config()
    found, expected = loaded.predict(x), posterior.predict(x)
    assert all(torch.equal(a, b) for a, b in zip(found.defining_tensors(), expected.defining_tensors(), strict=True))


def test_a_layer_that_describes_itself_by_its_tensors_can_be_loaded(tmp_path):
    class Own(nn.Linear):
        def extra_repr(self):
            return f"weight of shape {tuple(self.weight.shape)}"

    posterior = ds.DeepEnsemble([Own(4, 3), Own(4, 3)])
    ds.save(posterior, tmp_path)
    assert torch.equal(ds.load(tmp_path, Own(4, 3)).predict(x).member_means, posterior.predict(x).member_means)


def test_a_path_that_is_a_file_is_an_os_error(tmp_path):
    (tmp_path / "run").write_text("precious")
    refuses(lambda: ds.save(ds.MAP(mlp()), tmp_path / "run"), "run", OSError)
    refuses(lambda: ds.save(ds.MAP(mlp()), tmp_path / "run" / "below"), "run", OSError)
    assert (tmp_path / "run").read_text() == "precious"
    assert os.listdir(tmp_path) == ["run"]


def test_a_disk_that_is_full_leaves_what_was_there(folder, monkeypatch):
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}

    def full(self, data):
        with open(self, "wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    refuses(lambda: ds.save(ds.MAP(mlp()), folder), "No space left", OSError)
    monkeypatch.undo()
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before


def test_files_are_renamed_into_place_only_when_all_are_written(tmp_path):
    with pytest.raises(TypeError):
        write_atomically({tmp_path / "a": b"1", tmp_path / "b": "not bytes"})
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_posterior_or_has_a_likelihood_that_is_not_json_cannot_be_saved(tmp_path):
    class Odd(ds.Regression):
        def config(self):
            return {"noise": torch.ones(1)}

    refuses(lambda: ds.save(mlp(), tmp_path / "run"), "expected a posterior, got MLP", TypeError)
    odd = ds.MAP(ds.nets.MLP(4, 1), likelihood=Odd(noise=1.0))
    refuses(lambda: ds.save(odd, tmp_path / "run"), "not JSON serializable", TypeError)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_there_or_lacks_its_tensors(folder):
    (folder / "posterior.safetensors").unlink()
    told = r"expected .*posterior.safetensors, got no such file; pass a folder that"
    for path in (folder, folder / "nowhere"):
        refuses(partial(ds.load, path), told, FileNotFoundError)


DAMAGED = r"expected a whole .*, got a damaged one \(.*\); save the posterior again"


@pytest.mark.parametrize("damage", ["truncated", "bit flip", "empty", "longer"])
def test_damaged_tensors(folder, damage):
    path = folder / "posterior.safetensors"
    data = path.read_bytes()
    flipped = data[:-20] + bytes([data[-20] ^ 4]) + data[-19:]
    path.write_bytes({"truncated": data[:-7], "bit flip": flipped, "empty": b"", "longer": data + b"\0"}[damage])
    text = r"to have the checksum in its header, got another; the file is truncated or was changed"
    for read in (lambda: ds.load(folder), lambda: ds.summarise(folder, [(x, torch.zeros(5))])):
        refuses(read, text if damage == "bit flip" else DAMAGED)


@pytest.mark.parametrize("place", ["a name", "a shape", "a value", "the config", "the checksum"])
def test_a_changed_header_shows(folder, place):
    """What the tensors are called and how they are shaped is under the checksum too, and so is the config."""
    path = folder / "posterior.safetensors"
    old, new = {
        "a name": (b"layers.0.bias", b"layers.9.bias"),
        "a shape": (b"[2,6,4]", b"[2,4,6]"),
        "a value": (b'\\"hidden\\": [6]', b'\\"hidden\\": [5]'),
        "the config": (METADATA.encode(), METADATA.upper().encode()),
        "the checksum": (b"checksum", b"checksun"),
    }[place]
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    for read in (lambda: ds.load(folder), lambda: ds.summarise(folder, [(x, torch.zeros(5))])):
        refuses(read, rf"to have the checksum in its header, got another|{DAMAGED}")


NO_CONFIGS = ["", "{", '{"format": 1', "[]", "5", "null", "{}", "[" * 100_000, "\xff\xfe"]


@pytest.mark.parametrize("text", NO_CONFIGS)
def test_a_config_that_is_no_config(folder, text):
    path = folder / "posterior.safetensors"
    path.write_bytes(save(load_file(path), metadata={METADATA: text}))
    refuses(lambda: ds.load(folder), DAMAGED)


@pytest.mark.parametrize(("keys", "value"), [
    ("arguments", 5), ("arguments", []), ("arguments", {}), ("arguments", {"members": "2"}),
    ("arguments.members", 1.5), ("arguments.members", None), ("arguments.unheard_of", 1),
    ("arguments.weight_prior_std", "wide"), ("arguments.data_size", [1]), ("method", []), ("method", None),
    ("tied", 5), ("tied", None), ("network", 5), ("network", {}), ("network.structure", 5),
    ("network.structure", None), ("network.name", []), ("network.arguments", 5), ("network.arguments", {"inputs": 4}),
    ("network.arguments.inputs", "four"), ("likelihood", "Classification"), ("likelihood", {}),
    ("likelihood.name", {}), ("likelihood.arguments", 5), ("likelihood.arguments", {"unheard_of": 1}), ("format", "1"),
    ("format", None),
])  # fmt: skip
def test_wrong_types_in_the_config(folder, keys, value):
    tamper(folder, keys, value)
    refuses(lambda: ds.load(folder), DAMAGED)


@pytest.mark.parametrize(("keys", "value", "text"), [
    ("format", 1, "expected format 2, got 1; load it with the version that wrote it"),
    ("method", "forde2", "expected method of .*map.*, got 'forde2'"),
    ("arguments.members", 3, r"expected .* of shape \(3, .*got \(2, .*in the file"),
    ("arguments.members", 0, "expected at least one module, got none"),
    ("network.name", None, "expected a network to load into, got none; pass network="),
    ("network.arguments.hidden", [7], "expected a network with layer 'layers.0: Linear.*out_features=6"),
    ("network.arguments.activation", "tanh", r"a network with layer 'layers.1: ReLU\(\)', got 'layers.1: Tanh"),
    ("likelihood.name", "Beta", "expected the likelihood 'Beta' as an argument, got none"),
    ("tied", {"a": "b"}, "expected a network whose tensors are tied as in the saved one"),
    ("strides", {"steps": [1]}, "impossible strides of steps"),
    ("arguments.members", 10**9, "members = 1000000000, got"),
    ("network.arguments.hidden", [10**9], "expected a network with layer 'layers.0: Linear.*out_features=6"),
    ("network.arguments.hidden", [10**30], "damaged"),
    ("network.arguments.inputs", -1, "damaged"),
])  # fmt: skip
def test_wrong_values_in_the_config(folder, keys, value, text):
    tamper(folder, keys, value)
    refuses(lambda: ds.load(folder), text)


@pytest.mark.parametrize(("network", "text"), [
    (lambda: mlp(activation="tanh"), r"expected a network with layer 'layers.1: ReLU\(\)', got 'layers.1: Tanh\(\)'"),
    (lambda: ds.nets.MLP(4, 3, hidden=(7,)), "expected a network with layer .*out_features=6.* got .*out_features=7"),
    (lambda: ds.nets.MLP(4, 3, hidden=(6, 6)), "expected a network with layer"),
    (lambda: ds.nets.MLP(4, 3, hidden=()), "expected a network with layer"),
    (lambda: mlp().layers, r"layer 'MLP\(\)', got 'Sequential\(\)'; pass a network of the same class"),
], ids=["activation", "width", "deeper", "shallower", "the inside"])  # fmt: skip
def test_another_network_is_refused(folder, network, text):
    refuses(lambda: ds.load(folder, network()), text)
    refuses(lambda: ds.load(folder, network), r"expected an nn\.Module as network, got function", TypeError)


@pytest.mark.parametrize(("saved", "given"), [(True, False), (False, True)])
@pytest.mark.parametrize("build", [ds.MAP, lambda net: ds.DeepEnsemble([net])], ids=["held", "stacked"])
def test_other_ties_are_refused(build, saved, given, tmp_path):
    ds.save(build(tiny.tied_layers(saved)), tmp_path)
    told = r"tied as in the saved one|expected (no|a floating-point) tensor"
    refuses(lambda: ds.load(tmp_path, tiny.tied_layers(given)), told)
    ds.load(tmp_path, tiny.tied_layers(saved))


def test_the_template_and_the_random_state_are_left_as_they_were(folder):
    template, stream = mlp(), torch.get_rng_state()
    before, training = tiny.state(template), template.training
    loaded = ds.load(folder, template)
    ds.load(folder)
    assert torch.equal(torch.get_rng_state(), stream)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert tiny.largest_difference(before, tiny.state(template)) == 0
    assert template.training == training


@pytest.mark.parametrize("said", ["affine=True", "affine=True, bias=True"])
def test_a_folder_of_another_torch_is_read_where_only_the_words_for_a_norm_layer_differ(tmp_path, said):
    """torch 2.13 says of a batch norm that it has its bias; earlier ones, in which all have one, do not."""
    posterior, (x, _) = ds.MAP(tiny.mlp().double()), tiny.points()
    ds.save(posterior, tmp_path)
    config = config_of(tmp_path)
    lines = config["network"]["structure"]
    written = [re.sub(r"affine=True(, bias=True)?", said, line) for line in lines]
    assert any(said in line for line in written)
    reseal(tmp_path, config | {"network": config["network"] | {"structure": written}})
    assert torch.equal(ds.load(tmp_path, tiny.mlp()).predict(x).member_means, posterior.predict(x).member_means)
    other = nn.Sequential(nn.Linear(4, 6, bias=False), *tiny.mlp()[1:])
    refuses(lambda: ds.load(tmp_path, other), "expected a network with layer")


def scaled(factor, act=torch.tanh):
    """A network that reads attributes, of which none is a buffer."""
    network = tiny.Network(lambda self, x: self.act(self.layer(x * self.factor)), layer=nn.Linear(4, 3), act=act)
    network.factor = factor
    return network


def times(factor):
    return lambda x: x * factor


OTHERS = {
    "a number": (scaled(1.0), scaled(9.0), "factor 1.0, not 9.0"),
    "a tensor": (scaled(torch.ones(4)), scaled(torch.zeros(4)), "factor Tensor"),
    "a function": (scaled(1.0), scaled(1.0, torch.sin), "act"),
    "a closure": (scaled(1.0, times(2.0)), scaled(1.0, times(3.0)), "act"),
    "deep inside": (nn.Sequential(scaled(1.0)), nn.Sequential(scaled(9.0)), "0.factor"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_network_of_other_attributes_is_refused(name, tmp_path):
    network, other, what = OTHERS[name]
    posterior = ds.MAP(network)
    ds.save(posterior, tmp_path)
    refuses(lambda: ds.load(tmp_path, other), f"the saved attributes, got another: {what}")
    x = torch.randn(5, 4)
    assert torch.equal(ds.load(tmp_path, copy.deepcopy(network)).predict(x).mean, posterior.predict(x).mean)


def test_an_attribute_that_is_not_made_yet_is_no_other_one(tmp_path):
    network = scaled(1.0)
    network.cache = torch.ones(3)  # made in a forward
    fresh = scaled(1.0)
    fresh.cache = None
    ds.save(ds.MAP(network), tmp_path)
    ds.load(tmp_path, fresh)


def test_members_of_other_attributes_are_refused_before_anything_is_written(tmp_path):
    posterior = ds.DeepEnsemble([scaled(1.0), scaled(5.0)])
    told = r"registered tensors, got a difference in 'factor'.*register it as a buffer"
    refuses(lambda: ds.save(posterior, tmp_path / "folder"), told)
    assert not (tmp_path / "folder").exists()


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


BY_HOOKS = {
    "weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)),
    "pruning": lambda: nn.Sequential(pruned(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)),
    "cumulative norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    ("name", "method"), thinned(list(BY_HOOKS), ["map", "deep_ensemble", "swag", "mc_dropout"], every=2)
)
def test_networks_with_weights_made_by_hooks_are_saved_copied_and_taken_out_bit_for_bit(name, method, tmp_path):
    torch.manual_seed(0)
    network, y = BY_HOOKS[name], torch.arange(5) % 3
    posterior = {
        "map": lambda: ds.MAP(network()),
        "deep_ensemble": lambda: ds.DeepEnsemble([network(), network()]),
        "swag": lambda: ds.SWAG(network(), rank=2, samples=3),
        "mc_dropout": lambda: ds.MCDropout(network(), rate=0.1, samples=3),
    }[method]()
    ds.fit(posterior, [(x, y)] * 2, epochs=4, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, network())
    for other in (loaded, copy.deepcopy(posterior)):
        assert torch.equal(other.predict(x).member_means, posterior.predict(x).member_means)
    torch.testing.assert_close(posterior.eval().member(0).eval()(x), loaded.draw()(x)[0])


def test_variances_below_0_are_damage(tmp_path):
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    ds.save(ds.MAP(network), tmp_path)
    tensors = load_file(tmp_path / "posterior.safetensors")
    tensors["particles.shared.network.1.running_var"][2] = -1.0
    config = {key: value for key, value in config_of(tmp_path).items() if key != "checksum"}
    data, _ = serialise_posterior(tensors, config)
    (tmp_path / "posterior.safetensors").write_bytes(data)
    refuses(lambda: ds.load(tmp_path, network), r"expected variances of at least 0, got a negative .*running_var")


class Strong(ds.StackedPosterior):
    """A method whose setting may also be passed by position."""

    name = "strong"

    def __init__(self, networks, strength=2.0, **keywords):
        super().__init__(networks, **keywords)
        self.strength = strength


class Secretive(Strong):
    """The same, which keeps a setting under another name."""

    name = "secretive"

    def __init__(self, networks, *, hidden=1, **keywords):
        super().__init__(networks, **keywords)
        self._hidden = hidden


def test_every_setting_of_a_method_of_ones_own_is_saved_or_asked_for(tmp_path):
    x, y = tiny.points()
    networks = [tiny.mlp(), tiny.mlp()]
    posterior = Strong(networks, 5.0)
    ds.save(posterior, tmp_path / "strong")
    assert ds.load(tmp_path / "strong", tiny.mlp(), method=Strong).strength == 5.0
    secretive, loader = Secretive(networks, hidden=3), [(x.float(), y)]
    told = "expected 'hidden' of Secretive in its config.*keep it as self.hidden, or return it from config"
    refuses(lambda: ds.save(secretive, tmp_path / "secretive"), told)
    assert not (tmp_path / "secretive").exists()
    how = {"epochs": 1, "progress": False, "checkpoint": tmp_path / "run.pt"}
    refuses(lambda: ds.fit(secretive, loader, **how), told)
    ds.fit(posterior, loader, **how)
    refuses(lambda: ds.fit(Strong(networks, 6.0), loader, **how), "strength 5.0, not 6.0")


class Encoded(nn.Module):
    """A transformer layer, alone or in an encoder: torch's fast path, which converted layers switch off, is an attribute."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2) if stacked else layer, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("make", [
    lambda network: ds.NodeBNN(network, data_size=9), lambda network: ds.MeanFieldVI(network, data_size=9),
    lambda network: ds.BatchEnsemble(network, members=2, modulation=ds.Modulation.sign()), ds.MAP,
])  # fmt: skip
def test_transformers_are_loaded_into_a_network_built_alike(make, stacked, tmp_path):
    posterior, sequence = make(Encoded(stacked)), torch.randn(2, 5, 4)
    ds.save(posterior, tmp_path / "run")
    loaded = ds.load(tmp_path / "run", Encoded(stacked))
    assert torch.equal(loaded.predict(sequence).mean, posterior.predict(sequence).mean)


def test_an_attribute_that_was_changed_after_the_posterior_was_built_is_said(tmp_path, caplog):
    network = tiny.Network(scale=1.0, layer=nn.Linear(4, 3), forward=lambda self, x: self.scale * self.layer(x))
    posterior = ds.MAP(network)
    ds.save(posterior, tmp_path / "run")
    assert not caplog.messages
    network.scale = 4.0
    ds.save(posterior, tmp_path / "run")
    assert "as it was when the posterior was built: scale 1.0, not 4.0" in caplog.text
