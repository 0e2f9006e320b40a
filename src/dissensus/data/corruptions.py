"""The nineteen corruptions of CIFAR-10-C at five severities, batched, on any device, with one random stream per image.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019.
The constants in embedded/corruptions.toml are those of CIFAR-10-C for 32×32 images. If an image's shorter side has S pixels,
lengths are scaled by S/32; those in whole pixels (a disk's radius, the reach of glass, the size of a flake) never shrink.
"""

import operator
import tomllib
import zlib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.data import corruption_effects as effects
from dissensus.data.file_formats import open_embedded, read_array
from dissensus.data.image_arithmetic import Draws, from_levels, image_keys
from dissensus.utils.checks import integer, number, one_of


class Recipe(NamedTuple):
    """One severity of one corruption: the operation, its constants, and which of them are lengths in pixels."""

    operation: Callable[..., Tensor]
    constants: tuple[float, ...]
    lengths: tuple[int, ...] = ()  # positions of constants scaled by S/32
    whole: tuple[int, ...] = ()  # positions of constants scaled by max(1, S/32)


def _recipes(name: str, parts: list[dict[str, Any]]) -> tuple[Recipe, ...]:
    """Severities 1 … 5 of a corruption, from its tables in the package's file."""
    places = ([tuple(part.get(key, ())) for key in ("lengths", "whole")] for part in parts)
    return tuple(
        Recipe(getattr(effects, part.get("operation", name)), tuple(constants), *scaled)
        for part, scaled in zip(parts, places, strict=True)
        for constants in part["severities"]
    )


_TABLES = tomllib.load(open_embedded("corruptions.toml"))
RECIPES = {name: _recipes(name, parts) for group in _TABLES.values() for name, parts in group.items()}

BENCHMARK: tuple[str, ...] = tuple(_TABLES["benchmark"])
EXTRA: tuple[str, ...] = tuple(_TABLES["extra"])
CORRUPTIONS: tuple[str, ...] = BENCHMARK + EXTRA

_SMALLEST_SIDE, _ROWS_PER_SEVERITY = 8, 10_000  # of images, and of the published files
# Values processed at once: bounds memory. A processor's cache holds few; a GPU waits for launches if they are few.
_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 23


@torch.no_grad()
def corrupt(
    images: Tensor, name: str, severity: int, *, seed: int = 0, index: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Corrupts images (B, C, H, W); returns the same shape and dtype.

    As in the published code, operations take eight-bit images and truncate (do not round) their result to eight bits.
    Floating images are first rounded to multiples of 1/255; the results are multiples of 1/255 too.

    Args:
        images: uint8, or floating in [0, 1], with C = 1 or 3 channels. On greyscale images coloured effects use their luma.
        name: one of `CORRUPTIONS`.
        severity: 1 … 5.
        seed: random numbers depend only on the seed, the name, the severity and the image's index.
        index: (B,) the images' positions in their data set; 0 … B−1 by default.
    """
    one_of("name", name, CORRUPTIONS)
    number("severity", integer("severity", severity), most=5)
    _check_images(images)
    index = _checked_index(index, images)
    levels = images if images.dtype == torch.uint8 else (images.float() * 255).round().to(torch.uint8)

    side = min(images.shape[-2:])
    operation, constants = RECIPES[name][severity - 1].operation, scaled_constants(name, severity, side)
    keys = image_keys(operator.index(seed), zlib.crc32(f"{name} {severity}".encode()), index)
    # float64 as in the published pipeline: truncating to eight bits meets exact ties. Apple's devices have no float64.
    dtype = torch.float32 if images.device.type == "mps" else torch.float64
    corrupted = torch.empty_like(levels)
    rows = max(1, (_GPU_CHUNK if images.is_cuda else _CHUNK) // max(1, images[:1].numel()))
    for start in range(0, len(images), rows):
        part = slice(start, start + rows)
        result = operation(from_levels(levels[part].contiguous().to(dtype)), Draws(keys[part], dtype), *constants)
        corrupted[part] = (result.clamp(0, 1) * 255).to(torch.uint8)
    return corrupted if images.dtype == torch.uint8 else from_levels(corrupted.to(dtype)).to(images.dtype)


def scaled_constants(name: str, severity: int, side: int) -> tuple[float, ...]:
    """The constants of a corruption for images whose shorter side has `side` pixels; 32 gives the published ones."""
    recipe, scale = RECIPES[name][severity - 1], side / 32
    return tuple(
        constant * scale if i in recipe.lengths else constant * max(1.0, scale) if i in recipe.whole else constant
        for i, constant in enumerate(recipe.constants)
    )


def read_cifar_c(folder: str | PathLike[str], name: str, severity: int | None = None) -> tuple[Tensor, Tensor]:
    """Reads the published CIFAR-10-C or CIFAR-100-C: images (N, 3, 32, 32) uint8 and labels (N,) int64.

    N is 10,000 for one severity, 50,000 for all (None). Images are memory-mapped from `folder`/`name`.npy; pickles are refused.
    """
    one_of("name", name, CORRUPTIONS)
    if severity is not None:
        number("severity", integer("severity", severity), most=5)
    images = read_array(Path(folder) / f"{name}.npy", (5 * _ROWS_PER_SEVERITY, 32, 32, 3))
    labels = read_array(Path(folder) / "labels.npy", (5 * _ROWS_PER_SEVERITY,))
    size = _ROWS_PER_SEVERITY
    rows = slice(None) if severity is None else slice((severity - 1) * size, severity * size)
    return torch.from_numpy(images[rows]).permute(0, 3, 1, 2), torch.from_numpy(labels[rows]).long()


def _check_images(images: Tensor) -> None:
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"expected uint8 or floating images, got {images.dtype}; convert levels by .to(torch.uint8)")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[-2:]) < _SMALLEST_SIDE:
        wanted = f"images of shape (B, 1 or 3, H, W) and at least {_SMALLEST_SIDE} pixels a side"
        fix = "move the channels with permute(0, 3, 1, 2), add a batch axis with images[None], or resize them"
        raise ValueError(f"expected {wanted}, got {tuple(images.shape)}; {fix}")
    if images.is_floating_point() and images.numel():
        low, high = images.min().item(), images.max().item()
        if not (low >= 0 and high <= 1):
            fix = "corrupt before normalising (ds.Corruptions([...], standardiser=...)), or divide levels by 255"
            raise ValueError(f"expected floating images in [0, 1], got values from {low:.4g} to {high:.4g}; {fix}")


def _checked_index(index: Tensor | Sequence[int] | None, images: Tensor) -> Tensor:
    """(B,) int64 on the images' device."""
    if index is None:
        return torch.arange(len(images), device=images.device)
    index = torch.as_tensor(index, device=images.device)
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool or index.shape != (len(images),):
        wanted, got = f"whole numbers of shape ({len(images)},)", f"{index.dtype} of shape {tuple(index.shape)}"
        raise ValueError(f"expected index as {wanted}, got {got}; pass torch.arange(start, start + {len(images)})")
    return index.to(torch.int64)
