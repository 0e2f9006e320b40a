"""Weights that a task's network starts from: three kinds of files, two folders, and files of strangers."""

import io
import pickle
import re
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dissensus as ds
from dissensus.bench.rows.dataset_rows import find_file
from dissensus.bench.rows.task_rows import DataCache
from dissensus.bench.run import initial_weights as module
from dissensus.bench.run import jobs
from dissensus.bench.run.initial_weights import load_weights
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, run_config
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
        (
            torch.zeros(good[name].shape, dtype=torch.int64),
            rf"{name} of shape .* and torch.float32 in .*got .* torch.int64",
        ),
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


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        (
            "w.pt",
            lambda path: torch.save({"net": net().state_dict(), "epoch": 3}, path),
            r"a state dict of tensors in .* got the entries net, epoch",
        ),
        (
            "w.npz",
            lambda path: np.savez(path, a=np.array([Bomb()], dtype=object)),
            r"expected an \.npz file of plain arrays",
        ),
        ("w.npz", announced, "announces 800,000,000,000 bytes and it has"),
        ("w.h5", lambda path: path.touch(), r"expected weights in a file .pt, .pth, .th, .npz, .safetensors, got"),
    ],
)
def test_what_is_no_plain_state_dict_is_named_and_takes_no_memory(tmp_path, name, written, message):
    written(tmp_path / name)
    refuses(lambda: load_weights(net(), tmp_path / name), message)


@pytest.mark.parametrize("value", [Bomb(), Wide(), {"a": Bomb()}])
def test_a_pickle_that_asks_for_more_than_tensors_is_refused_and_not_run(tmp_path, capsys, value):
    torch.save(value, tmp_path / "w.pt")
    refuses(lambda: load_weights(net(), tmp_path / "w.pt"), REFUSED)
    (tmp_path / "w.pt").write_bytes(pickle.dumps(value))
    refuses(lambda: load_weights(net(), tmp_path / "w.pt"), r"expected a whole .pt file")
    assert capsys.readouterr().out == ""


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


@pytest.mark.parametrize("value", [Bomb(), Wide(), {"state_dict": {"a": Bomb()}}])
def test_the_old_form_is_refused_too_where_it_asks_for_more_than_tensors(tmp_path, capsys, value):
    torch.save(value, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
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
        with pytest.raises(ValueError, match=r"expected a (whole .pt file|state dict) of plain tensors"):
            load_weights(net(), tmp_path / "w.pt")


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
    for folder in (first, second):
        folder.mkdir()
    (second / "w.pt").touch()
    assert find_file("w.pt", [first, second]) == second / "w.pt"
    (first / "w.pt").touch()
    assert find_file("w.pt", [first, second]) == first / "w.pt"
    assert find_file(str(second / "w.pt"), [first]) == second / "w.pt"
    for folders, places in (([first, second], ".*data/v.pt or .*task/v.pt"), ([], "v.pt")):
        with pytest.raises(
            FileNotFoundError, match=rf"expected network.weights = 'v.pt' at {places}, got nothing there"
        ):
            find_file("v.pt", folders, "network.weights = ")


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
    jobs.run_all(task, methods=["map"], seeds=[0], out=tmp_path / "a")
    assert close(ds.load(tmp_path / "a" / "map-seed0" / "posterior"), beside)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "w.safetensors", data)
    jobs.run_all(task, methods=["map"], seeds=[0], out=tmp_path / "b", source=str(tmp_path / "data"))
    assert close(ds.load(tmp_path / "b" / "map-seed0" / "posterior"), data)
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path / "data"))
    jobs.run_all(task, methods=["map"], seeds=[0], out=tmp_path / "c")
    assert close(ds.load(tmp_path / "c" / "map-seed0" / "posterior"), data)
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
    with pytest.raises(FileNotFoundError, match=re.escape("expected network.weights = 'w.safetensors'")):
        jobs.run_all(task, methods=["map"], seeds=[0], out=tmp_path / "a")
    write(task_file.parent / "w.safetensors", {"a": torch.zeros(1)})
    refuses(lambda: jobs.run_all(task, methods=["map"], seeds=[0], out=tmp_path / "a"), "with unexpected a")
    assert not (tmp_path / "a").exists()


def test_members_that_would_all_be_the_same_network_are_an_error(tmp_path, task_file):
    write(task_file.parent / "w.safetensors", net().state_dict())
    task = load_task(str(task_file))
    with pytest.raises(ValueError, match="got deep_ensemble, whose 5 members would all start equal"):
        jobs.run_all(task, methods=["deep_ensemble"], seeds=[0], out=tmp_path / "a")
    one = load_task(str(task_file), overrides=["method.deep_ensemble.members=1"])
    jobs.run_all(one, methods=["deep_ensemble"], seeds=[0], out=tmp_path / "a")


def test_a_run_does_not_go_on_from_other_contents_of_the_file(tmp_path, task_file):
    write(task_file.parent / "w.safetensors", net().state_dict())
    config = run_config(load_task(str(task_file)), "map", 0)
    run = Run(tmp_path / "run", config, load=DataCache())
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
    with pytest.raises(ValueError, match=rf"expected an? (whole )?\.\w+ file of plain \w+ .*{name}, got .*; save"):
        load_weights(network, path)
