"""Readers of the file formats of public image sets: IDX, NumPy .npz and .npy, MATLAB .mat, CIFAR binary and CIFAR pickles.

Every reader returns NumPy arrays, in bounded memory: sizes are checked before anything is allocated, and no pickle is
executed. A damaged file raises ValueError, whatever its parser raised; a file that cannot be opened raises OSError.

SciPy's `loadmat` knows no limit (2 MB unpack to 2 GB, of an array that `whosmat` lists as 1 × 1), and one wrong byte can end
the process. Python's `pickle` runs code, allocates a memo of any size, and hashes keys nested so deeply that it ends, too.
"""

import gzip
import io
import itertools
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from dissensus.utils.file_errors import read_errors

FETCH_AGAIN = "download the file again"

# IDX is big-endian; the third byte of the file names the type.
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

CIFAR_SHAPE = (3, 32, 32)
UINT8 = ("u1", "|u1", b"u1", b"|u1")  # its names in pickles


def read_idx(path: str | Path) -> np.ndarray:
    """Reads an IDX file, gzipped or not: an array of the shape in its header, in native byte order.

    Layout: 0, 0, type, rank; then rank sizes as big-endian uint32; then the values in C order.
    """
    raw = Path(path).read_bytes()
    if raw[:2] == b"\x1f\x8b":  # judged by content: unpacked downloads often keep the suffix .gz
        with read_errors(path, FETCH_AGAIN, kind="a gzip file"), gzip.open(path) as file:
            size, limit = len(raw), unpacked_limit(len(raw))
            if len(raw := file.read(limit + 1)) > limit:
                raise ValueError(f"it unpacks to more than {limit} bytes from {size}; unpack it yourself")
    with read_errors(path, FETCH_AGAIN, kind="an IDX file (bytes 0, 0, type, rank)"):
        zeros, dtype, rank = raw[:2], np.dtype(IDX_TYPES[raw[2]]), raw[3]
        shape = tuple(int.from_bytes(raw[4 * i + 4 : 4 * i + 8], "big") for i in range(rank))
        expected = 4 + 4 * rank + math.prod(shape) * dtype.itemsize
        if zeros != b"\0\0" or rank == 0 or len(raw) != expected:
            raise ValueError(f"{expected} bytes are needed for shape {shape} of {dtype}, and it has {len(raw)}")
        return np.frombuffer(raw, dtype, offset=4 + 4 * rank).reshape(shape).astype(dtype.newbyteorder("="))


