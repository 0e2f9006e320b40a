"""Whatever a file holds, a reader reads it or says in one clear error what is wrong, in little time and memory."""

import gzip
import io
import json
import pickle
import random
import re
import resource
import time
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.io import savemat

import dissensus as ds
from dissensus.bench.report.html_report import report_content
from dissensus.bench.run.build import load_weights
from dissensus.bench.run.jobs import file_mismatch_errors, results_of_runs
from dissensus.bench.run.run import Run
from dissensus.bench.run.run_folder import COUNTS, read_counts, read_predictions, write_counts
from dissensus.bench.run.training_watch import DISTANCES, read_measurements
from dissensus.bench.task.config import load_task, run_config
from dissensus.data import file_formats, tabular
from dissensus.evaluation.member_diagnostics import MemberDistances
from dissensus.evaluation.robustness_curves import CorruptedCounts
from dissensus.training.checkpoint import Checkpoints
from dissensus.training.history import Best, Epoch, History
from mutations import mutated
from refusals import refuses
from saved_files import config_of, reseal
from thinning import often, thinned

# of a damaged file of kilobytes; 64 MiB may be unpacked, and are held twice meanwhile
SECONDS, BYTES = 2.0, 200_000_000
x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
pixels = np.random.default_rng(0)


class Reader(NamedTuple):
    files: Callable[[Path], list[str]]  # writes whole ones; gives the names of those to damage
    read: Callable[[Path], object]
    weight: float = 1.0  # share of the usual number of inputs, for readers that are slow even on a whole file


# ---------------------------------------------------------------------------------------------------- readers


def net() -> torch.nn.Module:
    return ds.nets.MLP(2, 2, hidden=(3,), batch_norm=True)


def swag() -> ds.Posterior:
    posterior = ds.SWAG(net(), rank=2, samples=2)
    ds.fit(posterior, [(torch.randn(8, 2), torch.arange(8) % 2)], epochs=4, progress=False, engine="loop")
    return posterior


def laplace() -> ds.Posterior:
    return ds.Laplace(net(), samples=2).fit_posthoc([(torch.randn(8, 2), torch.arange(8) % 2)])


def saved(make: Callable[[], ds.Posterior]) -> Callable[[Path], list[str]]:
    def files(folder: Path) -> list[str]:
        ds.save(make(), folder)
        return ["posterior.safetensors"]

    return files


def ensemble() -> ds.Posterior:
    return ds.DeepEnsemble([net(), net()])


def checkpoint(folder: Path) -> list[str]:
    posterior = ensemble()
    history = History([Epoch(0, 1.0, [1.0, 1.0], 1e-3, 0.1)], 0, "loop")
    optimizer = torch.optim.Adam(posterior.parameters())
    Checkpoints(folder / "run.pt", posterior, optimizer).write(history, Best(1.0, 0, posterior.state_dict()))
    return ["run.pt"]


def resumed(folder: Path) -> object:
    posterior = ensemble()
    return Checkpoints(folder / "run.pt", posterior, torch.optim.Adam(posterior.parameters())).resume()


def written(**files: bytes) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        for name, raw in files.items():
            (folder / name).write_bytes(raw)
        return list(files)

    return write


IDX = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (5, 4, 4)) + bytes(80)
ROWS = pixels.integers(0, 256, (2, 3072), dtype=np.uint8)
CIFAR = {b"data": ROWS, b"labels": [1, 2], b"filenames": [b"a", b"b"]}


def in_memory(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


IMAGES = {"images": pixels.integers(0, 256, (3, 5, 5), dtype=np.uint8), "labels": np.arange(3)}
TABLE = {"x": pixels.normal(size=(6, 2)), "y": np.arange(6) % 2, "class_names": np.array(["a", "b"])}
MAT = {"X": pixels.integers(0, 256, (4, 4, 3, 2), dtype=np.uint8), "y": [[1], [2]]}
TASK = b"""
title = "mine"
methods = ["map", "swag-low", "deep_ensemble"]
baseline = "map"
[data]
name = "two_moons"
count = 40
validation = 10
[network]
name = "MLP"
hidden = [6, 6]
dropout = 0.1
[training]
epochs = 2
batch_size = 20
lr = 0.02
schedule = "cosine"
[method.swag-low]
rank = 2
posterior_temperature = 0.5
[method.deep_ensemble]
members = 3
training = { epochs = 3 }
[evaluation]
severities = [1, 3]
[size.smoke]
data = { count = 30 }
[reference]
source = "paper"
map = { accuracy = [0.9, 0.1] }
"""


def uci(folder: Path) -> list[str]:
    np.savetxt(folder / "data.txt", pixels.normal(size=(8, 3)))
    texts = {"index_features": "0\n1", "index_target": "2", "n_splits": "2"}
    texts |= {"index_train_0": "0\n1\n2", "index_test_0": "3"}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text + "\n")
    return ["data.txt", *(f"{name}.txt" for name in texts)]


