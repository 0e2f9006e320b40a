"""Safe readers of MATLAB 5 files and pickles of CIFAR batches: plain data or an error, in bounded memory.

SciPy's `loadmat` crashes the interpreter on a damaged file. Python's `pickle` runs code, allocates a memo of any size, and
hashes keys that are nested so deeply that the process ends. A damaged file may raise any exception here; the readers in
`formats` turn it into one error.
"""

import itertools
import pickle
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

FLOOR = 1 << 26  # any file may unpack to this many bytes
RATIO = (
    200  # a larger file may unpack to this many times its size; images and tables reach 2 to 20, deflate at most 1,000
)

# Types of the elements of a MATLAB 5 file.
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
NUMERIC_CLASSES = range(6, 16)  # double, single and the integers; below are cells, structures, text and sparse
COMPLEX = 0x0800

# All names in the CIFAR pickles. The last is the place of the first in NumPy 2.
PICKLE_NAMES = {
    "numpy.core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy._core.multiarray._reconstruct",
}
# Instructions that hash any object, allocate a size that the file names, or take objects from a table of the process.
REFUSED = (pickle.EMPTY_SET, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4)


def unpacked_limit(size: int) -> int:
    """How many bytes a compressed file of `size` bytes may unpack to."""
    return max(FLOOR, RATIO * size)


def matlab_arrays(raw: bytes) -> dict[str, np.ndarray]:
    """Real numeric arrays of a MATLAB 5 file by name, in Fortran order; other variables are skipped."""
    order, arrays = {b"IM": "<", b"MI": ">"}[raw[126:128]], {}
    for kind, matrix in _elements(memoryview(raw)[128:], order, unpacked_limit(len(raw))):
        if kind != MATRIX:
            continue
        (_, flags), (_, sizes), (_, name), *values = itertools.islice(_elements(matrix, order, 0), 4)
        (flag,) = struct.unpack_from(f"{order}I", flags)
        if flag & 0xFF in NUMERIC_CLASSES and not flag & COMPLEX:
            code, content = values[0]
            array = np.frombuffer(content, order + NUMBERS[code]).reshape(np.frombuffer(sizes, f"{order}i4"), order="F")
            arrays[bytes(name).decode("ascii")] = array.astype(array.dtype.newbyteorder("="))
    return arrays


def _elements(raw: memoryview, order: str, limit: int) -> Iterator[tuple[int, memoryview]]:
    """Yields the type and data of each element; compressed ones unpack to at most `limit` bytes in total."""
    position = 0
    while position < len(raw):
        kind, size = struct.unpack_from(f"{order}II", raw, position)
        start, room = position + 8, size if kind == COMPRESSED else size + -size % 8
        if kind >> 16:  # small element: size and type share a word, up to four bytes of data follow in the same tag
            kind, size, start, room = kind & 0xFFFF, kind >> 16, position + 4, 4
        position, content = start + room, raw[start : start + min(size, room)]
        if len(content) < size:
            raise ValueError(f"an element of {size} bytes does not fit")
        if kind == COMPRESSED:
            stream = zlib.decompressobj()
            content = memoryview(stream.decompress(content, limit + 1))
            limit -= len(content)
            if limit < 0 or not stream.eof:
                raise ValueError("it unpacks to far more bytes than usual, or ends too early")
            yield from _elements(content, order, 0)
        else:
            yield kind, content


class StandIn:
    """Stands in for NumPy's names in a pickle: keeps the arguments of a call and the state of the object."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TextKeys(dict[Any, Any]):
    """A dict that refuses keys other than text, before they are hashed. values: keys and values in turn."""

    def __init__(self, values: Sequence[Any] = ()) -> None:
        for key, value in zip(values[::2], values[1::2], strict=True):
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes):
            raise ValueError("it has a dictionary whose keys are not text")
        super().__setitem__(key, value)


def _load_dict(unpickler: Any) -> None:
    values = unpickler.pop_mark()  # first: it replaces the list that `append` appends to
    unpickler.append(TextKeys(values))


class BatchUnpickler(pickle._Unpickler):  # the one in Python: its memo is a dict, and its instructions can be replaced
    """Reads plain data and `StandIn`s; nothing is imported, and nothing is called but `StandIn`."""

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in REFUSED},
        pickle.EMPTY_DICT[0]: lambda self: self.append(TextKeys()),
        pickle.DICT[0]: _load_dict,
    }

    def find_class(self, module: str, name: str) -> type[StandIn]:
        if f"{module}.{name}" not in PICKLE_NAMES:
            raise ValueError(f"the pickle asks for {f'{module}.{name}'[:80]}, which no CIFAR batch contains")
        return StandIn