def read_npz(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images (N, C, H, W) uint8 and labels (N,) int64 from an .npz file with the keys images and labels, or x and y.

    Images may be stored (N, H, W), (N, C, H, W) or (N, H, W, C) with one or three channels.
    """
    images, labels = npz_pair(path)
    return pixels(images, path), _labels(labels, len(images), path)


def read_mat(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images (N, C, H, W) uint8 and labels (N,) int64 from a MATLAB file with X (H, W, C, N) and y (N, 1), as in SVHN."""
    raw = Path(path).read_bytes()
    with read_errors(path, FETCH_AGAIN, kind="a MATLAB 5 file"):
        arrays = matlab_arrays(raw)
    if "X" not in arrays or "y" not in arrays or arrays["X"].ndim != 4:
        raise ValueError(f"expected X (H, W, C, N) and y in {path}, got {sorted(arrays)}; pass another file")
    images = pixels(arrays["X"].transpose(3, 2, 0, 1), path)
    labels = arrays["y"].astype(np.int64)  # MATLAB stores numbers as doubles by default
    return images, _labels(labels if (labels == arrays["y"]).all() else arrays["y"], len(images), path)


def read_cifar_binary(path: str | Path, *, label_bytes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Reads images (N, 3, 32, 32) uint8 and labels (N, label_bytes) int64 from a CIFAR binary batch.

    CIFAR-10 has one label byte before each image, CIFAR-100 two: the superclass, then the class.
    """
    raw = np.fromfile(path, np.uint8)
    width = label_bytes + math.prod(CIFAR_SHAPE)
    if raw.size == 0 or raw.size % width:
        fix = "pass label_bytes=1 for CIFAR-10, 2 for CIFAR-100, or download the file again"
        raise ValueError(f"expected rows of {width} bytes, got {raw.size} bytes in {path}; {fix}")
    rows = raw.reshape(-1, width)
    return rows[:, label_bytes:].reshape(-1, *CIFAR_SHAPE).copy(), rows[:, :label_bytes].astype(np.int64)


def read_cifar_python(path: str | Path, *, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """Reads images (N, 3, 32, 32) uint8 and labels (N,) int64 from a CIFAR batch for Python, without executing the pickle.

    labels: the entry to read; "labels" in CIFAR-10, "fine_labels" or "coarse_labels" in CIFAR-100.
    """
    raw = Path(path).read_bytes()
    with read_errors(path, FETCH_AGAIN, kind="a CIFAR batch for Python at"):
        batch = BatchUnpickler(io.BytesIO(raw), encoding="bytes").load()
        entries = {key if isinstance(key, str) else key.decode("latin1"): value for key, value in batch.items()}
        if "data" not in entries or labels not in entries:
            raise ValueError(f"expected data and {labels} in {path}, got {sorted(entries)}; choose labels= from these")
        _, shape, dtype, fortran, content = entries["data"].state  # of a NumPy array; the first is a version
        rows = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
        if rows.shape[1:] != (math.prod(CIFAR_SHAPE),) or dtype.arguments[0] not in UINT8:
            raise ValueError(f"data of shape {rows.shape} instead of (N, {math.prod(CIFAR_SHAPE)}) uint8")
    return np.array(rows, order="C").reshape(-1, *CIFAR_SHAPE), _labels(entries[labels], len(rows), path)


def pixels(images: np.ndarray, path: str | Path) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(f"expected uint8 images of rank 3 or 4, got {images.dtype} {images.shape}; correct {path}")
    if images.ndim == 3:
        return images[:, None]
    first, last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
    if first == last:
        wanted = "one channel axis of size 1 or 3, second or last"
        raise ValueError(f"expected {wanted}, got shape {images.shape} in {path}; store (N, C, H, W)")
    return np.ascontiguousarray(images if first else images.transpose(0, 3, 1, 2))


def _labels(labels: Any, count: int, path: str | Path) -> np.ndarray:
    if isinstance(labels, list) and not all(type(label) is int and 0 <= label < 2**31 for label in labels):
        labels = []  # np.asarray would also unpack other nested objects of the file
    values = np.asarray(labels)
    if values.shape == (count, 1):
        values = values[:, 0]
    if values.dtype.kind not in "iu" or values.shape != (count,):
        raise ValueError(f"expected {count} integer labels, got {values.dtype} {values.shape} in {path}; store classes")
    return values.astype(np.int64)


COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those NumPy writes; others may take any amount of memory


def npz_arrays(source: str | Path | BinaryIO, limit: int | None = None) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, by name, without Python objects; `limit`: the most bytes it may unpack to."""
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


def open_embedded(name: str) -> io.BytesIO:
    """A file of the package's own data."""
    return io.BytesIO((files("dissensus.data") / "embedded" / name).read_bytes())


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
    return np.load(file, allow_pickle=False)


def read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array of this shape, memory-mapped copy-on-write (never written back); pickled objects are refused."""
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


FLOOR = 1 << 26  # any file may unpack to this many bytes
RATIO = 200  # a larger file may unpack to this many times its size; images and tables reach 20, deflate at most 1,000

# Types of the elements of a MATLAB 5 file.
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX, COMPRESSED = 14, 15
NUMERIC_CLASSES = range(6, 16)  # double, single and the integers; below are cells, structures, text and sparse
COMPLEX = 0x0800

# All names in the CIFAR pickles, with the place of the first in NumPy 1 and 2.
_RECONSTRUCT = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
PICKLE_NAMES = {"numpy.ndarray", "numpy.dtype", *_RECONSTRUCT}
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