def published_set(folder: Path) -> list[str]:
    np.save(folder / "fog.npy", np.zeros((3, 4), np.uint8))
    return ["fog.npy"]


def task(folder: Path) -> object:
    loaded = load_task(str(folder / "task.toml"), size="smoke")
    for method in loaded.methods:
        Run(folder / "run", run_config(loaded, method, 0)).check()
    return loaded


def run_folder(folder: Path) -> list[str]:
    """A run as `dissensus bench` leaves it, small."""
    (folder / "task.toml").write_bytes(TASK)
    run = Run(folder / "run", run_config(load_task(str(folder / "task.toml"), size="smoke"), "map", 0))
    run.begin()
    run.train_alone()
    run.evaluate()
    distances = {"epochs": 0, **dict.fromkeys(MemberDistances._fields, 0.5)}
    (folder / "run" / "distances.jsonl").write_text(json.dumps(distances) + "\n")
    counts = {name: torch.ones(2, 3) for name in COUNTS}
    write_counts(folder / "run" / "corrupt.safetensors", CorruptedCounts(types=("fog",), severities=(1,), **counts))
    names = "config.toml metrics.json arrays.safetensors training.json distances.jsonl corrupt.safetensors"
    return [f"run/{name}" for name in (*names.split(), "predictions/test.safetensors")]


def read_run(folder: Path) -> object:
    run = Run.open(folder / "run")
    read_measurements(folder / "run" / DISTANCES, MemberDistances._fields)
    read_counts(folder / "run" / "corrupt.safetensors")
    read_predictions(folder / "run" / "predictions" / "test.safetensors")
    return run.provenance, run.measure()


def reported(folder: Path) -> object:
    """What `dissensus report` makes of run folders, but for the figures."""
    run = Run.open(folder / "run")
    evaluation = run.measure()
    with file_mismatch_errors([run.folder]):
        return report_content(results_of_runs([run], [evaluation]), with_figures=False)


def summarise(folder: Path) -> object:
    return ds.summarise(folder, [(x, y)])


READERS = {
    "load": Reader(saved(ensemble), ds.load),
    "load swag": Reader(saved(swag), ds.load),
    "load laplace": Reader(saved(laplace), ds.load),
    "summarise": Reader(saved(ensemble), summarise),
    "resume": Reader(checkpoint, resumed),
    "idx": Reader(written(images=IDX), lambda folder: file_formats.read_idx(folder / "images")),
    "idx.gz": Reader(written(images=gzip.compress(IDX)), lambda folder: file_formats.read_idx(folder / "images")),
    "npz": Reader(
        written(set=in_memory(lambda file: np.savez(file, **IMAGES))),
        lambda folder: file_formats.read_npz(folder / "set"),
    ),
    "npz compressed": Reader(
        written(set=in_memory(lambda file: np.savez_compressed(file, **IMAGES))),
        lambda folder: file_formats.read_npz(folder / "set"),
    ),
    "cifar binary": Reader(
        written(batch=b"\1" + ROWS[0].tobytes()), lambda folder: file_formats.read_cifar_binary(folder / "batch")
    ),
    **{
        f"cifar pickle {protocol}": Reader(
            written(batch=pickle.dumps(CIFAR, protocol)),
            lambda folder: file_formats.read_cifar_python(folder / "batch"),
        )
        for protocol in (3, 4)
    },
    "mat": Reader(
        written(set=in_memory(lambda file: savemat(file, MAT))), lambda folder: file_formats.read_mat(folder / "set")
    ),
    "mat compressed": Reader(
        written(set=in_memory(lambda file: savemat(file, MAT, do_compression=True))),
        lambda folder: file_formats.read_mat(folder / "set"),
    ),
    **{
        f"weights in torch's {form} form": Reader(
            written(**{"w.pt": in_memory(partial(torch.save, net().state_dict(), _use_new_zipfile_serialization=new))}),
            lambda folder: load_weights(net(), folder / "w.pt"),
        )
        for form, new in (("old", False), ("new", True))
    },
    "uci": Reader(uci, lambda folder: tabular.read_uci_folder(folder, 0)),
    "tabular": Reader(
        written(set=in_memory(lambda file: np.savez(file, **TABLE))),
        lambda folder: tabular.read_tabular_npz(folder / "set", name="set"),
    ),
    "published": Reader(published_set, lambda folder: file_formats.read_array(folder / "fog.npy", (3, 4))),
    "task": Reader(written(**{"task.toml": TASK}), task),
    "run": Reader(run_folder, read_run),
    "report": Reader(run_folder, reported, weight=0.1),
}


