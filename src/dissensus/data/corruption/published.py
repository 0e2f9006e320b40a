"""Reader of the published CIFAR-10-C and CIFAR-100-C files (Hendrycks and Dietterich 2019)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus.data.npy import npy_header

ROWS_PER_SEVERITY = 10_000


def read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape, uint8, memory-mapped copy-on-write: nothing is read before it is looked at, nothing is
    written back. Pickled objects are refused."""
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the file {path}, got nothing there; unpack the CIFAR-C archive and pass the folder of .npy files"
        )
    try:
        with path.open("rb") as file:
            found, fortran, dtype, start = npy_header(file)
            size = file.seek(0, 2)
    except ValueError as error:
        raise ValueError(
            f"expected a NumPy array file at {path}, got one that cannot be read ({error}); download it again"
        ) from error
    if found != shape or dtype != np.uint8 or fortran:
        raise ValueError(
            f"expected uint8 of shape {shape} in {path}, got {dtype} of shape {found}; "
            "pass the folder of the published CIFAR-10-C or CIFAR-100-C files"
        )
    if size != start + math.prod(shape):
        raise ValueError(
            f"expected a NumPy array file at {path} of {start + math.prod(shape)} bytes, got {size}; download it again"
        )
    return np.memmap(path, np.uint8, mode="c", offset=start, shape=shape)


def read_published(folder: Path, name: str, severity: int | None) -> tuple[Tensor, Tensor]:
    """(N, 3, 32, 32) uint8 images, mapped from the file, and (N,) int64 labels; N = 10,000, or 50,000 for None."""
    rows = 5 * ROWS_PER_SEVERITY
    images = read_array(folder / f"{name}.npy", (rows, 32, 32, 3))
    labels = read_array(folder / "labels.npy", (rows,))
    start, stop = (0, rows) if severity is None else ((severity - 1) * ROWS_PER_SEVERITY, severity * ROWS_PER_SEVERITY)
    pixels = torch.from_numpy(images[start:stop]).permute(0, 3, 1, 2)  # a view: (N, 3, 32, 32)
    return pixels, torch.from_numpy(labels[start:stop]).long()
