"""The operations behind `dissensus.data.corruptions`: noise, blur, weather, spatter, tone, resolution and JPEG.

Every operation is a pure function of images, random numbers and explicit constants. It takes images (B, C, H, W), floating,
on the 8-bit grid k/255 in [0, 1] with C = 1 or 3, and returns the same shape, not yet clipped or truncated to eight bits.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dissensus.data.image_arithmetic import (
    Draws,
    apply_separable,
    apply_to_columns,
    apply_to_rows,
    box_matrix,
    from_levels,
    gaussian_smooth,
    grey,
    quotient,
    zoom_matrix,
)


def gaussian_noise(images: Tensor, draws: Draws, std: float) -> Tensor:
    """(B, C, H, W): x + σε, ε standard normal."""
    return images + std * draws.normal(0, *images.shape[1:])


def speckle_noise(images: Tensor, draws: Draws, std: float) -> Tensor:
    """(B, C, H, W): x + xσε, ε standard normal."""
    return images + images * (std * draws.normal(0, *images.shape[1:]))


def shot_noise(images: Tensor, draws: Draws, photons: float) -> Tensor:
    """(B, C, H, W): Poisson(x·photons) / photons, by inverting the distribution function at one uniform per pixel."""
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
    return torch.special.gammaincc(count + 1, rate)  # P(N ≤ n) = Γ(n+1, λ)/Γ(n+1)


def impulse_noise(images: Tensor, draws: Draws, amount: float) -> Tensor:
    """(B, C, H, W): a share `amount` of the values set to 0 or 1 with equal probability."""
    uniform = draws.uniform(0, *images.shape[1:])
    return torch.where(uniform < amount, (uniform < amount / 2).to(images), images)


def gaussian_blur(images: Tensor, draws: Draws, sigma: float) -> Tensor:
    """(B, C, H, W): Gaussian blur; edge pixels are repeated beyond the border."""
    return gaussian_smooth(images, sigma)


def defocus_blur(images: Tensor, draws: Draws, radius: float, softness: float) -> Tensor:
    """(B, C, H, W): correlation with a softened disk; the image is mirrored at the border without its edge pixel."""
    return _correlate(images, disk(radius, softness), border="reflect")


def disk(radius: float, softness: float) -> Tensor:
    """(K, K) float32: equal weights within `radius`; a Gaussian of deviation `softness` over 3×3 or 5×5 softens the rim."""
    rim = 1 if radius <= 8 else 2
    reach = math.floor(radius) + rim
    axis = torch.arange(-reach, reach + 1)
    inside = (axis[:, None] ** 2 + axis**2 <= radius**2).float()  # float32 as published: 1/9 must not round below
    taps = torch.exp(-0.5 * (torch.arange(-rim, rim + 1).double() / softness) ** 2)
    taps = (taps / taps.sum()).float()
    spread = F.conv2d((inside / inside.sum())[None, None], torch.outer(taps, taps)[None, None], padding=rim)
    return spread[0, 0]


def zoom_blur(images: Tensor, draws: Draws, factors: int) -> Tensor:
    """(B, C, H, W): mean of the image and of `factors` enlargements of it by 1, 1.01, 1.02, …; in float32, as published."""
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
    return from_levels((trail(images, 90 * draws.uniform(0) - 45, radius, sigma) * 255).round())


def trail(images: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """(B, C, H, W): ImageMagick's motion blur at `angle` (B,) degrees: Σᵢ kᵢ x(p + ⌈i·(sin, cos) − ½⌉), kᵢ ∝ exp(−i²/2σ²)."""
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
    """(B, S, S): diamond-square fractals in [0, 1] from noise in [−1, 1]; halving the mesh divides it by decay²."""
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

    Their variance shares give neighbouring pixels the photographs' correlation; they add up to 0.8: repeated edges add more.
    """
    colours = torch.tensor(_ICE, device=draws.keys.device, dtype=draws.dtype)
    kind = colours[(draws.uniform(0) * len(_ICE)).long()]  # (B, 4)
    speckle, crystal, patch = draws.normal(1, 3, height, width).chunk(3, dim=1)  # (B, 1, H, W)
    scale = min(height, width) / 32
    thin, broad = 3 * scale, 5 * scale
    # A blur k reduces the variance of white noise from 1 to Σk²; the factor 1/√Σk² restores it.
    # Of kᵢ ∝ exp(−i²/2σ²), i = 0, 1, …, sums are taken as integrals plus half the first term.
    gain = (thin * math.sqrt(math.pi / 2) + 0.5) / math.sqrt(thin * math.sqrt(math.pi) / 2 + 0.5)
    crystal = trail(crystal, 360 * draws.uniform(2), 2 * thin, thin) * gain
    patch = gaussian_smooth(patch, broad) * (2 * math.sqrt(math.pi) * broad)
    texture = math.sqrt(0.48) * speckle + math.sqrt(0.2) * crystal + math.sqrt(0.12) * patch
    levels = kind[:, :3, None, None] + kind[:, 3, None, None, None] * texture
    return from_levels(levels).clamp(0, 1)


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

    Made from the distance to the rims of the drops, equalised over all levels and lit from one corner. The three algorithms
    behind it (Canny 1986, Borgefors 1986, histogram equalisation) work on eight-bit images (B, H, W), levels stored as floats.
    """
    layer = ((layer * 255).floor() % 256).float()  # values above white wrap around, as in the published files
    distance = _mean3(chamfer_distance(canny(layer, 50, 150), limit=20)).floor()
    relief = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    relief = _correlate(equalise_histogram(distance), relief, border="reflect").clamp(0, 255)
    shine = layer * _mean3(relief).round()
    largest = shine.amax((1, 2), keepdim=True)
    return torch.where(largest > 0, shine / largest, 0.0)