@pytest.mark.parametrize("count", often([20], [2000]))
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_is_one_clear_error(name, count, tmp_path):
    reader = READERS[name]
    names = reader.files(tmp_path)
    whole = {each: (tmp_path / each).read_bytes() for each in names}
    reader.read(tmp_path)
    generator, before = random.Random(f"{name} {count}"), peak_memory(reset=True)
    for number in range(max(1, round(count * reader.weight))):
        each = generator.choice(names)
        (tmp_path / each).write_bytes(mutated(whole[each], generator))
        must_be_clear(lambda: reader.read(tmp_path), f"{name}, input {number} ({each})")
        (tmp_path / each).write_bytes(whole[each])
    reader.read(tmp_path)
    assert peak_memory() - before < BYTES


def peak_memory(*, reset: bool = False) -> int:
    """Bytes that the process has held at most, since the last reset where the system can forget."""
    if reset and Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def must_be_clear(read: Callable[[], object], what: str) -> None:
    """Runs a reader: it returns, or raises an error in our grammar, in little time."""
    start = time.process_time()
    try:
        read()
    except Exception as error:
        clear = re.match(r"expected .*, got .*", str(error), re.DOTALL)
        if not isinstance(error, ValueError | TypeError | OSError) or clear is None:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"{what} took {seconds:.1f} s"


# ---------------------------------------------------------------------------------------------------- configs that lie


def values(generator: random.Random) -> object:
    choices = (0, -1, 1, 3, 10**9, 10**30, 1.5, float("nan"), "a", "", None, True, [], [10**9], {}, {"a": 1}, [[]])
    return generator.choice(choices)


def places(table: object, path: tuple = ()) -> list[tuple]:
    """All paths to values inside tables and lists."""
    inside = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    found = [(*path, key) for key, _ in inside]
    return found + [each for key, value in inside for each in places(value, (*path, key))]


@pytest.mark.parametrize("count", often([12], [2000]))
@pytest.mark.parametrize(("read", "make"), thinned([ds.load, summarise], [ensemble, swag, laplace], every=2))
def test_a_config_that_lies_under_a_checksum_that_fits_is_one_clear_error(make, read, count, tmp_path):
    ds.save(make(), tmp_path)
    whole, text = (tmp_path / "posterior.safetensors").read_bytes(), json.dumps(config_of(tmp_path))
    generator, before = random.Random(count), peak_memory(reset=True)
    for number in range(count):
        config = json.loads(text)
        path = generator.choice(places(config))
        table = config
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = values(generator)
        reseal(tmp_path, config)
        must_be_clear(lambda: read(tmp_path), f"input {number}: {path} = {table[path[-1]]!r}")
        (tmp_path / "posterior.safetensors").write_bytes(whole)
    assert peak_memory() - before < BYTES


# ---------------------------------------------------------------------------------------------------- large promises


def doubled(first: bytes, step: bytes) -> bytes:
    """Instructions of a pickle: an object in an object in an object, each twice in the next."""
    return first + b"q\0" + b"".join(step % (i, i, i + 1) for i in range(60))


