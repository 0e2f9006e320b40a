"""Spatter: drops of water with a bright rim, or drops of mud.

Water needs three standard algorithms, batched: Canny edges (1986), the chamfer distance (Borgefors 1986) and histogram
equalisation. All work on eight-bit images (B, H, W) whose levels are stored as floats.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dissensus.data.corruption.image_draws import Draws
from dissensus.data.corruption.pixel_levels import quotient
from dissensus.data.corruption.separable_maps import gaussian_smooth
from dissensus.data.corruption.weather import grey

WATER = (175 / 255, 238 / 255, 238 / 255)  # pale turquoise
MUD = (63 / 255, 42 / 255, 20 / 255)  # brown


def spatter(
    images: Tensor, draws: Draws, mean: float, std: float, sigma: float, threshold: float, strength: float
) -> Tensor:
    """(B, C, H, W): the image plus drops of water, where smoothed normal noise exceeds `threshold`."""
    layer = _liquid(images, draws, mean, std, sigma, threshold)
    return images + strength * water(layer).to(images)[:, None] * _colour(WATER, images)


def spatter_mud(
    images: Tensor, draws: Draws, mean: float, std: float, sigma: float, threshold: float, softness: float
) -> Tensor:
    """(B, C, H, W): the image under drops of mud, where smoothed normal noise exceeds `threshold`, edges softened."""
    layer = _liquid(images, draws, mean, std, sigma, threshold)
    cover = gaussian_smooth((layer > threshold).to(images), softness)
    cover = torch.where(cover < 0.8, 0.0, cover)[:, None]
    return images * (1 - cover) + cover * _colour(MUD, images)


def water(layer: Tensor) -> Tensor:
    """(B, H, W): brightness of each pixel of a liquid layer (B, H, W) in [0, 1]; the maximum of an image is 1.

    Made from the distance to the rims of the drops, equalised over all levels and lit from one corner.
    """
    layer = ((layer * 255).floor() % 256).float()  # values above white wrap around, as in the published files
    distance = chamfer_distance(canny(layer, 50, 150), limit=20)
    distance = _mean3(distance).floor()
    relief = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    relief = _correlate_3x3(equalise_histogram(distance), relief, border="reflect").clamp(0, 255)
    shine = layer * _mean3(relief).round()
    largest = shine.amax((1, 2), keepdim=True)
    return torch.where(largest > 0, shine / largest, 0.0)


def canny(images: Tensor, low: float, high: float) -> Tensor:
    """(B, H, W) bool: Canny edges of eight-bit images.

    Sobel slopes of size |dx| + |dy|, thinned to ridges. Ridge pixels above `low` are kept if a path of such pixels
    connects them, through any of the eight neighbours, to a pixel above `high`.

    Ridges are compared along the nearest of four directions. OpenCV's rules decide ties: the pixel to the right or below
    loses; on diagonals both lose.
    """
    sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
    dx, dy = _correlate_3x3(images, sobel, border="replicate"), _correlate_3x3(images, sobel.T, border="replicate")
    size = dx.abs() + dy.abs()
    neighbour = {(i, j): _shift_image(size, i, j, 0.0) for i in (-1, 0, 1) for j in (-1, 0, 1)}
    # tan 22.5° in fifteen-bit fixed point; tan 67.5° = tan 22.5° + 2
    flat = dy.abs() * 2**15 < dx.abs() * 13573
    steep = dy.abs() * 2**15 > dx.abs() * (13573 + 2**16)
    across = (size > neighbour[0, -1]) & (size >= neighbour[0, 1])
    down = (size > neighbour[-1, 0]) & (size >= neighbour[1, 0])
    falling = (size > neighbour[-1, -1]) & (size > neighbour[1, 1])
    rising = (size > neighbour[-1, 1]) & (size > neighbour[1, -1])
    diagonal = torch.where(dx * dy < 0, rising, falling)
    ridge = torch.where(flat, across, torch.where(steep, down, diagonal)) & (size > low)
    edges = ridge & (size > high)
    while True:
        joined = ridge & (F.max_pool2d(edges[:, None].float(), 3, stride=1, padding=1)[:, 0] > 0)
        if torch.equal(joined, edges):
            return edges
        edges = joined


def chamfer_distance(edges: Tensor, limit: float) -> Tensor:
    """(B, H, W) float32: distance to the nearest edge pixel, at most `limit`.

    Steps have length 1, 1.4 (diagonal) and 2.1969 (knight's move), the last two to sixteen binary places, as in OpenCV.
    Iterates d(p) ← min over the sixteen steps of d(p + step) + length until nothing changes.
    """
    diagonal, knight = 91750 / 2**16, 143976 / 2**16
    height, width = edges.shape[-2:]
    distance = torch.where(edges, 0.0, float(limit)).transpose(0, 1).contiguous()  # (H, B, W)
    # Steps may be taken in any order: first along rows, where the nearest edge is a running minimum …
    column = torch.arange(width, device=edges.device, dtype=torch.float32)
    left = column + torch.cummin(distance - column, dim=2).values
    right = torch.cummin((distance + column).flip(2), dim=2).values.flip(2) - column
    distance = torch.minimum(left, right)
    # … then all that go down, row by row, then all that go up
    across = {-2: knight, -1: diagonal, 0: 1.0, 1: diagonal, 2: knight}
    steps = (*((1, side, length) for side, length in across.items()), (2, -1, knight), (2, 1, knight))
    for _ in range(2):
        filled = F.pad(distance, (2, 2), value=float(limit))
        for i in range(1, height):
            row = filled[i, :, 2:-2]
            for back, aside, length in steps[: 7 if i > 1 else 5]:
                torch.minimum(row, filled[i - back, :, 2 + aside : 2 + aside + width] + length, out=row)
        distance = filled[:, :, 2:-2].flip(0)
    return distance.clamp(max=limit).transpose(0, 1).contiguous()


def equalise_histogram(images: Tensor) -> Tensor:
    """(B, H, W): histogram equalisation of eight-bit images.

    Level l becomes round(255·(n(l) − n₀)/(n − n₀)): n(l) pixels have at most level l, n₀ the darkest level, n are all.
    """
    pixels = images.flatten(1).long()  # (B, n)
    counts = torch.zeros(len(images), 256, device=images.device, dtype=torch.float64)
    counts.scatter_add_(1, pixels, torch.ones_like(pixels, dtype=torch.float64))
    below = counts.cumsum(1)
    darkest = below.gather(1, pixels.amin(1, keepdim=True))  # (B, 1)
    rest = pixels.shape[1] - darkest
    levels = (255 * (below - darkest).clamp(min=0) / rest.clamp(min=1)).round()
    spread = levels.gather(1, pixels)
    return torch.where(rest > 0, spread, pixels).view(images.shape).to(images)  # a single level stays as it is


def _liquid(images: Tensor, draws: Draws, mean: float, std: float, sigma: float, threshold: float) -> Tensor:
    """(B, H, W): normal noise, smoothed, zero below the threshold."""
    noise = mean + std * draws.normal(0, *images.shape[-2:])
    layer = gaussian_smooth(noise, sigma)
    return torch.where(layer < threshold, 0.0, layer)


def _colour(rgb: tuple[float, float, float], images: Tensor) -> Tensor:
    """(1, C, 1, 1): the colour, or its luma for one channel."""
    colour = torch.tensor(rgb, dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    return colour if images.shape[1] == 3 else grey(colour)


def _mean3(images: Tensor) -> Tensor:
    """(B, H, W): mean of 3×3 pixels, mirrored at the border without the edge pixel."""
    return quotient(_correlate_3x3(images, torch.ones(3, 3), border="reflect"), 9)


def _correlate_3x3(images: Tensor, kernel: Tensor, *, border: str) -> Tensor:
    """(B, H, W): correlation with a 3×3 kernel."""
    height, width = images.shape[-2:]
    filled = F.pad(images[:, None], (1, 1, 1, 1), mode=border)[:, 0]
    result = torch.zeros_like(images)
    for row, column in kernel.nonzero().tolist():
        result.add_(filled[:, row : row + height, column : column + width], alpha=kernel[row, column].item())
    return result


def _shift_image(images: Tensor, down: int, right: int, outside: float) -> Tensor:
    """(B, H, W): every pixel's neighbour `down` and `right` of it, `outside` beyond the border."""
    height, width = images.shape[-2:]
    filled = F.pad(images, (1, 1, 1, 1), value=outside)
    return filled[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]
