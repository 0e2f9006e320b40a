"""Readers of the files public image sets come in: IDX, NumPy .npz, MATLAB .mat, CIFAR binary and CIFAR pickles.

Every reader gives NumPy arrays and trusts nothing: sizes are checked against headers, no pickle is executed, and a
damaged file is a ValueError whatever the parser underneath raised. A file that cannot be opened is an OSError.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dissensus.data.bounded import GZIP, inflated, most
from dissensus.data.mat import mat_arrays
from dissensus.data.npy import npz_arrays
from dissensus.data.pickles import Record, plain_pickle

__all__ = ["npz_arrays", "read_cifar_binary", "read_cifar_python", "read_idx", "read_mat", "read_npz"]

# IDX is big-endian; the third byte of the file names the type.
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

CIFAR_SHAPE = (3, 32, 32)

# All that the CIFAR pickles name. The last is where NumPy 2 keeps the first.
PICKLE_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
}


def read_idx(path: str | Path) -> np.ndarray:
    """Array of the shape in the header, native byte order, of an IDX file, gzipped or not.

    Layout: 0, 0, type, rank; then rank sizes as big-endian uint32; then the values in C order.
    """
    raw = _unzipped(Path(path))
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES or not 0 < raw[3] <= 32:
        raise ValueError(
            f"expected an IDX file (bytes 0, 0, type, rank), got {raw[:4]!r} in {path}; check that it is the right file"
        )
    dtype, rank = np.dtype(IDX_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * rank
    shape = tuple(int.from_bytes(raw[4 * i + 4 : 4 * i + 8], "big") for i in range(rank))
    expected = start + math.prod(shape) * dtype.itemsize
    if len(raw) != expected or len(raw) < start:
        raise ValueError(
            f"expected {expected} bytes for shape {shape} of {dtype}, got {len(raw)} in {path}; fetch the file again"
        )
    if expected == start and math.prod(max(size, 1) for size in shape) >= 2**60:  # no array, even an empty one
        raise ValueError(f"expected values in {path}, got an empty array {shape}; fetch the file again")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def read_npz(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, C, H, W) uint8 and labels (N,) int64 of an .npz file with the keys images and labels, or x and y.

    Images may be stored (N, H, W), (N, C, H, W) or (N, H, W, C) with one or three channels.
    """
    arrays = npz_arrays(path)
    for images, labels in (("images", "labels"), ("x", "y")):
        if images in arrays and labels in arrays:
            return _images(arrays[images], path), _labels(arrays[labels], len(arrays[images]), path)
    raise ValueError(
        f"expected the keys images and labels, or x and y, got {sorted(arrays)} in {path}; rename the arrays"
    )


def read_mat(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, C, H, W) uint8 and labels (N,) int64 of a MATLAB file with X (H, W, C, N) and y (N, 1), as SVHN's."""
    arrays = mat_arrays(path)
    if "X" not in arrays or "y" not in arrays or arrays["X"].ndim != 4:
        raise ValueError(
            f"expected X (H, W, C, N) and y in {path}, got {sorted(arrays)}; check that it is the right file"
        )
    images = _images(arrays["X"].transpose(3, 2, 0, 1), path)
    labels = arrays["y"].astype(np.int64)  # MATLAB's numbers are doubles unless one asks otherwise
    return images, _labels(labels if (labels == arrays["y"]).all() else arrays["y"], len(images), path)


