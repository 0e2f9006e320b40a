"""Reader of the published CIFAR-10-C and CIFAR-100-C files (Hendrycks and Dietterich 2019)."""

from pathlib import Path

import numpy as np

from dissensus.numerics.damage import reading


def read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array of this shape, memory-mapped copy-on-write: read on access, never written back. Pickled objects are
    refused."""
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the file {path}, got nothing there; unpack the CIFAR-C archive and pass the folder of .npy files"
        )
    with reading(path, "download it again", kind="a NumPy array file at"):
        found = np.lib.format.open_memmap(path, mode="c")  # maps only existing bytes, and no objects
        if found.offset + found.nbytes != path.stat().st_size:
            raise ValueError("the file is longer than its array")
    if found.shape != shape or found.dtype != np.uint8 or not found.flags.c_contiguous:
        raise ValueError(
            f"expected uint8 of shape {shape} in {path}, got {found.dtype} of shape {found.shape}; "
            "pass the folder of the published CIFAR-10-C or CIFAR-100-C files"
        )
    return found
