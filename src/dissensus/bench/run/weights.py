"""Weights to start from: a network's state dict in a .pt, .npz or .safetensors file, which may be a stranger's.

No code of a file is run, nothing is read that is larger than the network asks for, and every fault is one clear error.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import pickletools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.lib import format as npy
from safetensors import safe_open
from torch import Tensor, nn

from dissensus.core.statistics import statistics_layers
from dissensus.data.locate import FOLDER_VARIABLE

log = logging.getLogger("dissensus")

ENTRIES = ("state_dict", "model")  # under which a checkpoint holds the state dict, the first that there is
WRAPPER = "module."  # what nn.DataParallel puts before every name
# torch.save's form before 1.6: a number, the version, sizes, the object and its storages' names, a pickle each; then numbers.
MAGIC, OLD_PICKLES = 0x1950A86A20F9469CFC6C, 4
# A file may be larger than the network: a member of an ensemble is saved with the storage of all of them.
ROOM, TIMES = 2**28, 32
PICKLE = 2**24  # bytes of names and shapes, for some 100,000 tensors
SHOWN = 20  # names in an error
# All that a state dict's pickle names, beside torch's storages. `weights_only` alone allows more, such as bytearray(10**12).
PICKLED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch.nn.parameter Parameter",
}


def located(name: str, folders: Sequence[Path]) -> Path:
    """The file of that name: a whole path, or in the first of the folders that has it."""
    path = Path(name).expanduser()
    for place in [path] if path.is_absolute() else [folder / path for folder in folders]:
        if place.is_file():
            return place
    looked = (
        "there" if path.is_absolute() else f"in {' or '.join(map(str, folders)) or 'any folder, since none is known'}"
    )
    raise FileNotFoundError(
        f"expected network.weights = {name!r} to be a file, got none {looked}; put it into the folder of --data (or "
        f"{FOLDER_VARIABLE}) or beside the task file, or write the whole path"
    )


def load_weights(network: nn.Module, path: Path) -> None:
    """Fills the network with the state dict in the file: the same names and shapes, in the network's own types."""
    if path.suffix not in READERS:
        raise ValueError(f"expected weights in a file {', '.join(READERS)}, got {path}; save them as one of these")
    expected = network.state_dict()
    limit = ROOM + TIMES * sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    if (size := path.stat().st_size) > limit:
        raise too_large(path, size, limit)
    try:
        state = READERS[path.suffix](path, limit)
    except Exception as error:  # whatever the parser underneath raises on a damaged file, OSError too
        if isinstance(error, Refused) or getattr(error, "filename", None) is not None:  # a name: it could not be opened
            raise
        raise ValueError(
            f"expected a whole {path.suffix} file of plain tensors, got {path} ({_line(error)}); save state_dict() again"
        ) from error
    state = uncounted(network) | unwrapped(state, expected, path)
    check_fits(state, expected, path)
    network.load_state_dict(state)


def check_fits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raises where names, shapes or kinds of numbers are not the network's, or where a number is not finite."""
    missing, extra = [k for k in expected if k not in state], [k for k in state if k not in expected]
    if missing or extra:
        parts = [f"without {_names(missing)}"] * bool(missing) + [f"with unexpected {_names(extra)}"] * bool(extra)
        raise ValueError(
            f"expected the tensors of the network in {path}, got a file {' and '.join(parts)}; save the state_dict() "
            "of a network built with the same arguments"
        )
    for name, tensor in state.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            raise ValueError(
                f"expected {name} of shape {tuple(wanted.shape)} in {path}, got {tuple(tensor.shape)}; build the network "
                "with the sizes that it was saved with"
            )
        if tensor.is_floating_point() != wanted.is_floating_point() or tensor.is_complex():
            raise ValueError(f"expected {name} as {wanted.dtype} in {path}, got {tensor.dtype}; save it in that type")
        if not bool(tensor.to(wanted.dtype).isfinite().all()):
            raise ValueError(f"expected finite numbers in {name} of {path}, got others; save a network that is whole")