def zeros(megabytes: int, form: int) -> bytes:
    """So many as zlib packs them (31: gzip), with no end: a mebibyte again and again."""
    packer, raw = zlib.compressobj(wbits=form), bytes(1 << 20)
    first, *rest = (packer.compress(raw) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + (megabytes - 1) * rest[0]


LISTS, TUPLES = doubled(b"]", b"](h%ch%ceq%c"), doubled(b")", b"h%ch%c\x86q%c")


HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999,)}".ljust(117) + b"\n"
TERABYTES = b"\x93NUMPY\x01\0\x76\0" + HEADER
BOMBS = {
    "idx of terabytes": ("idx", IDX[:4] + b"\xff" * 12),
    "idx of terabytes, gzipped": ("idx", gzip.compress(IDX[:4] + b"\xff" * 12 + bytes(100))),
    "idx of no rows and all columns": ("idx", IDX[:4] + bytes(4) + b"\xff" * 8),
    "gzip bomb": ("idx", zeros(200, 31)),
    "gzip bomb of many parts": ("idx", gzip.compress(bytes(1 << 20)) * 300),
    "npz bomb": ("npz", lambda file: np.savez_compressed(file, images=np.zeros((70, 1000, 1000), np.uint8))),
    "npy of terabytes": ("npz", {"images.npy": TERABYTES}),
    "entry that is no array": ("npz", {"images": b"abc", "labels.npy": b"abc"}),
    "lzma in an npz": ("npz", {"images.npy": bytes(10)}, zipfile.ZIP_LZMA),
    "memo of gigabytes": ("pickle", b"\x80\x02}r\xff\xff\xff\x7f."),
    "nested tuples as a key": ("pickle", b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\1s."),
    "tuples that double as a key": ("pickle", b"\x80\x02}" + TUPLES + b"K\1s."),
    "nested tuples in a set": ("pickle", b"\x80\x04\x8f(" + b")" + b"\x85" * 300_000 + b"\x90."),
    "nested tuples in a dict": ("pickle", b"(" + b")" + b"\x85" * 300_000 + b"K\1d."),
    "bytearray of gigabytes": ("pickle", b"\x80\x05\x96" + (1 << 35).to_bytes(8, "little") + b"."),
    "lists that double": ("pickle", b"\x80\x02}(U\4data" + LISTS + b"U\6labels" + LISTS + b"u."),
    "mat that unpacks": ("mat", None),
    "toml without an end": ("toml", b"a = " + b"[" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_cannot_take_much_time_or_memory(name, tmp_path):
    kind, content, *compression = BOMBS[name]
    path = tmp_path / "file.toml"
    if kind == "mat":
        x = np.zeros((1000, 1000, 20, 4), np.uint8)
        savemat(path, {"X": x, "y": [[1]] * 4}, do_compression=True, appendmat=False)
    elif isinstance(content, dict):
        with zipfile.ZipFile(path, "w", *compression) as archive:
            for entry, raw in content.items():
                archive.writestr(entry, raw)
    else:
        path.write_bytes(content if isinstance(content, bytes) else in_memory(content))
    assert path.stat().st_size < 1_000_000
    read = {
        "idx": file_formats.read_idx, "npz": file_formats.read_npz, "pickle": file_formats.read_cifar_python,
        "mat": file_formats.read_mat, "toml": lambda path: load_task(str(path)),
    }[kind]  # fmt: skip
    before = peak_memory(reset=True)

    def refused() -> None:
        refuses(lambda: read(path), r"expected .*, got")

    must_be_clear(refused, name)
    assert peak_memory() - before < BYTES


def test_a_checkpoint_cannot_ask_for_memory_it_does_not_hold(tmp_path):
    posterior = ensemble()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1, momentum=0.9)
    Checkpoints(tmp_path / "run.pt", posterior, optimizer).write(History(), Best())
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    for value in (torch.zeros(1, dtype=torch.float64).expand(10**12), bytearray(100)):
        state["optimizer"]["state"] = {0: {"momentum_buffer": value}}
        torch.save(state, tmp_path / "run.pt")
        with pytest.raises(ValueError, match="expected a checkpoint of this posterior"):
            Checkpoints(tmp_path / "run.pt", posterior, optimizer).resume()
