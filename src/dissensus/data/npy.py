"""NumPy's own files, .npy and .npz: what a header promises is compared with the bytes there before memory is taken."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dissensus.data.bounded import most

COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # all that NumPy writes; others take memory as they please


def npz_arrays(source: str | Path | BinaryIO) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, by name; arrays of Python objects are refused."""
    if isinstance(source, str | Path):
        with open(source, "rb") as file:
            return npz_arrays(file)
    name = getattr(source, "name", "the file")
    try:
        with zipfile.ZipFile(source) as archive:
            return _members(archive, source)
    except Exception as error:  # whatever the parsers underneath raise, a damaged file is a ValueError
        raise ValueError(
            f"expected an .npz file of plain arrays, got {name}: {error}; save it with numpy.savez"
        ) from error


def _members(archive: zipfile.ZipFile, source: BinaryIO) -> dict[str, np.ndarray]:
    entries = archive.infolist()
    size = source.seek(0, 2)
    total = sum(entry.file_size for entry in entries)
    if total > most(size):
        raise ValueError(f"{total} bytes in a file of {size}, far more than data usually are")
    found = {}
    for entry in entries:
        if entry.compress_type not in COMPRESSIONS:
            raise ValueError(f"{entry.filename} is compressed in a way NumPy does not use")
        if not entry.filename.endswith(".npy"):
            raise ValueError(f"{entry.filename} is no array")
        with archive.open(entry) as file:
            found[entry.filename.removesuffix(".npy")] = _array(file, entry.file_size)
    return found


def _array(file: Any, size: int) -> np.ndarray:
    shape, fortran, dtype, start = npy_header(file)
    count = math.prod(shape)
    if count * dtype.itemsize != size - start:
        raise ValueError(f"{shape} of {dtype} does not fit its {size - start} bytes")
    raw = file.read()  # to the end, so that the checksum is compared
    flat = np.frombuffer(raw, dtype) if count else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")


def npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, whether in Fortran order, dtype, where the values begin) of a .npy file; ValueError where it is none."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
        start = file.tell()
    except Exception as error:  # NumPy parses a header as Python source, and lets the tokeniser's errors through
        raise ValueError(f"a header that cannot be read ({type(error).__name__}: {error})") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"values of type {dtype}")
    if len(shape) > 32 or not all(type(each) is int and 0 <= each < 2**62 for each in shape):
        raise ValueError("an impossible shape")
    return shape, fortran, dtype, start
