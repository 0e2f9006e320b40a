"""Safe readers of untrusted MATLAB 5 files, pickles and compressed bytes: plain data or an error, in bounded memory.

The usual readers are not safe with untrusted files. SciPy's `loadmat` can crash the interpreter on a damaged file. Python's
`pickle` runs code; a file can also make it allocate a memo of 2³¹ entries, or nest objects so deeply that hashing them ends
the process. `gzip` unpacks a small file to gigabytes. A damaged file may raise any exception here; the readers in `formats`
turn it into one error.
"""

import itertools
import math
import pickletools
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

FLOOR = 1 << 26  # any file may unpack to this many bytes
RATIO = (
    200  # a larger file may unpack to this many times its size; images and tables reach 2 to 20, deflate at most 1,000
)
GZIP, ZLIB = 31, 15  # zlib's numbers for the two containers
PARTS = 1000  # most parts of a gzip file


def most(size: int) -> int:
    """How many bytes a compressed file of `size` bytes may unpack to."""
    return max(FLOOR, RATIO * size)


def inflated(raw: bytes | memoryview, limit: int, *, container: int) -> bytes:
    """The unpacked bytes, at most `limit` of them; a gzip file may have several parts."""
    parts: list[bytes] = []
    left, rest = limit, bytes(raw)
    while rest and len(parts) <= PARTS:
        stream = zlib.decompressobj(container)
        parts.append(stream.decompress(rest, left + 1))
        left -= len(parts[-1])
        if left < 0 or not stream.eof:
            much = f"it unpacks to more than {limit} bytes from {len(raw)}, far more than usual; unpack it yourself"
            raise ValueError(much if left < 0 else "it ends too early")
        rest = stream.unused_data.lstrip(b"\0") if container == GZIP else b""  # files from tapes are padded with zeros
    if rest:
        raise ValueError(f"more than {PARTS} parts")
    return b"".join(parts)


# ---------------------------------------------------------------------------------------------------- MATLAB 5
# A file is a header of 128 bytes and then elements: a tag (type and size, 32 bits each) and the data, padded to 8 bytes.

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
NUMERIC_CLASSES = range(6, 16)  # double, single and the integers; below are cells, structures, text and sparse
COMPLEX = 0x0800


def matlab_arrays(raw: bytes) -> dict[str, np.ndarray]:
    """Real numeric arrays of a MATLAB 5 file by name, in Fortran order; other variables are skipped."""
    order = {b"IM": "<", b"MI": ">"}[raw[126:128]]
    elements = _unpacked(memoryview(raw)[128:], order, most(len(raw)))
    matrices = (_matrix(content, order) for kind, content in elements if kind == MATRIX)
    return dict(found for found in matrices if found is not None)


def _unpacked(raw: memoryview, order: str, limit: int) -> Iterator[tuple[int, memoryview]]:
    """The elements of a file, with compressed ones unpacked to at most `limit` bytes in total. Compression is never nested."""
    for kind, content in _elements(raw, order):
        if kind == COMPRESSED:
            inside = inflated(content, limit, container=ZLIB)
            limit -= len(inside)
            yield from _elements(memoryview(inside), order)
        else:
            yield kind, content


def _elements(raw: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yields the type and data of each element."""
    position = 0
    while position < len(raw):
        (word,) = struct.unpack_from(f"{order}I", raw, position)
        if word >> 16:  # small element: size and type share a word, up to four bytes of data follow in the same tag
            kind, size, start, end = word & 0xFFFF, word >> 16, position + 4, position + 8
        else:
            kind, (size,) = word, struct.unpack_from(f"{order}I", raw, position + 4)
            start = position + 8
            end = start + size if kind == COMPRESSED else start + size + -size % 8
        if start + size > min(end, len(raw)):
            raise ValueError(f"an element of {size} bytes does not fit")
        yield kind, raw[start : start + size]
        position = end


def _matrix(raw: memoryview, order: str) -> tuple[str, np.ndarray] | None:
    """Name and array of a matrix element: its parts are flags, sizes, name and values, each an element."""
    (_, flags), (_, sizes), (_, name), *values = itertools.islice(_elements(raw, order), 4)
    (kind,) = struct.unpack_from(f"{order}I", flags)
    if kind & 0xFF not in NUMERIC_CLASSES or kind & COMPLEX:
        return None
    code, content = values[0]
    shape = np.frombuffer(sizes, f"{order}i4").tolist()
    array = np.frombuffer(content, order + NUMBERS[code])
    if min(shape) < 0 or array.size != math.prod(shape):  # reshape would infer a size given as −1
        raise ValueError(f"a matrix of size {shape} does not fit its {array.size} numbers")
    return bytes(name).decode("ascii"), array.reshape(shape, order="F").astype(array.dtype.newbyteorder("="))


# ---------------------------------------------------------------------------------------------------- pickles

PLAIN = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# How many values an instruction takes off the stack; those of MARKED take all above the last mark.
TAKEN = {**TUPLES, "APPEND": 1, "SETITEM": 2, "STACK_GLOBAL": 2, "REDUCE": 2, "BUILD": 1}
MARKED = {"TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"}


@dataclass(eq=False, slots=True)
class Record:
    """An object that the pickle would build by calling a function: the call's arguments and the object's state."""

    arguments: Any = None
    state: Any = None


def plain_pickle(raw: bytes, names: set[str]) -> Any:
    """Contents of a pickle of numbers, text, lists, tuples, dictionaries and records of `names` ("module name").

    Interprets only a few instructions: nothing is imported or called, and only text is hashed.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # stacks under the marks
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(raw):
        name = opcode.name
        if name in MARKED:
            taken, stack = stack, below.pop()
        else:
            taken = [stack.pop() for _ in range(TAKEN.get(name, 0))][::-1]
        if name in PLAIN:
            stack.append(argument.encode("latin1") if "STRING" in name else argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in ("EMPTY_LIST", "LIST"):
            stack.append(taken)
        elif name in ("EMPTY_DICT", "DICT"):
            stack.append(_pairs(taken))
        elif name in (*TUPLES, "TUPLE"):
            stack.append(tuple(taken))
        elif name in ("APPEND", "APPENDS"):
            stack[-1].extend(taken)
        elif name in ("SETITEM", "SETITEMS"):
            stack[-1].update(_pairs(taken))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            asked = argument if name == "GLOBAL" else " ".join(taken)
            if asked not in names:
                raise ValueError(f"the pickle asks for {asked[:80].replace(' ', '.')}, which no CIFAR batch contains")
            stack.append(Record())
        elif name == "REDUCE":
            stack.append(Record(taken[1]))
        elif name == "BUILD":
            stack[-1].state = taken[0]
        elif name == "STOP":
            (result,) = stack
            return result
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the instruction {name}, which plain data do not need")


def _pairs(values: list[Any]) -> dict[Any, Any]:
    """A dict from alternating keys and values; keys must be text."""
    if not all(isinstance(key, str | bytes) for key in values[::2]):
        raise ValueError("it has a dictionary whose keys are not text")
    return dict(zip(values[::2], values[1::2], strict=True))
