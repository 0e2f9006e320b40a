# mypy: ignore-errors
"""Convolutions with few input channels in half precision on a GPU, as Triton programs.

Import this file only if Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def patches(
    x, row, rows, H, W, out_h, out_w, of_n, of_c, of_h, of_w, step_h, step_w, pad_h, pad_w, reach_h, reach_w,
    C: tl.constexpr, KW: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK) what the kernel sees from output positions row, row + 1, …; 0 beyond the image and beyond K."""
    r, k = row + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    n, h, w = r // (out_h * out_w), (r // out_w) % out_h, r % out_w
    at_h = (h * step_h - pad_h)[:, None] + ((k // (KW * C)) * reach_h)[None, :]
    at_w = (w * step_w - pad_w)[:, None] + (((k // C) % KW) * reach_w)[None, :]
    there = (r < rows)[:, None] & (k < K)[None, :] & (at_h >= 0) & (at_h < H) & (at_w >= 0) & (at_w < W)
    at = n.to(tl.int64)[:, None] * of_n + ((k % C) * of_c)[None, :] + at_h * of_h + at_w * of_w
    return tl.load(x + at, there, 0.0)


@triton.jit
def narrow_convolution(
    x, weight, bias, y, rows, H, W, out_h, out_w, of_n, of_c, of_h, of_w, step_h, step_w, pad_h, pad_w, reach_h, reach_w,
    channels, of_o, of_i, of_y, of_x,
    C: tl.constexpr, KW: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, T: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y (rows, O), with bias and ReLU where they are asked for."""
    first = tl.program_id(0) * ROWS
    seen = patches(
        x, first, rows, H, W, out_h, out_w, of_n, of_c, of_h, of_w, step_h, step_w, pad_h, pad_w, reach_h, reach_w,
        C, KW, K, ROWS, BLOCK,
    )  # fmt: skip
    k, o = tl.arange(0, BLOCK), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = o < channels
    at = (k // (KW * C)) * of_y + ((k // C) % KW) * of_x + (k % C) * of_i
    kernel = tl.load(weight + at[:, None] + (o * of_o)[None, :], (k < K)[:, None] & known[None, :], 0.0)
    found = tl.dot(seen.to(T), kernel.to(T))
    if BIAS:
        found += tl.load(bias + o, known, 0.0).to(tl.float32)[None, :]
    if RELU:
        found = tl.where(found < 0, 0.0, found)  # NaN stays NaN
    r = first + tl.arange(0, ROWS)
    at = r.to(tl.int64)[:, None] * channels + o[None, :]
    tl.store(y + at, found.to(y.dtype.element_ty), (r < rows)[:, None] & known[None, :])


@triton.jit
def narrow_gradient_parts(
    g, x, parts, rows, H, W, out_h, out_w, of_n, of_c, of_h, of_w, step_h, step_w, pad_h, pad_w, reach_h, reach_w,
    channels, P, C: tl.constexpr, KW: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """parts (P, K, O) of the gradient by the weights, each of every P-th tile of rows."""
    part = tl.program_id(0)
    k, o = tl.arange(0, BLOCK), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = o < channels
    total = tl.zeros((BLOCK, CHANNELS), tl.float32)
    for first in range(part * ROWS, rows, P * ROWS):
        seen = patches(
            x, first, rows, H, W, out_h, out_w, of_n, of_c, of_h, of_w, step_h, step_w, pad_h, pad_w, reach_h, reach_w,
            C, KW, K, ROWS, BLOCK,
        )  # fmt: skip
        r = first + tl.arange(0, ROWS)
        at = r.to(tl.int64)[:, None] * channels + o[None, :]
        given = tl.load(g + at, (r < rows)[:, None] & known[None, :], 0.0)
        total += tl.dot(tl.trans(seen.to(T)), given.to(T))
    at = (part * K + k)[:, None] * channels + o[None, :]
    tl.store(parts + at, total, (k < K)[:, None] & known[None, :])


ROWS = 128  # output positions of a tile
CHANNELS = 64  # output channels of a tile, at most
PARTS = 264  # of the sum over positions: enough to keep a GPU busy
HALF = tl.bfloat16  # float32 in tests that interpret the kernels, where products of bf16 are wrong


class ConvolutionSizes:
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
    sizes = ConvolutionSizes(x, weight, stride, padding, dilation)
    y = torch.empty(sizes.shape, dtype=torch.bfloat16, device=x.device, memory_format=torch.channels_last)
    narrow_convolution[(sizes.tiles, sizes.columns)](
        x, weight, weight if bias is None else bias, y, *sizes.places, len(weight), *weight.stride(),
        BIAS=bias is not None, RELU=relu, **sizes.kinds,
    )  # fmt: skip
    return y


def weight_gradient(
    g: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """(O, C, KH, KW) in float32, from the gradient g by the convolution, channels side by side in memory."""
    sizes = ConvolutionSizes(x, weight, stride, padding, dilation)
    (channels, narrow, high, wide), parts = weight.shape, min(sizes.tiles, PARTS)
    found = g.new_empty((parts, sizes.positions, channels), dtype=torch.float32)
    narrow_gradient_parts[(parts, sizes.columns)](g, x, found, *sizes.places, channels, parts, **sizes.kinds)
    return found.sum(0).view(high, wide, narrow, channels).permute(3, 2, 0, 1)
