"""Numeric arrays of MATLAB 5 files, as SVHN is published in.

Written out here because SciPy's reader can bring the interpreter down on a damaged file, and sixty lines spare a dependency.
A file is a header of 128 bytes and then elements: a tag (type and size, 32 bits each) and the data, padded to 8 bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
NUMERIC_CLASSES = range(6, 16)  # double, single and the integers; below are cells, structures, text and sparse
COMPLEX = 0x0800


def mat_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Real numeric arrays of a MATLAB 5 file by name, Fortran order; other kinds of variable are passed over."""
    raw = memoryview(Path(path).read_bytes())
    try:
        order = {b"IM": "<", b"MI": ">"}[bytes(raw[126:128])]
        matrices = (_matrix(content, order) for kind, content in _elements(raw[128:], order) if kind == MATRIX)
        return dict(found for found in matrices if found is not None)
    except (KeyError, ValueError, OverflowError, RecursionError, struct.error, zlib.error) as error:
        raise ValueError(f"expected a MATLAB 5 file, got {path}: {error!r}; fetch the file again") from error


def _elements(raw: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and data of one element after the other; compressed ones are opened."""
    position = 0
    while position < len(raw):
        (word,) = struct.unpack_from(f"{order}I", raw, position)
        if word >> 16:  # small element: size and type share a word, up to four bytes of data follow in the same tag
            kind, size, start, end = word & 0xFFFF, word >> 16, position + 4, position + 8
        else:
            kind, (size,) = word, struct.unpack_from(f"{order}I", raw, position + 4)
            start = position + 8
            end = start + size if kind == COMPRESSED else start + size + -size % 8
        if start + size > len(raw):
            raise ValueError(f"an element of {size} bytes ends after the file")
        if kind == COMPRESSED:
            yield from _elements(memoryview(zlib.decompress(raw[start : start + size])), order)
        else:
            yield kind, raw[start : start + size]
        position = end


def _matrix(raw: memoryview, order: str) -> tuple[str, np.ndarray] | None:
    """Name and array of a matrix element: its parts are flags, sizes, name and values, each an element."""
    parts = _elements(raw, order)
    flags = struct.unpack_from(f"{order}I", _next(parts), 0)[0]
    sizes = np.frombuffer(_next(parts), f"{order}i4")
    name = bytes(_next(parts)).decode("ascii")
    if flags & 0xFF not in NUMERIC_CLASSES or flags & COMPLEX:
        return None
    kind, values = next(parts, (None, memoryview(b"")))
    if kind not in NUMBERS or len(values) != math.prod(sizes.tolist()) * np.dtype(NUMBERS[kind]).itemsize:
        raise ValueError(f"{name} of size {sizes.tolist()} does not fit its {len(values)} bytes of data")
    array = np.frombuffer(values, order + NUMBERS[kind]).reshape(sizes.tolist(), order="F")
    return name, array.astype(array.dtype.newbyteorder("="))


def _next(parts: Iterator[tuple[int, memoryview]]) -> memoryview:
    for _, content in parts:
        return content
    raise ValueError("a matrix without its parts")
