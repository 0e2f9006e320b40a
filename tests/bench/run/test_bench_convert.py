"""From a file of weights to a saved posterior: every method of one network, and nothing half-written."""

import re
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

import dissensus as ds
import tiny
from dissensus.bench.run.convert import convert
from dissensus.methods import METHODS
from dissensus.storage import folder
from refusals import refuses

NET = ["network.name=MLP", "network.inputs=4", "network.outputs=3", "network.hidden=[6]", "network.batch_norm=true"]
# method -> settings
SETTINGS = {
    "map": [],
    "mc_dropout": ["method.rate=0.2", "method.samples=4"],
    "gaussian_perturbation": ["method.noise=0.1", "method.samples=4"],
    "laplace": ["method.structure=kron", "method.prior_precision=2.0", "method.samples=4"],
    "tradi": ["method.samples=4"],
    "swag": ["method.rank=3"],
    "swa": [],
    "snapshot_ensemble": [],
}


def net():
    return ds.nets.MLP(4, 3, hidden=(6,), batch_norm=True)


@pytest.fixture
def weights(tmp_path):
    """A file, and the network whose state is in it."""
    torch.manual_seed(0)
    network = net()
    for buffer in network.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3)
    torch.save(network.state_dict(), tmp_path / "w.pt")
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.pt", network.eval()


@pytest.mark.parametrize("method", SETTINGS)
def test_the_network_in_the_file_is_that_of_the_saved_posterior(weights, method, tmp_path):
    path, network = weights
    convert(path, method, tmp_path / "out", overrides=[*NET, *SETTINGS[method]])
    loaded = ds.load(tmp_path / "out")
    assert type(loaded) is METHODS[method]
    assert tiny.largest_difference(tiny.state(loaded.particles.template.network), tiny.state(network)) == 0
    x = tiny.points()[0].float()
    assert torch.equal(loaded.current()(x)[0], network(x)) or method in ("mc_dropout", "snapshot_ensemble")
    config = loaded.config()
    for each in SETTINGS[method]:
        key, _, value = each.partition("=")
        assert str(config[key.removeprefix("method.")]) == value


def test_every_method_of_one_network_may_be_asked_for(weights, tmp_path):
    with pytest.raises(ValueError, match="expected a method of one network, got deep_ensemble") as error:
        convert(weights[0], "deep_ensemble", tmp_path / "out", overrides=NET)
    assert set(SETTINGS) <= set(str(error.value).partition("choose one of ")[2].split(", "))


def test_a_method_that_joins_the_table_is_converted_too(weights, tmp_path, monkeypatch):
    class Louder(ds.GaussianPerturbation):
        name = "louder"

    monkeypatch.setitem(METHODS, "louder", Louder)
    convert(weights[0], "louder", tmp_path / "out", overrides=[*NET, "method.samples=7"])
    loaded = ds.load(tmp_path / "out")
    assert type(loaded) is Louder
    assert loaded.samples == 7


def test_a_converted_laplace_is_fitted_after_loading(weights, tmp_path):
    convert(weights[0], "laplace", tmp_path / "out", overrides=[*NET, "method.samples=3"])
    loaded = ds.load(tmp_path / "out")
    x, y = tiny.points()
    refuses(lambda: loaded.predict(x.float()), r"call fit_posthoc\(loader\)")
    assert loaded.fit_posthoc([(x.float(), y)]).predict(x.float()).member_means.shape == (3, 12, 3)


def test_a_likelihood_and_the_order_of_settings_do_not_matter(weights, tmp_path):
    overrides = [*reversed(NET), "likelihood={ regression = 0.5 }"]
    convert(weights[0].with_suffix(".safetensors"), "map", tmp_path / "out", overrides=overrides)
    likelihood = ds.load(tmp_path / "out").likelihood
    assert isinstance(likelihood, ds.Regression)
    assert likelihood.noise == 0.5


WRONG = {
    "no name": ("map", NET[1:], "expected network.name .* got ''"),
    "unknown name": ("map", ["network.name=MPL"], "expected network.name .* did you mean 'MLP'"),
    "missing argument": ("map", NET[:2], "fit the network MLP, got others .*missing .*'outputs'.*--set"),
    "unknown argument": ("map", [*NET, "network.width=3"], "expected a key of .*network.* got 'network.width'"),
    "unknown method": ("mapp", NET, "expected a method .* did you mean 'map'"),
    "unknown setting": ("laplace", [*NET, "method.sampels=3"], "did you mean 'samples'"),
    "impossible setting": ("laplace", [*NET, "method.samples=0"], "expected samples of at least 1"),
    "other method": ("map", [*NET, "method.swag.rank=3"], "expected a setting of the methods that run .map., got"),
    "other section": ("map", [*NET, "training.epochs=3"], "expected a value of network, method, likelihood"),
    "weights twice": ("map", [*NET, "network.weights=w.pt"], "the file of weights is an argument"),
    "needs data": (
        "map",
        [*NET, 'method.prior={ empcov = { layer = "layers.0" } }'],
        "expected settings that need no data",
    ),
    "other shapes": ("map", [*NET[:3], "network.hidden=[7]", NET[4]], "expected layers.0.weight of shape"),
    "other layers": ("map", NET[:4], "with unexpected layers.1.weight, layers.1.bias, layers.1.running_mean"),
}


