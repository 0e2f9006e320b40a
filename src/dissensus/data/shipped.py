"""The data in the package: MNIST digits, Fashion-MNIST images as out-of-distribution inputs, and a toy regression.

Licences, rows of the originals and checksums: embedded/LICENSES.md. Made by benchmarks/make_embedded.py.
"""

import io
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from dissensus.data.catalogue import CATALOGUE
from dissensus.data.images import ImageSet
from dissensus.data.numpy_files import npz_arrays


def digits() -> tuple[ImageSet, ImageSet]:
    """(train, test): ImageSets of 10,000 and 2,000 MNIST digits, (N, 1, 28, 28), with equally many of each class.

    Train rows come from MNIST's train file and test rows from its test file, so no writer is in both. Split a validation
    set off the train set with `train_validation`.
    """
    arrays = npz_arrays(_open("digits.npz"))
    return _image_set(arrays, "train_", "mnist"), _image_set(arrays, "test_", "mnist")


def fashion() -> ImageSet:
    """ImageSet of 1,000 Fashion-MNIST test images, (1000, 1, 28, 28), 100 of each class; out-of-distribution for digits."""
    return _image_set(npz_arrays(_open("fashion.npz")), "", "fashion_mnist")


def regression_points() -> Tensor:
    """(400, 2) float64 rows (x, y) of the regression in three clusters used for subspace inference."""
    return torch.from_numpy(np.load(_open("regression_400x2.npy"), allow_pickle=False))


def _open(name: str) -> io.BytesIO:
    return io.BytesIO((files("dissensus.data") / "embedded" / name).read_bytes())


def _image_set(arrays: dict[str, np.ndarray], prefix: str, name: str) -> ImageSet:
    images = torch.from_numpy(arrays[f"{prefix}images"])[:, None]
    labels = torch.from_numpy(arrays[f"{prefix}labels"]).long()
    return ImageSet(images, labels, name, CATALOGUE[name].classes)
