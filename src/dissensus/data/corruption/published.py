"""Reader of the published CIFAR-10-C and CIFAR-100-C files (Hendrycks and Dietterich 2019)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus.numerics.damage import reading

ROWS_PER_SEVERITY = 10_000


def read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape, uint8, memory-mapped copy-on-write: nothing is read before it is looked at, nothing is
    written back. Pickled objects are refused."""
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the file {path}, got nothing there; unpack the CIFAR-C archive and pass the folder of .npy files"
        )
    with reading(path, "download it again", kind="a NumPy array file at"):
        found = np.lib.format.open_memmap(path, mode="c")  # which maps no more than there is, and no objects
        if found.offset + found.nbytes != path.stat().st_size:
            raise ValueError("its values end before the file")
    if found.shape != shape or found.dtype != np.uint8 or not found.flags.c_contiguous:
        raise ValueError(
            f"expected uint8 of shape {shape} in {path}, got {found.dtype} of shape {found.shape}; "
            "pass the folder of the published CIFAR-10-C or CIFAR-100-C files"
        )
    return found


def read_published(folder: Path, name: str, severity: int | None) -> tuple[Tensor, Tensor]:
    """(N, 3, 32, 32) uint8 images, mapped from the file, and (N,) int64 labels; N = 10,000, or 50,000 for None."""
    rows = 5 * ROWS_PER_SEVERITY
    images = read_array(folder / f"{name}.npy", (rows, 32, 32, 3))
    labels = read_array(folder / "labels.npy", (rows,))
    start, stop = (0, rows) if severity is None else ((severity - 1) * ROWS_PER_SEVERITY, severity * ROWS_PER_SEVERITY)
    pixels = torch.from_numpy(images[start:stop]).permute(0, 3, 1, 2)  # a view: (N, 3, 32, 32)
    return pixels, torch.from_numpy(labels[start:stop]).long()
