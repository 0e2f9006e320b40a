"""Snow, frost and fog."""

import math

import torch
from torch import Tensor

from dissensus.data.corruption.blur import trail
from dissensus.data.corruption.image_draws import Draws
from dissensus.data.corruption.pixel_levels import from_levels
from dissensus.data.corruption.separable_maps import apply_separable, gaussian_smooth, zoom_matrix

LUMA = (0.299, 0.587, 0.114)


def snow(
    images: Tensor,
    draws: Draws,
    mean: float,
    std: float,
    flake: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Tensor:
    """(B, C, H, W): a whitened image plus falling flakes, added twice: as drawn and turned by 180°.

    Flakes are normal noise enlarged by `flake`, zero below `threshold`, with a trail of `radius` and `sigma` pixels.
    """
    height, width = images.shape[-2:]
    layer = mean + std * draws.normal(0, 1, height, width)  # (B, 1, H, W)
    layer = apply_separable(layer, zoom_matrix(height, flake), zoom_matrix(width, flake))
    layer = torch.where(layer < threshold, 0.0, layer.clamp(0, 1))
    layer = from_levels((layer * 255).floor())
    layer = trail(layer, 90 * draws.uniform(1) - 135, radius, sigma)
    layer = from_levels((layer * 255).round())
    white = torch.maximum(images, 1.5 * grey(images) + 0.5)
    return keep * images + (1 - keep) * white + layer + layer.flip(2, 3)


def fog(images: Tensor, draws: Draws, amount: float, decay: float) -> Tensor:
    """(B, C, H, W): (x + amount·plasma)·m/(m + amount), m the largest value of the image."""
    height, width = images.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma(2 * draws.uniform(0, side, side) - 1, decay)[:, None, :height, :width]
    largest = images.amax((1, 2, 3), keepdim=True)
    return (images + amount * cloud) * largest / (largest + amount)


def plasma(noise: Tensor, decay: float) -> Tensor:
    """(B, S, S): diamond-square fractals from noise (B, S, S) in [−1, 1], S a power of two, scaled to [0, 1].

    Each halving of the mesh divides the noise by decay²; the map wraps around. Each pixel uses the noise drawn at its
    position.
    """
    side = noise.shape[-1]
    heights = torch.zeros_like(noise)
    step, amplitude = side, 100.0**2
    while step >= 2:
        half = step // 2
        corner = heights[:, ::step, ::step]
        middle = (corner + corner.roll(-1, 1) + corner.roll(-1, 2) + corner.roll((-1, -1), (1, 2))) / 4
        middle = middle + amplitude * noise[:, half::step, half::step]
        across = (corner + corner.roll(-1, 2) + middle + middle.roll(1, 1)) / 4
        down = (corner + corner.roll(-1, 1) + middle + middle.roll(1, 2)) / 4
        heights[:, half::step, half::step] = middle
        heights[:, ::step, half::step] = across + amplitude * noise[:, ::step, half::step]
        heights[:, half::step, ::step] = down + amplitude * noise[:, half::step, ::step]
        step, amplitude = half, amplitude / decay**2
    heights = heights - heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


def frost(images: Tensor, draws: Draws, keep: float, amount: float) -> Tensor:
    """(B, C, H, W): keep·x + amount·ice; `ice` synthesises the ice, the published photographs are not used."""
    layer = ice(draws, *images.shape[-2:])
    return keep * images + amount * (layer if images.shape[1] == 3 else grey(layer))


# Mean colour, and standard deviation within 32×32 pixels, in levels, of the five photographs the published script chooses
# from, each shrunk to a fifth as it does; the second and the third are the same picture.
_ICE = ((78, 149, 166, 14), (201, 205, 214, 18), (201, 205, 214, 18), (138, 153, 166, 26), (112, 123, 135, 35))


def ice(draws: Draws, height: int, width: int) -> Tensor:
    """(B, 3, H, W): frost on glass: one of five colours, crystals (trails of noise in one direction), patches, speckle.

    The variance shares of the three give neighbouring pixels the correlation of the photographs. The shares add up to
    0.8: edge pixels repeated beyond the border add the rest.
    """
    colours = torch.tensor(_ICE, device=draws.keys.device, dtype=draws.dtype)
    kind = colours[(draws.uniform(0) * len(_ICE)).long()]  # (B, 4)
    speckle, crystal, patch = draws.normal(1, 3, height, width).chunk(3, dim=1)  # (B, 1, H, W)
    scale = min(height, width) / 32
    thin, broad = 3 * scale, 5 * scale
    # A blur k reduces the variance of white noise from 1 to Σk²; the factor 1/√Σk² restores it.
    crystal = trail(crystal, 360 * draws.uniform(2), 2 * thin, thin) * one_sided_gain(thin)
    patch = gaussian_smooth(patch, broad) * (2 * math.sqrt(math.pi) * broad)
    texture = math.sqrt(0.48) * speckle + math.sqrt(0.2) * crystal + math.sqrt(0.12) * patch
    levels = kind[:, :3, None, None] + kind[:, 3, None, None, None] * texture
    return from_levels(levels).clamp(0, 1)


def one_sided_gain(sigma: float) -> float:
    """1/√Σk² of the kernel kᵢ ∝ exp(−i²/2σ²), i = 0, 1, …, its sums taken as integrals plus half the first term."""
    return (sigma * math.sqrt(math.pi / 2) + 0.5) / math.sqrt(sigma * math.sqrt(math.pi) / 2 + 0.5)


def grey(images: Tensor) -> Tensor:
    """(B, 1, H, W): luma 0.299 R + 0.587 G + 0.114 B; one channel as it is."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor(LUMA, dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)