def unwrapped(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The state, with one "module." off all names where more are then the network's: nn.DataParallel puts it there."""
    without = {name.removeprefix(WRAPPER): tensor for name, tensor in state.items() if name.startswith(WRAPPER)}
    if len(without) < len(state) or len(without.keys() & expected.keys()) <= len(state.keys() & expected.keys()):
        return dict(state)
    log.info("%r is taken off all names in %s", WRAPPER, path)
    return without


def uncounted(network: nn.Module) -> dict[str, Tensor]:
    """Name -> 0 of the counts of batches that norm layers keep and do not read: files of torch 0.4 and before have none."""
    return {
        f"{name}.{key}" if name else key: torch.zeros_like(buffer)
        for name, layer in statistics_layers(network).items()
        for key, buffer in layer.named_buffers(recurse=False)
        if key == "num_batches_tracked" and layer.momentum is not None
    }


class Refused(ValueError):
    """The error for a file that could be read but is not, or not only, the state dict of such a network."""


def too_large(path: Path, size: int, limit: int) -> Refused:
    return Refused(
        f"expected at most {limit:,} bytes for this network in {path}, got {size:,}; save its state_dict() alone"
    )


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _torch(path: Path, limit: int) -> dict[str, Tensor]:
    with open(path, "rb") as file:
        packed = file.read(4) == b"PK\3\4"  # torch.save's form since 1.6, told as torch.load tells it
    if packed:
        with zipfile.ZipFile(path) as archive:
            for entry in _entries(archive, path, limit):
                # torch finds its pickle whatever the case, and the first of equals: so all of them are looked at
                if not entry.filename.lower().endswith("data.pkl"):
                    continue
                if entry.file_size > PICKLE:
                    raise too_large(path, entry.file_size, PICKLE)
                _check_pickle(archive.open(entry).read(), path)
    else:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            whole: Any = mapped  # read like a file, without taking memory
            if MAGIC not in [argument for _, argument, _ in pickletools.genops(whole)]:
                raise ValueError("neither of torch.save's forms")
            for _ in range(OLD_PICKLES):  # each begins where the last one ended
                _check_pickle(whole, path)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    inner = [key for key in ENTRIES if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
    if inner:
        log.info("of the entries %s in %s %s is read", _names(list(map(str, loaded))), path, inner[0])
        loaded = loaded[inner[0]]
    if not isinstance(loaded, Mapping) or not all(isinstance(each, Tensor) for each in loaded.values()):
        inside = (
            f"the entries {_names(list(map(str, loaded)))}" if isinstance(loaded, Mapping) else type(loaded).__name__
        )
        raise Refused(f"expected a state dict of tensors in {path}, got {inside}; save network.state_dict() alone")
    return {str(name): tensor for name, tensor in loaded.items()}


def _check_pickle(pickled: Any, path: Path) -> None:
    for operation, argument, _ in pickletools.genops(pickled):
        if "GLOBAL" in operation.name and not _plain(argument):
            raise Refused(
                f"expected a state dict of plain tensors in {path}, got one that asks for "
                f"{str(argument).replace(' ', '.')}; save network.state_dict() alone"
            )


def _plain(name: Any) -> bool:
    module, _, last = str(name).partition(" ")
    return name in PICKLED or (module in ("torch", "torch.cuda") and last.endswith("Storage"))


def _numpy(path: Path, limit: int) -> dict[str, Tensor]:
    found = {}
    with zipfile.ZipFile(path) as archive:
        for entry in _entries(archive, path, limit):
            with archive.open(entry) as file:  # the header alone: memory is taken by what it says
                version = npy.read_magic(file)
                shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
            if dtype.kind not in "fiub":
                raise Refused(f"expected arrays of numbers in {path}, got {dtype} in {entry.filename}; save no others")
            if (size := math.prod(shape) * dtype.itemsize) > entry.file_size:
                raise ValueError(f"{entry.filename} says {size:,} bytes and has {entry.file_size:,}")
            with archive.open(entry) as file:
                array = npy.read_array(file, allow_pickle=False)
            found[entry.filename.removesuffix(".npy")] = torch.from_numpy(array.astype(dtype.newbyteorder("=")))
    return found


def _safetensors(path: Path, limit: int) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:  # as large as the file: nothing in it is packed
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _entries(archive: zipfile.ZipFile, path: Path, limit: int) -> list[zipfile.ZipInfo]:
    """The files in an archive, which are not too large when they are unpacked."""
    if (size := sum(entry.file_size for entry in archive.infolist())) > limit:
        raise too_large(path, size, limit)
    return archive.infolist()


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


READERS: dict[str, Callable[[Path, int], dict[str, Tensor]]] = {
    ".pt": _torch,
    ".pth": _torch,
    ".th": _torch,
    ".npz": _numpy,
    ".safetensors": _safetensors,
}
