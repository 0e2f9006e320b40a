"""Tone, colour and resolution: brightness, contrast, saturation, elastic warp, pixelation and JPEG."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dissensus.data.corruption.image_draws import Draws
from dissensus.data.corruption.pixel_levels import from_levels
from dissensus.data.corruption.separable_maps import apply_to_columns, apply_to_rows, box_matrix, gaussian_smooth


def brightness(images: Tensor, draws: Draws, amount: float) -> Tensor:
    """(B, C, H, W): adds `amount` to the HSV value v and keeps hue and saturation: (v + amount)·(x/v)."""
    value = images.amax(1, keepdim=True)
    lighter = (value + amount).clamp(0, 1)
    return torch.where(value > 0, lighter * (images / value), lighter)


def saturate(images: Tensor, draws: Draws, gain: float, offset: float) -> Tensor:
    """(B, C, H, W): changes the HSV saturation S to S·gain + offset in [0, 1] and keeps hue and value.

    x = v(1 − s·g), where g = (v − x)/(v − min) is the hue as a shade of each channel. Grey has no hue; by convention it is
    red, g = (0, 1, 1), so an offset tints grey pixels, as in the published files. One-channel images do not change.
    """
    if images.shape[1] == 1:
        return images  # grey as RGB keeps its value V, whatever its saturation becomes
    value, low = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    spread = value - low
    red = torch.tensor([0.0, 1.0, 1.0], dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    shade = torch.where(spread > 0, (value - images) / spread, red)
    saturation = torch.where(value > 0, spread / value, 0.0)
    return value * (1 - (saturation * gain + offset).clamp(0, 1) * shade)


def contrast(images: Tensor, draws: Draws, factor: float) -> Tensor:
    """(B, C, H, W): (x − mean)·factor + mean, the mean of each channel of each image."""
    mean = images.mean((2, 3), keepdim=True)
    return (images - mean) * factor + mean


def pixelate(images: Tensor, draws: Draws, share: float) -> Tensor:
    """(B, C, H, W): shrinks to ⌊side·share⌋ pixels and enlarges again, both with the box filter, in eight bits."""
    levels = (images * 255).round()
    height, width = images.shape[-2:]
    for rows, columns in ((int(height * share), int(width * share)), (height, width)):
        # columns first, each pass rounded: eight-bit images in between
        levels = _round_fixed_point(apply_to_rows(levels, box_matrix(levels.shape[-1], columns)))
        levels = _round_fixed_point(apply_to_columns(levels, box_matrix(levels.shape[-2], rows)))
    return from_levels(levels)


def elastic_transform(images: Tensor, draws: Draws, bend: float, smoothness: float, jolt: float) -> Tensor:
    """(B, C, H, W): a random affine map, then a smooth random displacement; linear interpolation, float32.

    The corners of a right-angled triangle about the middle move by up to `jolt` pixels, then every pixel by `bend`
    times uniform noise on [−1, 1] smoothed over `smoothness` pixels.
    """
    height, width = images.shape[-2:]
    centre = torch.tensor([width // 2, height // 2], dtype=torch.float64)
    leg = min(height, width) // 3
    corners = centre + leg * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)  # (3, 2): x, y
    corners = corners.to(images)
    moved = corners + jolt * (2 * draws.uniform(0, 3, 2) - 1)
    # the map from moved corners back to where they were: [moved, 1] Aᵀ = corners
    back = torch.linalg.solve(F.pad(moved, (0, 1), value=1.0), corners.expand_as(moved))  # (B, 3, 2)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([x, y], dim=-1).to(images)  # (H, W, 2)
    warped = _sample_images(images, F.pad(pixels, (0, 1), value=1.0).flatten(0, 1) @ back, edge_once=True)
    if bend == 0:
        return warped
    noise = 2 * draws.uniform(1, 2, height, width) - 1  # (B, 2, H, W): across, down
    shift = bend * gaussian_smooth(noise, smoothness, truncate=3.0, symmetric=True)
    return _sample_images(warped, pixels.flatten(0, 1) + shift.flatten(2).mT, edge_once=False)


def _sample_images(images: Tensor, position: Tensor, *, edge_once: bool) -> Tensor:
    """(B, C, H, W): the images at `position` (B, H·W, 2), x and y in pixels; mirrored at the border, about the edge
    pixel's centre (edge once) or its outer side (edge twice)."""
    height, width = images.shape[-2:]
    size = torch.tensor([width, height]).to(position)
    scaled = 2 * position / (size - 1) - 1 if edge_once else (2 * position + 1) / size - 1
    grid = scaled.view(-1, height, width, 2).float()
    sampled = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=edge_once)
    return sampled.to(images)


def _round_fixed_point(fixed: Tensor) -> Tensor:
    """Whole numbers from 22-bit fixed point, halves up."""
    return torch.floor((fixed + 2**21) * 2.0**-22)
