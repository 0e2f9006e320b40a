"""Weights that a task's network starts from, and conversions of files of weights to saved posteriors."""

import io
import pickle
import re
import struct
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dissensus as ds
import tiny
from dissensus.bench.rows.dataset_rows import find_file
from dissensus.bench.rows.task_rows import DataCache
from dissensus.bench.run import build as module, jobs
from dissensus.bench.run.build import load_weights
from dissensus.bench.run.convert import convert
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, run_config
from dissensus.methods import METHODS
from refusals import refuses


def net() -> torch.nn.Module:
    return ds.nets.MLP(2, 2, hidden=(6,), batch_norm=True)


def write(path, state) -> None:
    plain = {name: tensor.detach().clone() for name, tensor in state.items()}
    if path.suffix == ".npz":
        np.savez_compressed(path, **{name: tensor.numpy() for name, tensor in plain.items()})
    elif path.suffix == ".safetensors":
        save_file(plain, path)
    else:
        torch.save(state, path)


def same(network, state) -> bool:
    found = network.state_dict()
    return all(torch.equal(found[name], state[name]) for name in found)


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.th", "w.npz", "w.safetensors"])
def test_a_state_dict_is_read_bit_for_bit(tmp_path, name):
    saved = net()
    write(tmp_path / name, saved.state_dict())
    network = net()
    assert not same(network, saved.state_dict())
    load_weights(network, tmp_path / name)
    assert same(network, saved.state_dict())
    assert all(p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("name", ["w.pt", "w.npz", "w.safetensors"])
def test_counts_of_batches_that_nobody_reads_may_be_missing(tmp_path, name):
    saved = net()
    write(tmp_path / name, {key: t for key, t in saved.state_dict().items() if "num_batches" not in key})
    network = net()
    load_weights(network, tmp_path / name)
    assert same(network, saved.state_dict())
    next(m for m in network.modules() if isinstance(m, torch.nn.BatchNorm1d)).momentum = None  # the mean over batches
    refuses(lambda: load_weights(network, tmp_path / name), r"a file without layers\.1\.num_batches_tracked")


@pytest.mark.parametrize("name", ["w.pt", "w.npz", "w.safetensors"])
def test_missing_and_unexpected_names_are_one_error_that_lists_them(tmp_path, name):
    state = dict(net().state_dict())
    gone = list(state)[:2]
    for each in gone:
        del state[each]
    state |= {"one": torch.zeros(1), "two": torch.zeros(1)}
    write(tmp_path / name, state)
    network = net()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(f"without {', '.join(gone)} and with unexpected one, two; save")):
        load_weights(network, tmp_path / name)
    assert same(network, before)


def test_shapes_kinds_and_numbers_that_do_not_fit_are_errors(tmp_path):
    good = dict(net().state_dict())
    name = next(iter(good))
    for value, message in (
        (torch.zeros(3), f"expected {name} of shape"),
        (good[name].long(), rf"{name} of shape .* and torch.float32 in .*got .* torch.int64"),
        (torch.full(good[name].shape, torch.nan), f"expected finite numbers in {name}"),
        (torch.full(good[name].shape, 1e300, dtype=torch.float64), f"expected finite numbers in {name}"),
    ):
        write(tmp_path / "w.pt", good | {name: value})
        refuses(lambda: load_weights(net(), tmp_path / "w.pt"), message)


REFUSED = r"expected a (state dict|whole .pt file) of plain tensors .* got .* asks for "


class Bomb:
    def __reduce__(self):
        return (print, ("run",))


class Wide:
    def __reduce__(self):
        return (bytearray, (10**13,))


