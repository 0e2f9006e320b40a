"""Image sets: public ones by name and folders of images, read from the user's files; small ones inside the package.

Those in the package are made by benchmarks/make_embedded.py; licences and checksums are in embedded/LICENSES.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.data import file_formats
from dissensus.data.catalogue import CATALOGUE, Folder, locate
from dissensus.data.file_formats import npz_arrays, open_embedded, read_npz
from dissensus.data.segmentation import SUFFIXES, image_files, size_text
from dissensus.utils.checks import integer, one_of
from dissensus.utils.extras import require_extra
from dissensus.utils.file_errors import read_errors


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels and class names, as `image_set` and the other readers return them."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64, from 0
    name: str
    classes: tuple[str, ...]  # names, in the order of the labels

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
    if variant.reader == "idx":  # one file of images and one of labels
        raw, numbers = (file_formats.read_idx(path) for path in paths)
        images, labels = raw[:, None], numbers.astype(np.int64)
    else:
        images, labels = map(np.concatenate, zip(*map(READERS[variant.reader], paths), strict=True))
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


def _cifar_binary(path: Path, *, label_bytes: int) -> Arrays:
    images, labels = file_formats.read_cifar_binary(path, label_bytes=label_bytes)
    return images, labels[:, -1]  # the last label byte is the class, one before it the superclass


def _svhn(path: Path) -> Arrays:
    images, labels = (file_formats.read_mat if path.suffix == ".mat" else read_npz)(path)
    return images, np.where(labels == 10, 0, labels)


READERS: dict[str, Callable[[Path], Arrays]] = {
    "cifar10-binary": partial(_cifar_binary, label_bytes=1),
    "cifar10-python": partial(file_formats.read_cifar_python, labels="labels"),
    "cifar100-binary": partial(_cifar_binary, label_bytes=2),
    "cifar100-python": partial(file_formats.read_cifar_python, labels="fine_labels"),
    **dict.fromkeys(("svhn-mat", "svhn-npz"), _svhn),
}


def digits() -> tuple[ImageSet, ImageSet]:
    """(train, test): ImageSets of 10,000 and 2,000 MNIST digits, (N, 1, 28, 28), with equally many of each class.

    Rows come from MNIST's train and test files, so no writer is in both. `train_validation` splits off a validation set.
    """
    arrays = npz_arrays(open_embedded("digits.npz"))
    return _image_set(arrays, "train_", "mnist"), _image_set(arrays, "test_", "mnist")


def fashion() -> ImageSet:
    """ImageSet of 1,000 Fashion-MNIST test images, (1000, 1, 28, 28), 100 of each class; out-of-distribution for digits."""
    return _image_set(npz_arrays(open_embedded("fashion.npz")), "", "fashion_mnist")


def _image_set(arrays: dict[str, np.ndarray], prefix: str, name: str) -> ImageSet:
    images = torch.from_numpy(arrays[f"{prefix}images"])[:, None]
    return ImageSet(images, torch.from_numpy(arrays[f"{prefix}labels"]).long(), name, CATALOGUE[name].classes)


log = logging.getLogger("dissensus")

Size = int | Sequence[int] | None  # pixels: of a square, or (H, W); None keeps the size
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}  # of PIL, eight bits a channel


def image_folder(
    folder: str | Path, *, classes: Sequence[str] | None = None, size: Size = None, channels: int = 3
) -> ImageSet:
    """Reads FOLDER/CLASS/*.png (or .jpg, .bmp, .tif; subfolders too) as an ImageSet.

    Rows are sorted by class: shuffle them for training. Hidden files and folders are skipped.

    Args:
        classes: class names in the order of the labels; for a test set pass those of the training set. A folder with
            another name is an error. None takes all folders in alphabetical order.
        size: side, or (height, width), in pixels to resize to by antialiased bilinear interpolation; None if sizes are equal.
        channels: 3 for colour, 1 for grey.
    """
    root = Path(folder)
    found = [each.name for each in subfolders(root)]
    if not found:
        raise FileNotFoundError(f"expected a folder for each class in {root}, got none; make {root / 'CLASS'}")
    names = tuple(found if classes is None else classes)
    if strange := [name for name in found if name not in names]:
        fix = "add training images of it, or move its folder away"
        raise ValueError(f"expected the classes {', '.join(names)} in {root}, got {strange[0]!r} too; {fix}")
    parts = {name: image_files(root / name) for name in names if name in found}
    if empty := [name for name, files in parts.items() if not files]:
        raise FileNotFoundError(f"expected images ({', '.join(SUFFIXES)}) in {root / empty[0]}, got none; add some")
    files = [path for several in parts.values() for path in several]
    labels = [names.index(name) for name, several in parts.items() for _ in several]
    return ImageSet(_stack(files, size, channels), torch.tensor(labels), root.name, names)


def image_stack(folder: str | Path, *, size: Size = None, channels: int = 3) -> tuple[Tensor, tuple[str, ...]]:
    """(images (N, C, H, W) uint8, file paths) of all images in a folder and its subfolders; arguments as in `image_folder`."""
    files = image_files(Path(folder))
    if not files:
        raise FileNotFoundError(f"expected images ({', '.join(SUFFIXES)}) in {folder}, got none; name another folder")
    return _stack(files, size, channels), tuple(path.relative_to(folder).as_posix() for path in files)


def subfolders(folder: Path) -> list[Path]:
    """The visible folders in a folder, sorted; empty if the folder does not exist."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in found if each.is_dir() and not each.name.startswith("."))


def eight_bits(image: Any, mode: str, what: str) -> Any:
    """Converts a PIL image to `mode`. More than 8 bits per channel are an error: PIL would clip them at 255."""
    if image.mode not in MODES:
        raise ValueError(f"expected 8 bits per channel in {what}, got the mode {image.mode}; convert it to 8 bits")
    return image.convert(mode)


def _stack(files: Sequence[Path], size: Size, channels: int) -> Tensor:
    require_extra("images")
    from PIL import Image

    one_of("channels", channels, (1, 3))
    given = (size, size) if isinstance(size, int) else size
    shape = None if given is None else (integer("size", given[0]), integer("size", given[1]))
    images, resized = torch.empty(0), 0
    for row, path in enumerate(files):
        with read_errors(path, "save it again", kind="an image"), Image.open(path) as opened:
            image = eight_bits(opened, "L" if channels == 1 else "RGB", str(path))
        if shape is not None and image.size != shape[::-1]:
            image, resized = image.resize(shape[::-1], Image.Resampling.BILINEAR), resized + 1
        found = np.asarray(image).reshape(*image.size[::-1], channels).transpose(2, 0, 1)
        if row == 0:
            images = torch.empty(len(files), *found.shape, dtype=torch.uint8)
        if found.shape != images.shape[1:]:
            got = f"{size_text(images.shape[2:])} in {files[0]} and {size_text(found.shape[1:])} in {path}"
            raise ValueError(f"expected images of one size, got {got}; resize them by size = {int(images.shape[2])}")
        images[row] = torch.from_numpy(np.array(found))
    if resized:
        where, shown = files[0].parents[1], size_text(images.shape[2:])
        log.info("%d of %d images in %s resized to %s", resized, len(files), where, shown)
    return images
