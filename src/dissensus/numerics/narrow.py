# mypy: ignore-errors
"""Convolutions with few input channels in half precision on a GPU (`narrow_kernels.py`).

Import this file only if Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dissensus.numerics import narrow_kernels as kernels

ROWS = 128  # output positions of a tile
CHANNELS = 64  # output channels of a tile, at most
PARTS = 264  # of the sum over positions: enough to keep a GPU busy
HALF = tl.bfloat16  # float32 in tests that interpret the kernels, where products of bf16 are wrong


class Sizes:
    """What the kernels must know of a convolution of x, (N, C, H, W), with kernels (O, C, KH, KW)."""

    def __init__(self, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> None:
        sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        axes = [(size + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, reach in sizes]
        self.shape = (len(x), len(weight), *axes)
        self.rows = len(x) * axes[0] * axes[1]
        self.places = (self.rows, *x.shape[2:], *axes, *x.stride(), *stride, *padding, *dilation)
        self.positions = weight[0].numel()
        wide = max(16, min(CHANNELS, triton.next_power_of_2(len(weight))))
        self.kinds = {"C": x.shape[1], "KW": weight.shape[3], "K": self.positions, "T": HALF, "ROWS": ROWS}
        self.kinds |= {"BLOCK": max(16, triton.next_power_of_2(self.positions)), "CHANNELS": wide, "num_warps": 4}
        self.tiles = triton.cdiv(self.rows, ROWS)
        self.columns = triton.cdiv(len(weight), wide)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], *,
    relu: bool = False,
) -> Tensor:  # fmt: skip
    """The convolution in bf16, channels side by side in memory; x and weights of any dtype and layout."""
    sizes = Sizes(x, weight, stride, padding, dilation)
    y = torch.empty(sizes.shape, dtype=torch.bfloat16, device=x.device, memory_format=torch.channels_last)
    kernels.narrow_convolution[(sizes.tiles, sizes.columns)](
        x, weight, weight if bias is None else bias, y, *sizes.places, len(weight), *weight.stride(),
        BIAS=bias is not None, RELU=relu, **sizes.kinds,
    )  # fmt: skip
    return y


def weight_gradient(
    g: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """(O, C, KH, KW) in float32, from the gradient g by the convolution, channels side by side in memory."""
    sizes = Sizes(x, weight, stride, padding, dilation)
    (channels, narrow, high, wide), parts = weight.shape, min(sizes.tiles, PARTS)
    found = g.new_empty((parts, sizes.positions, channels), dtype=torch.float32)
    kernels.narrow_gradient_parts[(parts, sizes.columns)](g, x, found, *sizes.places, channels, parts, **sizes.kinds)
    return found.sum(0).view(high, wide, narrow, channels).permute(3, 2, 0, 1)
