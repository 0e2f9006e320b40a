"""Numeric arrays of MATLAB 5 files, as SVHN is published in.

Written out here because SciPy's reader can bring the interpreter down on a damaged file, and sixty lines spare a dependency.
A file is a header of 128 bytes and then elements: a tag (type and size, 32 bits each) and the data, padded to 8 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dissensus.data.bounded import ZLIB, inflated, most

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
NUMERIC_CLASSES = range(6, 16)  # double, single and the integers; below are cells, structures, text and sparse
COMPLEX = 0x0800


def mat_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Real numeric arrays of a MATLAB 5 file by name, Fortran order; other kinds of variable are passed over."""
    raw = memoryview(Path(path).read_bytes())
    try:
        order = {b"IM": "<", b"MI": ">"}[bytes(raw[126:128])]
        limit = most(len(raw))
        matrices = (_matrix(content, order) for kind, content in _opened(raw[128:], order, limit) if kind == MATRIX)
        return dict(found for found in matrices if found is not None)
    except (KeyError, ValueError, OverflowError, RecursionError, struct.error) as error:
        raise ValueError(f"expected a MATLAB 5 file, got {path}: {error!r}; fetch the file again") from error


def _opened(raw: memoryview, order: str, limit: int) -> Iterator[tuple[int, memoryview]]:
    """The elements of a file, compressed ones opened, to `limit` bytes in all; what is inside those is not compressed again."""
    for kind, content in _elements(raw, order):
        if kind == COMPRESSED:
            inside = inflated(content, limit, container=ZLIB)
            limit -= len(inside)
            yield from _elements(memoryview(inside), order)
        else:
            yield kind, content


def _elements(raw: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and data of one element after the other."""
    position = 0
    while position < len(raw):
        (word,) = struct.unpack_from(f"{order}I", raw, position)
        if word >> 16:  # small element: size and type share a word, up to four bytes of data follow in the same tag
            kind, size, start, end = word & 0xFFFF, word >> 16, position + 4, position + 8
            if size > 4:
                raise ValueError(f"a small element of {size} bytes")
        else:
            kind, (size,) = word, struct.unpack_from(f"{order}I", raw, position + 4)
            start = position + 8
            end = start + size if kind == COMPRESSED else start + size + -size % 8
        if start + size > len(raw):
            raise ValueError(f"an element of {size} bytes ends after the file")
        yield kind, raw[start : start + size]
        position = end


def _matrix(raw: memoryview, order: str) -> tuple[str, np.ndarray] | None:
    """Name and array of a matrix element: its parts are flags, sizes, name and values, each an element."""
    parts = _elements(raw, order)
    flags = struct.unpack_from(f"{order}I", _next(parts), 0)[0]
    sizes = np.frombuffer(_next(parts), f"{order}i4")
    if len(sizes) > 32 or (sizes < 0).any():
        raise ValueError("a matrix of impossible size")
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
