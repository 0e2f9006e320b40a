"""Readers of image files: one folder per class, or one folder of images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.data.images import ImageSet
from dissensus.data.segmentation import SUFFIXES, image_files
from dissensus.utils.checks import integer, one_of
from dissensus.utils.extras import require_extra
from dissensus.utils.file_errors import read_errors

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
        size: side, or (height, width), in pixels to resize to by antialiased bilinear interpolation. None keeps the size;
            images of different sizes are then an error.
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
            got = f"{_size_text(images)} in {files[0]} and {found.shape[1]}×{found.shape[2]} in {path}"
            raise ValueError(f"expected images of one size, got {got}; resize them by size = {int(images.shape[2])}")
        images[row] = torch.from_numpy(np.array(found))
    if resized:
        log.info("%d of %d images in %s resized to %s", resized, len(files), files[0].parents[1], _size_text(images))
    return images


def _size_text(images: Tensor) -> str:
    return "×".join(map(str, images.shape[2:]))