@pytest.mark.parametrize(("method", "overrides", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_one_clear_error_and_nothing_is_written(weights, tmp_path, method, overrides, words):
    refuses(lambda: convert(weights[0], method, tmp_path / "out", overrides=overrides), words)
    assert not (tmp_path / "out").exists()


def test_a_method_that_needs_a_setting_says_how_to_give_it(weights, tmp_path, monkeypatch):
    class Sized(ds.MAP):
        name = "sized"

        def __init__(self, module, *, data_size, likelihood=None):
            super().__init__(module, likelihood=likelihood, data_size=data_size)

        @classmethod
        def skeleton(cls, network, config, likelihood):
            return cls(network, likelihood=likelihood, data_size=config["data_size"])

    monkeypatch.setitem(METHODS, "sized", Sized)
    with pytest.raises(ValueError, match=r"expected the setting data_size of sized.*--set method\.sized\.data_size="):
        convert(weights[0], "sized", tmp_path / "out", overrides=NET)
    assert convert(weights[0], "sized", tmp_path / "out", overrides=[*NET, "method.data_size=50"]).data_size == 50


def test_an_object_that_a_method_needs_is_asked_for_in_the_form_that_works_and_without_a_task(weights, tmp_path):
    with pytest.raises(
        ValueError, match="expected the setting modulation of batch_ensemble, got none; pass --set"
    ) as error:
        convert(weights[0], "batch_ensemble", tmp_path / "out", overrides=NET)
    assert "task" not in str(error.value)
    offered = re.findall(r"--set '(.*?)'", str(error.value))
    for i, text in enumerate(offered):
        converted = convert(weights[0], "batch_ensemble", tmp_path / str(i), overrides=[*NET, text])
        assert converted.modulation == (ds.Modulation.sign(), ds.Modulation.normal(1, 0.1))[i]
    assert len(offered) == 2


RANDOM = {
    "batch_ensemble": ["method.modulation={normal=[1,0.1]}", "method.members=2"],
    "dropout_ensemble": ["method.members=2"],
    "node_bnn": ["method.data_size=32", "method.components=2"],
}


@pytest.mark.parametrize("method", RANDOM)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(weights, tmp_path, method):
    tensors = []
    for i, seed in enumerate((0, 0, 1)):
        before = torch.manual_seed(i).get_state()
        convert(weights[0], method, tmp_path / str(i), overrides=[*NET, *RANDOM[method]], seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        tensors.append((tmp_path / str(i) / "posterior.safetensors").read_bytes())
    assert tensors[0] == tensors[1] != tensors[2]


def test_missing_and_unexpected_names_are_listed(weights, tmp_path):
    state = torch.load(weights[0], weights_only=True)
    state["old.weight"] = state.pop("layers.0.weight")
    torch.save(state, weights[0])
    with pytest.raises(ValueError, match=r"a file without layers\.0\.weight and with unexpected old\.weight"):
        convert(weights[0], "map", tmp_path / "out", overrides=NET)


def test_a_folder_with_something_in_it_is_left_alone(weights, tmp_path):
    (tmp_path / "out").mkdir()
    convert(weights[0], "map", tmp_path / "out", overrides=NET)  # an empty one will do
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for out in (tmp_path / "out", weights[0]):
        with pytest.raises(ValueError, match="expected a folder that is new or empty"):
            convert(weights[0], "laplace", out, overrides=NET)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_disk_that_is_full_leaves_no_part_of_a_posterior(weights, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(folder, "write_atomically", full)
    refuses(lambda: convert(weights[0], "map", tmp_path / "out", overrides=NET), "no space left on device", OSError)
    assert not list((tmp_path / "out").iterdir())


def test_the_command_prints_the_folder_and_errors_are_one_line(weights, tmp_path, command_line):
    run = partial(command_line, "convert", str(weights[0]))
    sets = [part for each in NET for part in ("--set", each)]
    code, out, _ = run("--method", "gaussian_perturbation", *sets, "--seed", "3", "--out", str(tmp_path / "out"))
    assert code == 0
    assert out.strip() == str(tmp_path / "out")
    assert ds.load(tmp_path / "out").name == "gaussian_perturbation"
    code, _, said = run("--method", "map", *sets, "--out", str(tmp_path / "out"))
    assert code == 2
    assert said.startswith("dissensus: expected a folder that is new or empty")
    code, _, said = run("--method", "map", *sets)
    assert code == 2
    assert "--out" in said


def test_a_folder_in_place_of_weights_is_called_one(weights, tmp_path):
    convert(weights[0], "map", tmp_path / "saved", overrides=NET)
    with pytest.raises(FileNotFoundError, match=r"got a folder at .*saved; .*ds\.load\('.*saved'\) reads it"):
        convert(tmp_path / "saved", "map", tmp_path / "out", overrides=NET)
    with pytest.raises(FileNotFoundError, match=r"got a folder at .*; correct the path"):
        convert(tmp_path, "map", tmp_path / "out", overrides=NET)


@pytest.mark.parametrize(
    ("method", "words"),
    [("laplace", "fit_posthoc(loader)"), ("swag", "ds.fit(posterior"), ("tradi", "ds.fit(posterior"), ("map", None)],
)
def test_the_command_says_what_it_took_off_and_what_is_still_to_be_done(weights, tmp_path, command_line, method, words):
    torch.save(torch.nn.DataParallel(weights[1]).state_dict(), weights[0])
    sets = [part for each in NET for part in ("--set", each)]
    code, out, said = command_line(
        "convert", str(weights[0]), "--method", method, *sets, "--out", str(tmp_path / "out")
    )
    assert code == 0
    assert out.strip() == str(tmp_path / "out")
    first, *others = said.splitlines()
    assert first == f"dissensus: 'module.' is removed from all names in {weights[0]}"
    assert len(others) == (words is not None)
    assert all(line.startswith(f"dissensus: {method} is not fitted yet: ") and words in line for line in others)
