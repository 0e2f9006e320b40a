# mypy: ignore-errors
"""Triton kernels of convolutions with few input channels, such as the first layer of a network for images.

cuDNN's are made for many channels: for three they take ten times as long as reading and writing takes. Here a tile of output
positions (rows) is a product of the patches under the kernel, (rows, K), and the weights, (K, O); K counts the kernel's
positions times input channels, the channels side by side. Import this file only if Triton is installed;
`TRITON_INTERPRET=1` runs it on a CPU.
"""

import triton
import triton.language as tl


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