def canny(images: Tensor, low: float, high: float) -> Tensor:
    """(B, H, W) bool: Canny edges of eight-bit images: ridges of |dx| + |dy| above `low`, joined to one above `high`."""
    sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
    dx, dy = _correlate(images, sobel, border="replicate"), _correlate(images, sobel.T, border="replicate")
    size = dx.abs() + dy.abs()
    windows = F.pad(size, (1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)  # (B, H, W, 3, 3), 0 beyond the border
    neighbour = {(i, j): windows[..., 1 + i, 1 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)}
    # Along the nearest of four directions, with OpenCV's rules for ties: tan 22.5° in fifteen-bit fixed point, and plus 2
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
    """(B, H, W) float32: distance to the nearest edge, at most `limit`, in OpenCV's steps 1, 1.4 and 2.1969."""
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
    """(B, H, W): level l becomes round(255·(n(l) − n₀)/(n − n₀)), n(l) pixels up to it, n₀ of the darkest."""
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
    layer = gaussian_smooth(mean + std * draws.normal(0, *images.shape[-2:]), sigma)
    return torch.where(layer < threshold, 0.0, layer)


def _colour(rgb: tuple[float, float, float], images: Tensor) -> Tensor:
    """(1, C, 1, 1): the colour, or its luma for one channel."""
    colour = torch.tensor(rgb, dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    return colour if images.shape[1] == 3 else grey(colour)


def _mean3(images: Tensor) -> Tensor:
    """(B, H, W): mean of 3×3 pixels, mirrored at the border without the edge pixel."""
    return quotient(_correlate(images, torch.ones(3, 3), border="reflect"), 9)


def _correlate(images: Tensor, kernel: Tensor, *, border: str) -> Tensor:
    """(…, H, W): correlation with a kernel (K, K), K odd; entries of at most 1e-9 are left out."""
    height, width = images.shape[-2:]
    filled = F.pad(images, (kernel.shape[0] // 2,) * 4, mode=border)
    result = torch.zeros_like(images)
    for row, column in (kernel.abs() > 1e-9).nonzero().tolist():
        result.add_(filled[..., row : row + height, column : column + width], alpha=kernel[row, column].item())
    return result


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
        levels = _shift_right(apply_to_rows(levels, box_matrix(levels.shape[-1], columns)), 22)
        levels = _shift_right(apply_to_columns(levels, box_matrix(levels.shape[-2], rows)), 22)
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
    """(B, C, H, W): the images at x and y (B, H·W, 2), mirrored at the border with the edge pixel once or twice."""
    height, width = images.shape[-2:]
    size = torch.tensor([width, height]).to(position)
    scaled = 2 * position / (size - 1) - 1 if edge_once else (2 * position + 1) / size - 1
    grid = scaled.view(-1, height, width, 2).float()
    sampled = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=edge_once)
    return sampled.to(images)


# Baseline JPEG in the integer arithmetic of libjpeg. The entropy coder is lossless and left out. The lossy steps follow the
# defaults of libjpeg(-turbo): YCbCr in 16-bit fixed point, chroma halved along both axes (4:2:0), the "slow" integer cosine
# transform of 8×8 blocks, division by the tables of Annex K scaled by quality; then the inverse steps, with the triangle filter
# for chroma. All numbers are whole; float64 represents them exactly and has fast matrix products.
#
# ITU-T T.81, tables K.1 and K.2
_LUMA_TABLE = """16 11 10 16 24 40 51 61      12 12 14 19 26 58 60 55  14 13 16 24 40 57 69 56    14 17 22 29 51 87 80 62
           18 22 37 56 68 109 103 77    24 35 55 64 81 104 113 92
           49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99"""
_CHROMA_TABLE = """17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99  47 66 99 99 99 99 99 99
             99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99"""

# The cosines of the transform times √8·2¹³, as libjpeg's thirteen-bit constants add up: not always the nearest whole
# number. Even outputs act on x_i + x_(7−i), odd ones on x_i − x_(7−i), i = 0 … 3.
_EVEN = "8192 8192 8192 8192   10703 4433 -4433 -10703   8192 -8192 -8192 8192   4433 -10704 10704 -4433"
_ODD = "11363 9633 6437 2260   9633 -2259 -11362 -6436   6437 -11362 2261 9633   2260 -6436 9633 -11363"


def jpeg_compression(images: Tensor, draws: Draws, quality: int) -> Tensor:
    """(B, C, H, W): the images after JPEG at `quality` 1 … 100; one-channel images are stored as greyscale."""
    height, width = images.shape[-2:]
    levels = (images * 255).round()
    if levels.shape[1] == 1:
        return from_levels(_encode_and_decode(levels, _quantisation_table(_LUMA_TABLE, quality)))
    luma, chroma = _luma_and_chroma(levels)
    luma = _encode_and_decode(luma, _quantisation_table(_LUMA_TABLE, quality))
    chroma = _encode_and_decode(_halve_chroma(chroma), _quantisation_table(_CHROMA_TABLE, quality))
    return from_levels(_rgb(luma, _double_chroma(chroma[..., : (width + 1) // 2])[..., :height, :width]))


def _quantisation_table(base: str, quality: int) -> Tensor:
    """(8, 8): the quantisation table ⌊(base·s + 50)/100⌋ in 1 … 255, s = ⌊5000/q⌋ below q = 50, 200 − 2q from there."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return torch.floor((_numbers(base).view(8, 8) * scale + 50) / 100).clamp(1, 255)


def _encode_and_decode(planes: Tensor, table: Tensor) -> Tensor:
    """(B, C, H, W): cosine transform, division by the table, rounding, and back; edges are repeated to fill blocks."""
    height, width = planes.shape[-2:]
    filled = F.pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate") - 128
    rows, columns = filled.shape[-2] // 8, filled.shape[-1] // 8
    even, odd = _numbers(_EVEN).view(4, 4), _numbers(_ODD).view(4, 4)
    pairs = torch.stack([torch.cat([even, even.flip(1)], 1), torch.cat([odd, -odd.flip(1)], 1)], dim=1)
    cosine = pairs.flatten(0, 1)  # (8, 8): the integer transform of eight pixels; its transpose is the way back
    over_rows, over_columns = (torch.kron(torch.eye(count), cosine) for count in (rows, columns))  # block by block

    coefficients = _shift_right(apply_to_rows(filled, over_columns), 11)  # two bits kept
    coefficients = _shift_right(apply_to_columns(coefficients, over_rows), 15)  # eight times the coefficients

    steps = table.repeat(rows, columns).to(planes)
    quantised = coefficients.sign() * torch.floor((coefficients.abs() + 4 * steps) / (8 * steps))

    filled = _shift_right(apply_to_columns(quantised * steps, over_rows.T), 11)
    filled = _shift_right(apply_to_rows(filled, over_columns.T), 18)  # removes the factor eight and the two extra bits
    return (filled[..., :height, :width] + 128).clamp(0, 255)


def _numbers(text: str) -> Tensor:
    return torch.tensor([int(number) for number in text.split()], dtype=torch.float64)


def _shift_right(numbers: Tensor, places: int) -> Tensor:
    """Divided by 2^places and rounded, halves up."""
    return torch.floor((numbers + 2.0 ** (places - 1)) * 2.0**-places)


def _halve_chroma(chroma: Tensor) -> Tensor:
    """(B, 2, ⌈H/2⌉, a multiple of 8): means of 2×2 pixels, the last column repeated; the bias alternates by column."""
    height, width = chroma.shape[-2:]
    filled = F.pad(chroma, (0, -width % 16, 0, height % 2), mode="replicate")
    total = filled[..., ::2, ::2] + filled[..., ::2, 1::2] + filled[..., 1::2, ::2] + filled[..., 1::2, 1::2]
    bias = torch.arange(total.shape[-1], device=chroma.device) % 2 + 1
    return torch.floor((total + bias) / 4)


def _double_chroma(chroma: Tensor) -> Tensor:
    """(B, 2, 2H, 2W): triangle filter, ¾ of the nearer pixel and ¼ of the farther along each axis."""
    filled = F.pad(chroma, (1, 1, 1, 1), mode="replicate")
    near = 3 * filled[..., 1:-1, :]
    tall = torch.stack([near + filled[..., :-2, :], near + filled[..., 2:, :]], dim=-2).flatten(-3, -2)
    near = 3 * tall[..., 1:-1]
    left, right = torch.floor((near + tall[..., :-2] + 8) / 16), torch.floor((near + tall[..., 2:] + 7) / 16)
    return torch.stack([left, right], dim=-1).flatten(-2, -1)


def _luma_and_chroma(levels: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1, H, W) Y and (B, 2, H, W) Cb, Cr of RGB levels, in 16-bit fixed point; chroma rounds halves down."""
    red, green, blue = levels.chunk(3, dim=1)
    luma = 19595 * red + 38470 * green + 7471 * blue
    cb = -11059 * red - 21709 * green + 32768 * blue - 1
    cr = 32768 * red - 27439 * green - 5329 * blue - 1
    return _shift_right(luma, 16), _shift_right(torch.cat([cb, cr], dim=1), 16) + 128


def _rgb(luma: Tensor, chroma: Tensor) -> Tensor:
    """(B, 3, H, W): RGB levels, in 16-bit fixed point."""
    cb, cr = (chroma - 128).chunk(2, dim=1)
    red = luma + _shift_right(91881 * cr, 16)
    green = luma + _shift_right(-22554 * cb - 46802 * cr, 16)
    blue = luma + _shift_right(116130 * cb, 16)
    return torch.cat([red, green, blue], dim=1).clamp(0, 255)
