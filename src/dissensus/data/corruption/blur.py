"""The five blurs: defocus, glass, motion, zoom and Gaussian."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dissensus.data.corruption.image_draws import Draws
from dissensus.data.corruption.pixel_levels import from_levels, quotient
from dissensus.data.corruption.separable_maps import apply_to_rows, gaussian_smooth, zoom_matrix


def gaussian_blur(images: Tensor, draws: Draws, sigma: float) -> Tensor:
    """(B, C, H, W): Gaussian blur; edge pixels are repeated beyond the border."""
    return gaussian_smooth(images, sigma)


def defocus_blur(images: Tensor, draws: Draws, radius: float, softness: float) -> Tensor:
    """(B, C, H, W): correlation with a softened disk; the image is mirrored at the border without its edge pixel."""
    height, width = images.shape[-2:]
    kernel = disk(radius, softness)
    reach = kernel.shape[0] // 2
    filled = F.pad(images, (reach,) * 4, mode="reflect")
    blurred = torch.zeros_like(images)
    for row, column in (kernel > 1e-9).nonzero().tolist():
        blurred.add_(filled[..., row : row + height, column : column + width], alpha=kernel[row, column].item())
    return blurred


def disk(radius: float, softness: float) -> Tensor:
    """(K, K) float32: the pixels within `radius` of the middle one, weighted equally, the rim softened.

    A Gaussian of standard deviation `softness` over 3×3 pixels (5×5 beyond a radius of 8) softens it.
    """
    rim = 1 if radius <= 8 else 2
    reach = math.floor(radius) + rim
    axis = torch.arange(-reach, reach + 1)
    inside = (axis[:, None] ** 2 + axis**2 <= radius**2).float()  # float32 as published: 1/9 must not round below
    taps = torch.exp(-0.5 * (torch.arange(-rim, rim + 1).double() / softness) ** 2)
    taps = (taps / taps.sum()).float()
    spread = F.conv2d((inside / inside.sum())[None, None], torch.outer(taps, taps)[None, None], padding=rim)
    return spread[0, 0]


def zoom_blur(images: Tensor, draws: Draws, factors: int) -> Tensor:
    """(B, C, H, W): mean of the image and of `factors` enlargements of it by 1, 1.01, 1.02, …

    In float32, as in the published pipeline.
    """
    height, width = images.shape[-2:]
    step = 1.01 - 1  # not 0.01, in the last bit, which decides whether the factor 1.25 makes 32 pixels of 26 or 33
    zooms = [1 + step * i for i in range(factors)]
    rows = torch.cat([zoom_matrix(height, zoom) for zoom in zooms], dim=1)  # (H, factors·H)
    columns = torch.cat([zoom_matrix(width, zoom) for zoom in zooms])  # (factors·W, W)
    planes = images.float().flatten(0, 1)  # (B·C, H, W)
    wide = apply_to_rows(planes, columns).view(-1, height, factors, width)
    total = apply_to_rows(wide.permute(0, 3, 2, 1).flatten(2), rows).mT  # (B·C, H, W): Σ over factors of R X Kᵀ
    return quotient(planes + total, factors + 1).reshape(images.shape).to(images)


def motion_blur(images: Tensor, draws: Draws, radius: float, sigma: float) -> Tensor:
    """(B, C, H, W): a trail in a direction within 45° of the horizontal, rounded to eight bits."""
    angle = 90 * draws.uniform(0) - 45
    return from_levels((trail(images, angle, radius, sigma) * 255).round())


def trail(images: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """(B, C, H, W): one-sided Gaussian mean along a line at `angle` (B,) degrees, the edge pixels repeated.

    y(p) = Σᵢ kᵢ x(p + ⌈i·(sin, cos) − ½⌉), kᵢ ∝ exp(−i²/2σ²), i = 0 … 2⌈radius⌉, which is ImageMagick's motion blur.
    """
    height, width = images.shape[-2:]
    steps = torch.arange(2 * math.ceil(radius) + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (steps / sigma) ** 2)
    # The dropped taps are too small to change eight bits.
    kernel = (kernel / kernel.sum())[: int((kernel > 1e-9).sum())]
    radians = torch.deg2rad(angle)[:, None]
    steps = torch.arange(len(kernel), device=images.device, dtype=radians.dtype)
    down = torch.ceil(steps * radians.sin() - 0.5).long()  # (B, taps)
    right = torch.ceil(steps * radians.cos() - 0.5).long()

    reach = len(kernel)
    flat = F.pad(images, (reach,) * 4, mode="replicate").flatten(2)  # (B, C, padded pixels)
    stride = width + 2 * reach
    row = torch.arange(height, device=images.device)[:, None] + reach
    column = torch.arange(width, device=images.device) + reach
    home = (row * stride + column).flatten()  # (H·W,)
    blurred = torch.zeros_like(images).flatten(2)
    for weight, shift in zip(kernel.tolist(), (down * stride + right).T, strict=True):
        source = (home + shift[:, None])[:, None].expand_as(blurred)
        blurred.add_(flat.gather(2, source), alpha=weight)
    return blurred.view(images.shape)


def glass_blur(images: Tensor, draws: Draws, sigma: float, reach: float, rounds: int) -> Tensor:
    """(B, C, H, W): Gaussian blur, pixels displaced at random, Gaussian blur again.

    The published loop is meant to swap neighbours. It assigns one view to another, so a pixel takes its neighbour's
    value and the neighbour keeps it. With reach 1 the neighbour lies above or to the left, and the loop runs backwards
    and reaches it later: all pixels can be moved at once. Longer reaches are treated in the same way here.
    """
    height, width = images.shape[-2:]
    blurred = (gaussian_smooth(images, sigma) * 255).floor()
    reach = round(reach)
    # offsets −reach … reach−1, for rows and columns reach+1 … size−reach
    offset = torch.floor(draws.uniform(0, rounds, 2, height, width) * (2 * reach)).long() - reach
    row = torch.arange(height, device=images.device)[:, None]
    column = torch.arange(width, device=images.device)
    inner = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    for i in range(rounds):
        down, right = (offset[:, i] * inner).unbind(1)  # (B, H, W)
        source = (row + down).clamp(max=height - 1) * width + (column + right).clamp(max=width - 1)
        source = source.flatten(1)[:, None].expand(-1, images.shape[1], -1)
        blurred = blurred.flatten(2).gather(2, source).view(images.shape)
    return gaussian_smooth(from_levels(blurred), sigma)