def announced(path):
    """An array whose header says more than it has."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000,), }"
    header += b" " * (64 - (10 + len(header) + 1) % 64) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


@pytest.mark.parametrize(("name", "written", "message"), [
    ("w.pt", lambda path: torch.save({"net": {}, "epoch": 3}, path), r"of tensors in .* got the entries net, epoch"),
    ("w.npz", lambda path: np.savez(path, a=np.array([Bomb()], dtype=object)), r"an \.npz file of plain arrays"),
    ("w.npz", announced, "announces 800,000,000,000 bytes and it has"),
    ("w.h5", lambda path: path.touch(), r"expected weights in a file .pt, .pth, .th, .npz, .safetensors, got"),
])  # fmt: skip
def test_what_is_no_plain_state_dict_is_named_and_takes_no_memory(tmp_path, name, written, message):
    written(tmp_path / name)
    refuses(lambda: load_weights(net(), tmp_path / name), message)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("entry", ["state_dict", "model"])
def test_the_checkpoint_of_a_wrapped_network_is_read_and_that_is_logged(tmp_path, caplog, new, entry):
    saved = torch.nn.DataParallel(net())
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
    whole = {entry: saved.state_dict(), "optimizer": optimizer.state_dict(), "best_prec1": 91.7}
    torch.save(whole, tmp_path / "w.th", _use_new_zipfile_serialization=new)
    network = net()
    with caplog.at_level("INFO", logger="dissensus"):
        load_weights(network, tmp_path / "w.th")
    assert same(network, saved.module.state_dict())
    assert f"of the entries {entry}, optimizer, best_prec1 in" in caplog.text
    assert f"{entry} is read" in caplog.text
    assert "'module.' is removed from all names in" in caplog.text


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors"])
def test_a_wrapper_is_taken_off_once_and_only_where_every_name_has_it(tmp_path, name):
    inner = torch.nn.Sequential()
    inner.add_module("module", net())  # a network with a part of that name
    for network, saved in ((inner, inner), (inner, torch.nn.DataParallel(inner)), (net(), inner)):
        write(tmp_path / name, saved.state_dict())
        load_weights(network, tmp_path / name)
    assert same(network, inner.module.state_dict())
    write(tmp_path / name, inner.state_dict() | {"count": torch.zeros(1)})
    refuses(lambda: load_weights(net(), tmp_path / name), r"with unexpected .*module\.layers\.0\.weight")


@pytest.mark.parametrize("value", [Bomb(), Wide(), {"a": Bomb()}, {"state_dict": {"a": Bomb()}}])
def test_a_file_that_asks_for_more_than_tensors_is_refused_and_not_run(tmp_path, capsys, value):
    (tmp_path / "w.pt").write_bytes(pickle.dumps(value))
    refuses(lambda: load_weights(net(), tmp_path / "w.pt"), r"expected a whole .pt file")
    for new in (True, False):
        torch.save(value, tmp_path / "w.pt", _use_new_zipfile_serialization=new)
        refuses(lambda: load_weights(net(), tmp_path / "w.pt"), REFUSED)
    whole = io.BytesIO()
    torch.save(net().state_dict(), whole)  # the new form behind the old one: torch.load reads what stands first
    (tmp_path / "w.pt").write_bytes((tmp_path / "w.pt").read_bytes() + whole.getvalue())
    refuses(lambda: load_weights(net(), tmp_path / "w.pt"), REFUSED)
    assert capsys.readouterr().out == ""


def test_the_old_form_of_a_network_on_a_gpu_is_read_on_the_host(tmp_path):
    saved = net()
    torch.save(saved.state_dict(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "w.pt").read_bytes()
    assert whole.count(b"ctorch\nFloatStorage") == 1  # the others refer to it
    moved = whole.replace(b"ctorch\nFloatStorage", b"ctorch.cuda\nFloatStorage")
    (tmp_path / "w.pt").write_bytes(moved.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0"))
    network = net()
    load_weights(network, tmp_path / "w.pt")
    assert same(network, saved.state_dict())


def test_every_cut_of_a_file_of_the_old_form_is_one_error(tmp_path):
    torch.save(net().state_dict(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "w.pt").read_bytes()
    for end in (0, 3, 30, 200, len(whole) // 2, len(whole) - 1):
        (tmp_path / "w.pt").write_bytes(whole[:end])
        told = "expected a (whole .pt file|state dict) of plain tensors"
        refuses(lambda: load_weights(net(), tmp_path / "w.pt"), told)


def test_what_unpacks_to_more_than_the_network_needs_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROOM", 10_000)
    np.savez_compressed(tmp_path / "w.npz", a=np.zeros(10**6))
    assert (tmp_path / "w.npz").stat().st_size < 10_000
    refuses(lambda: load_weights(net(), tmp_path / "w.npz"), r"it unpacks to 8,\d\d\d,\d\d\d bytes")
    torch.save({"a": torch.zeros(10**5)}, tmp_path / "w.pt")
    refuses(lambda: load_weights(net(), tmp_path / "w.pt"), r"expected at most .* bytes for this network")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        whole = zipfile.ZipFile(tmp_path / "w.pt")
        for entry in whole.namelist():
            packed.writestr(entry, whole.read(entry))
    assert (tmp_path / "packed.pt").stat().st_size < 10_000
    refuses(lambda: load_weights(net(), tmp_path / "packed.pt"), r"its entries are larger than the file")


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
def test_a_damaged_file_is_one_clear_error(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    write(path, net().state_dict())
    whole = path.read_bytes()
    for damaged in (b"", b"nothing", whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"expected an? (whole )?{suffix} file of plain \w+ .*, got") as error:
            load_weights(net(), path)
        assert "\n" not in str(error.value)


def test_the_folder_of_the_data_comes_before_that_of_the_task(tmp_path):
    first, second = tmp_path / "data", tmp_path / "task"
    for each in (first, second):
        each.mkdir()
    (second / "w.pt").touch()
    assert find_file("w.pt", [first, second]) == second / "w.pt"
    (first / "w.pt").touch()
    assert find_file("w.pt", [first, second]) == first / "w.pt"
    assert find_file(str(second / "w.pt"), [first]) == second / "w.pt"
    for folders, places in (([first, second], ".*data/v.pt or .*task/v.pt"), ([], "v.pt")):
        told = rf"expected network.weights = 'v.pt' at {places}, got nothing there"
        refuses(partial(find_file, "v.pt", folders, "network.weights = "), told, FileNotFoundError)


TASK = """
methods = ["map"]
data = { name = "two_moons", count = 60 }
network = { name = "MLP", hidden = [6], batch_norm = true, weights = "w.safetensors" }
training = { epochs = 1, lr = 1e-12, threads = 1 }
evaluation = { corrupt = "none" }
"""


@pytest.fixture
def task_file(tmp_path):
    (tmp_path / "task").mkdir()
    path = tmp_path / "task" / "mine.toml"
    path.write_text(TASK)
    return path


def close(posterior, state) -> bool:
    trained = dict(posterior.member(0).named_parameters())
    return all(torch.allclose(trained[name], state[name], atol=1e-6) for name in trained)


def test_a_run_starts_from_the_file_beside_the_task_or_in_the_folder_of_the_data(tmp_path, task_file, monkeypatch):
    beside, data = net().state_dict(), net().state_dict()
    write(task_file.parent / "w.safetensors", beside)
    task = load_task(str(task_file))

    def begins_at(state, out, **where):
        jobs.run_all(task, methods=["map"], seeds=[0], out=tmp_path / out, **where)
        assert close(ds.load(tmp_path / out / "map-seed0" / "posterior"), state)

    begins_at(beside, "a")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "w.safetensors", data)
    begins_at(data, "b", source=str(tmp_path / "data"))
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path / "data"))
    begins_at(data, "c")
    config = Run.open(tmp_path / "c" / "map-seed0").config
    assert config.network["weights"] == "w.safetensors"  # as written


def test_a_training_that_is_shared_starts_from_the_file(tmp_path, task_file):
    state = net().state_dict()
    write(task_file.parent / "w.safetensors", state)
    overrides = ["training.together=true", "training.keep_best=false", "training.epochs=2"]
    jobs.run_all(load_task(str(task_file), overrides=overrides), methods=["map", "swa"], seeds=[0], out=tmp_path / "a")
    assert close(ds.load(tmp_path / "a" / "map-seed0" / "posterior"), state)


def test_a_file_that_is_missing_or_does_not_fit_is_an_error_before_anything_is_written(tmp_path, task_file):
    task = load_task(str(task_file))
    run = partial(jobs.run_all, task, methods=["map"], seeds=[0], out=tmp_path / "a")
    refuses(run, r"expected network\.weights = 'w\.safetensors'", FileNotFoundError)
    write(task_file.parent / "w.safetensors", {"a": torch.zeros(1)})
    refuses(run, "with unexpected a")
    assert not (tmp_path / "a").exists()


def test_members_that_would_all_be_the_same_network_are_an_error(tmp_path, task_file):
    write(task_file.parent / "w.safetensors", net().state_dict())
    task = load_task(str(task_file))
    run = partial(jobs.run_all, methods=["deep_ensemble"], seeds=[0], out=tmp_path / "a")
    refuses(lambda: run(task), "got deep_ensemble, whose 5 members would all start equal")
    run(load_task(str(task_file), overrides=["method.deep_ensemble.members=1"]))


def test_a_run_does_not_go_on_from_other_contents_of_the_file(tmp_path, task_file):
    write(task_file.parent / "w.safetensors", net().state_dict())
    run = Run(tmp_path / "run", run_config(load_task(str(task_file)), "map", 0), load=DataCache())
    run.begin()
    run.begin()
    write(task_file.parent / "w.safetensors", net().state_dict())
    refuses(lambda: run.begin(), r"to hold a run with weights_sha256 = .*, got one with .*; choose another --out")


def test_an_archive_with_its_pickle_in_capitals_is_looked_at_too(tmp_path):
    buffer = io.BytesIO()
    torch.save(Wide(), buffer)
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as renamed:
        whole = zipfile.ZipFile(buffer)
        for entry in whole.namelist():
            renamed.writestr(entry.replace("data.pkl", "DATA.PKL"), whole.read(entry))
    refuses(lambda: load_weights(net(), tmp_path / "w.pt"), r"asks for a bytearray")


@pytest.mark.parametrize(("name", "at"), [("net.npz", -5), ("net.pt", -49)])
def test_a_file_whose_parts_would_begin_before_it_is_named(tmp_path, name, at):
    network, path = net(), tmp_path / name
    write(path, network.state_dict())
    raw = bytearray(path.read_bytes())
    raw[at] = 255  # where the list of parts begins: others are then looked for at a negative place
    path.write_bytes(raw)
    told = rf"expected an? (whole )?\.\w+ file of plain \w+ .*{name}, got .*; save"
    refuses(lambda: load_weights(network, path), told)


# --------------------------------------------------------------------------------------------------------- conversions
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


def convertible_net():
    return ds.nets.MLP(4, 3, hidden=(6,), batch_norm=True)


@pytest.fixture
def weights(tmp_path):
    """A file, and the network whose state is in it."""
    torch.manual_seed(0)
    network = convertible_net()
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
    "needs data": ("map", [*NET, 'method.prior={ empcov = { layer = "layers.0" } }'], "settings that need no data"),
    "other shapes": ("map", [*NET[:3], "network.hidden=[7]", NET[4]], "expected layers.0.weight of shape"),
    "other layers": ("map", NET[:4], "with unexpected layers.1.weight, layers.1.bias, layers.1.running_mean"),
}


@pytest.mark.parametrize(("method", "overrides", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_one_clear_error_and_nothing_is_written(weights, tmp_path, method, overrides, words):
    refuses(lambda: convert(weights[0], method, tmp_path / "out", overrides=overrides), words)
    assert not (tmp_path / "out").exists()


def test_a_method_that_needs_a_setting_says_how_to_give_it(weights, tmp_path, monkeypatch):
    class Sized(ds.NetworksPosterior):
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
    told = "expected the setting modulation of batch_ensemble, got none; pass --set"
    with pytest.raises(ValueError, match=told) as error:
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


def test_a_folder_with_something_in_it_is_left_alone(weights, tmp_path):
    (tmp_path / "out").mkdir()
    convert(weights[0], "map", tmp_path / "out", overrides=NET)  # an empty one will do
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for out in (tmp_path / "out", weights[0]):
        refuses(partial(convert, weights[0], "laplace", out, overrides=NET), "expected a folder that is new or empty")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


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
    for path, told in (("saved", r"saved; .*ds\.load\('.*saved'\) reads it"), ("", "; correct the path")):
        run = partial(convert, tmp_path / path, "map", tmp_path / "out", overrides=NET)
        refuses(run, rf"got a folder at .*{told}", FileNotFoundError)


@pytest.mark.parametrize(
    ("method", "words"),
    [("laplace", "fit_posthoc(loader)"), ("swag", "ds.fit(posterior"), ("tradi", "ds.fit(posterior"), ("map", None)],
)
def test_the_command_says_what_it_took_off_and_what_is_still_to_be_done(weights, tmp_path, command_line, method, words):
    torch.save(torch.nn.DataParallel(weights[1]).state_dict(), weights[0])
    sets = [part for each in NET for part in ("--set", each)]
    given = ("--method", method, *sets, "--out", str(tmp_path / "out"))
    code, out, said = command_line("convert", str(weights[0]), *given)
    assert code == 0
    assert out.strip() == str(tmp_path / "out")
    first, *others = said.splitlines()
    assert first == f"dissensus: 'module.' is removed from all names in {weights[0]}"
    assert len(others) == (words is not None)
    assert all(line.startswith(f"dissensus: {method} is not fitted yet: ") and words in line for line in others)
