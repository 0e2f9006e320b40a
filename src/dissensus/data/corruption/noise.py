"""The four noises, independent for each pixel and channel: Gaussian, shot (Poisson), impulse (salt and pepper), speckle."""

import functools
import math

import torch
from torch import Tensor

from dissensus.data.corruption.image_draws import Draws


def gaussian_noise(images: Tensor, draws: Draws, std: float) -> Tensor:
    """(B, C, H, W): x + σε, ε standard normal."""
    return images + std * draws.normal(0, *images.shape[1:])


def speckle_noise(images: Tensor, draws: Draws, std: float) -> Tensor:
    """(B, C, H, W): x + xσε, ε standard normal."""
    return images + images * (std * draws.normal(0, *images.shape[1:]))


def shot_noise(images: Tensor, draws: Draws, photons: float) -> Tensor:
    """(B, C, H, W): Poisson(x·photons) / photons; `photons` is the mean count of a white pixel.

    Samples by inverting the distribution function at one uniform number per pixel; eight-bit images need 256 functions.
    """
    levels = (images * 255).round()  # (B, C, H, W)
    uniform = draws.uniform(0, *images.shape[1:])
    table = poisson_table(photons).to(images)  # (256, K)
    # Row l is shifted by l. This makes one increasing list, in which each of the 256 searches stays in its row.
    shifted = (table + torch.arange(256, device=images.device, dtype=images.dtype)[:, None]).flatten()
    count = torch.searchsorted(shifted, levels + uniform, right=True) - (levels * table.shape[1]).long()
    return count.to(images) / photons


@functools.lru_cache(maxsize=5)
def poisson_table(photons: float) -> Tensor:
    """(256, K): P(N ≤ n) for N ~ Poisson(l/255·photons), rows l, columns n; all but 1e-15 of the mass is within K."""
    rate = torch.arange(256, dtype=torch.float64)[:, None] / 255 * photons
    count = torch.arange(math.ceil(photons + 9 * math.sqrt(photons) + 12), dtype=torch.float64)
    at_most: Tensor = torch.special.gammaincc(count + 1, rate)  # P(N ≤ n) = Γ(n+1, λ)/Γ(n+1)
    return at_most


def impulse_noise(images: Tensor, draws: Draws, amount: float) -> Tensor:
    """(B, C, H, W): a share `amount` of the values set to 0 or 1 with equal probability."""
    uniform = draws.uniform(0, *images.shape[1:])
    return torch.where(uniform < amount, (uniform < amount / 2).to(images), images)
