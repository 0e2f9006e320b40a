"""Image sets by name, read from the user's files: MNIST, Fashion-MNIST, notMNIST, CIFAR-10, CIFAR-100, SVHN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus.data.catalogue import CATALOGUE
from dissensus.data.file_formats import read_cifar_binary, read_cifar_python, read_idx, read_mat, read_npz
from dissensus.data.find_files import Folder, locate


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels and class names.

    Args:
        images: (N, C, H, W) uint8, pixels 0 to 255.
        labels: (N,) int64 class indices, from 0.
        name: name of the set.
        classes: class names, in the order of the labels.
    """

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    name: str
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        right = images.dtype == torch.uint8 and labels.dtype == torch.int64
        if not right or images.ndim != 4 or labels.shape != images.shape[:1]:
            wanted = f"{self.name} as uint8 images (N, C, H, W) and int64 labels (N,)"
            got = " and ".join(f"{each.dtype} {tuple(each.shape)}" for each in (images, labels))
            raise ValueError(f"expected {wanted}, got {got}; pass one class index per image")
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.classes):
            got = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"expected labels from 0 to {len(self.classes) - 1}, got {got}; correct {self.name}")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, rows: Tensor) -> ImageSet:
        """The ImageSet of these rows, in this order; rows: (K,) int64 indices."""
        return replace(self, images=self.images[rows], labels=self.labels[rows])


def image_set(name: str, split: str, *, folder: Folder = None, verify: bool = False) -> ImageSet:
    """Reads one split of a public image set: an ImageSet with images (N, C, H, W) uint8 and labels (N,) int64.

    Nothing is downloaded.

    Args:
        name: "mnist", "fashion_mnist", "notmnist", "cifar10", "cifar100" or "svhn".
        split: "train" or "test"; notMNIST has only "test".
        folder: folder of the files; None means the environment variable DISSENSUS_DATA.
        verify: compares checksums before reading.

    Raises:
        FileNotFoundError: the files are missing; the message names them and their place.
    """
    variant, paths = locate(name, split, folder=folder, verify=verify)
    images, labels = _read_arrays(variant.reader, paths)
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), name, CATALOGUE[name].classes)


def mnist(split: str = "train", *, folder: Folder = None, verify: bool = False) -> ImageSet:
    """Reads MNIST: ImageSet of 60,000 train or 10,000 test digits, (N, 1, 28, 28); arguments as in `image_set`."""
    return image_set("mnist", split, folder=folder, verify=verify)


def fashion_mnist(split: str = "train", *, folder: Folder = None, verify: bool = False) -> ImageSet:
    """Reads Fashion-MNIST: ImageSet of 60,000 train or 10,000 test images, (N, 1, 28, 28); arguments as in `image_set`."""
    return image_set("fashion_mnist", split, folder=folder, verify=verify)


def notmnist(split: str = "test", *, folder: Folder = None, verify: bool = False) -> ImageSet:
    """Reads notMNIST: ImageSet of 10,000 test letters A to J, (N, 1, 28, 28); arguments as in `image_set`."""
    return image_set("notmnist", split, folder=folder, verify=verify)


def cifar10(split: str = "train", *, folder: Folder = None, verify: bool = False) -> ImageSet:
    """Reads CIFAR-10: ImageSet of 50,000 train or 10,000 test photographs, (N, 3, 32, 32); arguments as in `image_set`."""
    return image_set("cifar10", split, folder=folder, verify=verify)


def cifar100(split: str = "train", *, folder: Folder = None, verify: bool = False) -> ImageSet:
    """Reads CIFAR-100: ImageSet of 50,000 train or 10,000 test images, (N, 3, 32, 32), 100 classes; see `image_set`."""
    return image_set("cifar100", split, folder=folder, verify=verify)


def svhn(split: str = "test", *, folder: Folder = None, verify: bool = False) -> ImageSet:
    """Reads SVHN: ImageSet of digits, (N, 3, 32, 32), with class 0 for SVHN's label 10; arguments as in `image_set`."""
    return image_set("svhn", split, folder=folder, verify=verify)


Arrays = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) uint8, labels (N,) int64


def _read_arrays(reader: str, paths: list[Path]) -> Arrays:
    if reader == "idx":  # one file of images and one of labels
        images, labels = (read_idx(path) for path in paths)
        return images[:, None], labels.astype(np.int64)
    parts, numbers = zip(*map(READERS[reader], paths), strict=True)
    return np.concatenate(parts), np.concatenate(numbers)


def _cifar_binary(path: Path, *, label_bytes: int) -> Arrays:
    images, labels = read_cifar_binary(path, label_bytes=label_bytes)
    return images, labels[:, -1]  # the last label byte is the class, one before it the superclass


def _svhn(path: Path) -> Arrays:
    images, labels = (read_mat if path.suffix == ".mat" else read_npz)(path)
    return images, np.where(labels == 10, 0, labels)


READERS: dict[str, Callable[[Path], Arrays]] = {
    "cifar10-binary": partial(_cifar_binary, label_bytes=1),
    "cifar10-python": partial(read_cifar_python, labels="labels"),
    "cifar100-binary": partial(_cifar_binary, label_bytes=2),
    "cifar100-python": partial(read_cifar_python, labels="fine_labels"),
    "svhn-mat": _svhn,
    "svhn-npz": _svhn,
}
