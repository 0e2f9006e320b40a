"""Safe reading of NumPy's files: sizes are checked before NumPy allocates memory; pickles are refused."""

import io
import math
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dissensus.data.untrusted_files import unpacked_limit
from dissensus.utils.file_errors import read_errors

COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those NumPy writes; others may take any amount of memory


def npz_arrays(source: str | Path | BinaryIO, limit: int | None = None) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, by name; arrays of Python objects are refused.

    `limit`: the most bytes it may unpack to; None sets a limit from the file's size.
    """
    if isinstance(source, str | Path):
        with open(source, "rb") as file:
            return npz_arrays(file, limit)
    name = getattr(source, "name", "in memory")
    kind = "an .npz file of plain arrays"
    with read_errors(name, "save it with numpy.savez", kind=kind), zipfile.ZipFile(source) as file:
        size, entries = source.seek(0, 2), file.infolist()
        total, limit = sum(entry.file_size for entry in entries), unpacked_limit(size) if limit is None else limit
        if total > limit:
            raise ValueError(f"it unpacks to {total:,} bytes, and at most {limit:,} are allowed")
        if others := [entry.filename for entry in entries if entry.compress_type not in COMPRESSIONS]:
            raise ValueError(f"{others[0]} is compressed in a way that NumPy does not use")
        return {entry.filename.removesuffix(".npy"): _array(file.read(entry)) for entry in entries}


def npz_pair(path: str | Path, *, labelled: bool = True) -> tuple[np.ndarray, Any]:
    """The arrays images and labels, or x and y, of an .npz file; the second is None if it is absent and not needed."""
    arrays = npz_arrays(path)
    for inputs, targets in (("images", "labels"), ("x", "y")):
        if inputs in arrays and (targets in arrays or not labelled):
            return arrays[inputs], arrays.get(targets)
    raise ValueError(f"expected the keys images and labels, or x and y, got {sorted(arrays)} in {path}; rename them")


def _array(raw: bytes) -> np.ndarray:
    # NumPy allocates the size in the header before it reads: compare it with the actual bytes first.
    file = io.BytesIO(raw)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(file)
    if (promised := math.prod(shape) * max(1, dtype.itemsize)) > len(raw):
        raise ValueError(f"its header announces {promised:,} bytes and it has {len(raw):,}")
    file.seek(0)
    array: np.ndarray = np.load(file, allow_pickle=False)
    return array


def read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array of this shape, memory-mapped copy-on-write: read on access, never written back. Pickled objects are
    refused."""
    if not path.is_file():
        raise FileNotFoundError(f"expected the file {path}, got nothing there; pass the folder of CIFAR-C's files")
    with read_errors(path, "download it again", kind="a NumPy array file at"):
        found = np.lib.format.open_memmap(path, mode="c")  # maps only existing bytes, and no objects
        if found.offset + found.nbytes != path.stat().st_size:
            raise ValueError("the file is longer than its array")
    if found.shape != shape or found.dtype != np.uint8 or not found.flags.c_contiguous:
        got = f"{found.dtype} of shape {found.shape}"
        raise ValueError(f"expected uint8 of shape {shape} in {path}, got {got}; pass CIFAR-C's published files")
    return found
