"""Baseline JPEG: encodes and decodes an image in the integer arithmetic of libjpeg.

The entropy coder is lossless and left out. The lossy steps follow the defaults of libjpeg(-turbo): YCbCr in 16-bit fixed
point, chroma halved along both axes (4:2:0), the "slow" integer cosine transform of 8×8 blocks, division by the tables of
Annex K scaled by quality; then the inverse steps, with the triangle filter for chroma.
All numbers are whole; float64 represents them exactly and has fast matrix products.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dissensus.data.corruption.image_draws import Draws
from dissensus.data.corruption.pixel_levels import from_levels
from dissensus.data.corruption.separable_maps import apply_to_columns, apply_to_rows

# ITU-T T.81, tables K.1 and K.2
_LUMA = """16 11 10 16 24 40 51 61      12 12 14 19 26 58 60 55  14 13 16 24 40 57 69 56    14 17 22 29 51 87 80 62
           18 22 37 56 68 109 103 77    24 35 55 64 81 104 113 92
           49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99"""
_CHROMA = """17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99  47 66 99 99 99 99 99 99
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
        return from_levels(_encode_and_decode(levels, _quantisation_table(_LUMA, quality)))
    luma, chroma = _luma_and_chroma(levels)
    luma = _encode_and_decode(luma, _quantisation_table(_LUMA, quality))
    chroma = _encode_and_decode(_halve_chroma(chroma), _quantisation_table(_CHROMA, quality))[..., : (width + 1) // 2]
    return from_levels(_rgb(luma, _double_chroma(chroma)[..., :height, :width]))


def _quantisation_table(base: str, quality: int) -> Tensor:
    """(8, 8): the quantisation table ⌊(base·s + 50)/100⌋ in 1 … 255, s = ⌊5000/q⌋ below q = 50, 200 − 2q from there."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return torch.floor((_numbers(base).view(8, 8) * scale + 50) / 100).clamp(1, 255)


def _encode_and_decode(planes: Tensor, table: Tensor) -> Tensor:
    """(B, C, H, W): cosine transform, division by the table, rounding, and back. The last row and column are repeated
    to fill blocks."""
    height, width = planes.shape[-2:]
    filled = F.pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate") - 128
    rows, columns = filled.shape[-2] // 8, filled.shape[-1] // 8
    cosine = _cosine_matrix()
    over_rows, over_columns = (torch.kron(torch.eye(count), cosine) for count in (rows, columns))  # block by block

    coefficients = _shift_right(apply_to_rows(filled, over_columns), 11)  # two bits kept
    coefficients = _shift_right(apply_to_columns(coefficients, over_rows), 15)  # eight times the coefficients

    steps = table.repeat(rows, columns).to(planes)
    quantised = coefficients.sign() * torch.floor((coefficients.abs() + 4 * steps) / (8 * steps))

    filled = _shift_right(apply_to_columns(quantised * steps, over_rows.T), 11)
    filled = _shift_right(apply_to_rows(filled, over_columns.T), 18)  # removes the factor eight and the two extra bits
    return (filled[..., :height, :width] + 128).clamp(0, 255)


def _cosine_matrix() -> Tensor:
    """(8, 8): the integer transform of eight pixels; its transpose is the way back."""
    even, odd = _numbers(_EVEN).view(4, 4), _numbers(_ODD).view(4, 4)
    rows = torch.stack([torch.cat([even, even.flip(1)], 1), torch.cat([odd, -odd.flip(1)], 1)], dim=1)
    return rows.flatten(0, 1)


def _numbers(text: str) -> Tensor:
    """The whole numbers of a text, in float64."""
    return torch.tensor([int(number) for number in text.split()], dtype=torch.float64)


def _shift_right(numbers: Tensor, places: int) -> Tensor:
    """Divided by 2^places and rounded, halves up."""
    return torch.floor((numbers + 2.0 ** (places - 1)) * 2.0**-places)


def _halve_chroma(chroma: Tensor) -> Tensor:
    """(B, 2, ⌈H/2⌉, a multiple of 8): means of 2×2 pixels, halves rounded up in odd columns, quarters in even ones.

    libjpeg repeats the last column before halving, but the last row after it (one row before, if H is odd).
    """
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
