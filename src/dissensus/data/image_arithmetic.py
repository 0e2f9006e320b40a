"""Arithmetic of images behind corruptions: random numbers by image, eight-bit levels, luma, and separable linear maps.

Random numbers belong to an image, not to a batch: number j of stream s is a hash of (key of the image, s, j) by
`numerics.hashing`. There is no state, so the numbers depend neither on how images are batched nor on the device.
`torch.Generator` has neither property. Blur, zoom and resize are two small matrices, one for rows and one for columns.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus.numerics.hashing import WEYL, as_signed, mix_bits, shift_right


@dataclass(frozen=True)
class Draws:
    """Random numbers for a batch of images, one key (int64) per image; streams of one key are independent."""

    keys: Tensor  # (B,)
    dtype: torch.dtype = torch.float64

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """(B, *shape): uniform on [0, 1)."""
        bits = 53 if self.dtype == torch.float64 else 24
        words = _words(self.keys, stream, math.prod(shape))  # (B, n)
        return (shift_right(words, 64 - bits).to(self.dtype) * 2.0**-bits).reshape(-1, *shape)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """(B, *shape): standard normal, by Box and Muller's √(−2 log u₁)·(cos 2πu₂, sin 2πu₂); |z| ≤ 6.8."""
        count = math.prod(shape)
        words = _words(self.keys, stream, (count + 1) // 2)  # one word is a pair of 32-bit uniforms
        first = (shift_right(words, 32).to(self.dtype) + 0.5) * 2.0**-32
        angle = (words & 0xFFFFFFFF).to(self.dtype) * (2 * math.pi * 2.0**-32)
        radius = first.log_().mul_(-2).sqrt_()
        pairs = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
        return pairs[:, :count].reshape(-1, *shape)


def image_keys(seed: int, purpose: int, index: Tensor) -> Tensor:
    """(B,) int64: keys of the images with these indices, for a seed and a purpose (any whole numbers)."""
    start = torch.tensor([as_signed(seed)], dtype=torch.int64, device=index.device)
    return mix_bits(mix_bits(mix_bits(start + WEYL) + as_signed(purpose)) + index.to(torch.int64) * WEYL)


def _words(keys: Tensor, stream: int, count: int) -> Tensor:
    """(B, count): 64 random bits each."""
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device) * WEYL
    return mix_bits(mix_bits(keys + as_signed(stream + 1))[:, None] + counter)


def from_levels(levels: Tensor) -> Tensor:
    """levels / 255, correctly rounded: 255 times the result, truncated, gives the level back."""
    return quotient(levels, 255.0)


def quotient(numbers: Tensor, divisor: float) -> Tensor:
    """numbers / divisor, correctly rounded on every device; CUDA multiplies by the reciprocal of a Python number."""
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)


def grey(images: Tensor) -> Tensor:
    """(B, 1, H, W): luma 0.299 R + 0.587 G + 0.114 B; one channel as it is."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor((0.299, 0.587, 0.114), dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def apply_separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(…, H', W'): R X Kᵀ for every image X (…, H, W), with rows R (H', H) and columns K (W', W)."""
    return apply_to_columns(apply_to_rows(images, columns), rows)


def apply_to_rows(images: Tensor, columns: Tensor) -> Tensor:
    """(…, H, W'): X Kᵀ, the matrix (W', W) acting on every row of pixels."""
    return images @ columns.to(images).T


def apply_to_columns(images: Tensor, rows: Tensor) -> Tensor:
    """(…, H', W): R X, the matrix (H', H) acting on every column of pixels."""
    # one large product: a small one for each image costs twice the time
    return apply_to_rows(images.mT.contiguous(), rows).mT.contiguous()


def gaussian_smooth(images: Tensor, sigma: float, *, truncate: float = 4.0, symmetric: bool = False) -> Tensor:
    """(…, H, W): Gaussian blur of standard deviation `sigma` pixels, cut at truncate·σ."""
    height, width = images.shape[-2:]
    rows, columns = (gaussian_matrix(size, sigma, truncate, symmetric) for size in (height, width))
    return apply_separable(images, rows, columns)


@functools.lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, truncate: float = 4.0, symmetric: bool = False) -> Tensor:
    """(size, size): normalised exp(−k²/2σ²); beyond the border the edge pixel, or (`symmetric`) the mirrored image."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.eye(size, dtype=torch.float64)
    taps = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (taps.double() / sigma) ** 2)
    source = torch.arange(size)[:, None] + taps  # (size, taps)
    if symmetric:
        source = source % (2 * size)
        source = torch.minimum(source, 2 * size - 1 - source)
    source = source.clamp(0, size - 1)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, source, (weights / weights.sum()).expand(size, -1))


@functools.lru_cache(maxsize=64)
def zoom_matrix(size: int, factor: float) -> Tensor:
    """(size, size): enlarges the middle by `factor` ≥ 1 as scipy.ndimage.zoom does linearly, cut to the old size."""
    kept = math.ceil(size / factor)
    enlarged = round(kept * factor)
    position = torch.arange(enlarged, dtype=torch.float64) * ((kept - 1) / max(enlarged - 1, 1))
    position = position[(enlarged - size) // 2 :][:size]
    left = position.floor().clamp(max=max(kept - 2, 0)).long()
    fraction = (position - left).clamp(0, 1)[:, None]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    start = (size - kept) // 2 + left[:, None]
    matrix.scatter_add_(1, start, 1 - fraction)
    return matrix.scatter_add_(1, (start + 1).clamp(max=size - 1), fraction)


@functools.lru_cache(maxsize=64)
def box_matrix(size: int, new_size: int) -> Tensor:
    """(new_size, size): Pillow's box filter, means of the old pixels near a new one's centre, times 2²², rounded."""
    scale = size / new_size
    width = max(scale, 1.0)
    matrix = torch.zeros(new_size, size, dtype=torch.float64)
    for i in range(new_size):
        centre = (i + 0.5) * scale
        # Pillow's own order of operations: centres may lie exactly on the border, where the last bit decides
        first, stop = max(int(centre - width / 2 + 0.5), 0), min(int(centre + width / 2 + 0.5), size)
        distance = (torch.arange(first, stop, dtype=torch.float64) - centre + 0.5) * (1 / width)
        inside = ((distance > -0.5) & (distance <= 0.5)).double()
        matrix[i, first:stop] = torch.floor(inside / inside.sum() * 2**22 + 0.5)
    return matrix
