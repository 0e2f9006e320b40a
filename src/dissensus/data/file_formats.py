"""Readers of the file formats of public image sets: IDX, NumPy .npz, MATLAB .mat, CIFAR binary and CIFAR pickles.

Every reader returns NumPy arrays. Sizes are checked against headers and no pickle is executed. A damaged file raises
ValueError, whatever its parser raised; a file that cannot be opened raises OSError.
"""

import gzip
import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from dissensus.data.numpy_files import npz_pair
from dissensus.data.untrusted_files import BatchUnpickler, matlab_arrays, unpacked_limit
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
