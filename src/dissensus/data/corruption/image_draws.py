"""Random numbers that belong to an image, not to a batch: a counter-based generator in integer tensor arithmetic.

Number j of stream s of an image is a hash of (key of the image, s, j) by `numerics.hashing`. There is no state, so the
numbers depend neither on how images are batched nor on the device. `torch.Generator` has neither property.
"""

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