def read_cifar_binary(path: str | Path, *, label_bytes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) uint8 and labels (N, label_bytes) int64 of a CIFAR binary batch.

    CIFAR-10 has one label byte before each image, CIFAR-100 two: the superclass, then the class.
    """
    raw = np.fromfile(path, np.uint8)
    width = label_bytes + math.prod(CIFAR_SHAPE)
    if raw.size == 0 or raw.size % width:
        raise ValueError(
            f"expected rows of {width} bytes ({label_bytes} of labels), got {raw.size} bytes in {path}; "
            f"CIFAR-10 has label_bytes=1, CIFAR-100 label_bytes=2; or fetch the file again"
        )
    rows = raw.reshape(-1, width)
    return rows[:, label_bytes:].reshape(-1, *CIFAR_SHAPE).copy(), rows[:, :label_bytes].astype(np.int64)


def read_cifar_python(path: str | Path, *, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64 of a CIFAR batch for Python, without executing the pickle.

    labels: the entry to read; "labels" in CIFAR-10, "fine_labels" or "coarse_labels" in CIFAR-100.
    """
    raw = Path(path).read_bytes()
    try:
        batch = plain_pickle(raw, PICKLE_NAMES)
    except Exception as error:  # whatever the parser underneath raises, a damaged file is a ValueError
        _damaged("a CIFAR batch for Python", path, error)
    if not isinstance(batch, dict):
        raise ValueError(
            f"expected a dictionary in {path}, got {type(batch).__name__}; check that this is the right file"
        )
    entries = {_text(key): value for key, value in batch.items()}
    if "data" not in entries or labels not in entries:
        raise ValueError(
            f"expected the entries data and {labels} in {path}, got {sorted(entries)}; choose labels= from these"
        )
    rows = _pickled_rows(entries["data"], path)
    return rows.reshape(-1, *CIFAR_SHAPE), _labels(entries[labels], len(rows), path)


def _pickled_rows(record: Any, path: str | Path) -> np.ndarray:
    """(N, 3072) uint8 from the recorded state of a NumPy array: (version, shape, dtype, Fortran order, bytes)."""
    state = record.state if isinstance(record, Record) else None
    if isinstance(state, tuple) and len(state) == 5:
        _, shape, dtype, fortran, raw = state
        plain = isinstance(shape, tuple) and [type(size) for size in shape] == [int, int]
        code = (dtype.arguments if isinstance(dtype, Record) else None) or (None,)
        if (
            plain
            and shape[0] >= 0
            and shape[1] == math.prod(CIFAR_SHAPE)
            and code[0] in ("u1", "|u1", b"u1", b"|u1")
            and isinstance(raw, bytes)
            and len(raw) == math.prod(shape)
        ):
            order = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
            return np.array(order, order="C")
    raise ValueError(
        f"expected data of shape (N, {math.prod(CIFAR_SHAPE)}) uint8 in {path}, got something else; fetch it again"
    )


def _text(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _unzipped(path: Path) -> bytes:
    raw = path.read_bytes()
    if raw[:2] != b"\x1f\x8b":  # by content, since downloads are often unpacked but keep their .gz
        return raw
    try:
        return inflated(raw, most(len(raw)), container=GZIP)
    except ValueError as error:
        _damaged("a gzip file", path, error)


def _images(images: np.ndarray, path: str | Path) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            f"expected uint8 images of rank 3 or 4, got {images.dtype} {images.shape} in {path}; store pixels 0 to 255"
        )
    if images.ndim == 3:
        return images[:, None]
    first, last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
    if first == last:
        raise ValueError(
            f"expected one channel axis of size 1 or 3, second or last, got shape {images.shape} in {path}; "
            f"store (N, C, H, W) or (N, H, W, C)"
        )
    return np.ascontiguousarray(images if first else images.transpose(0, 3, 1, 2))


def _labels(labels: Any, count: int, path: str | Path) -> np.ndarray:
    if isinstance(labels, list) and not all(type(label) is int and 0 <= label < 2**31 for label in labels):
        labels = []  # NumPy would look into whatever else a file may nest there
    values = np.asarray(labels)
    if values.shape == (count, 1):
        values = values[:, 0]
    if values.dtype.kind not in "iu" or values.shape != (count,):
        raise ValueError(
            f"expected {count} integer labels, got {values.dtype} {values.shape} in {path}; one class index an image"
        )
    return values.astype(np.int64)


def _damaged(kind: str, path: str | Path, error: Exception) -> NoReturn:
    raise ValueError(f"expected {kind}, got {path}: {error}; fetch the file again") from error
