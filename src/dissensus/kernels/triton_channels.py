"""The triton programs of `channel_launch`: each handles one example and up to WIDTH channels, and loops over positions.

`row` and `column`: strides in memory between two positions and two channels of an example; one of them is 1. Each sum is
computed in float32 by one program, so that results are reproducible.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def begin(channels, WIDTH: tl.constexpr):
    """(example, channels, mask of valid channels) of this program."""
    blocks = tl.cdiv(channels, WIDTH)
    example = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks) * WIDTH + tl.arange(0, WIDTH)
    return example, channel, channel < channels


@triton.jit
def tile(first, example, channel, real, places, channels, row, column, ROWS: tl.constexpr):
    """(memory offsets of the numbers from this position on, mask of valid ones)."""
    place = first + tl.arange(0, ROWS)
    at = example * places * channels + place[:, None] * row + channel[None, :] * column
    return at, (place < places)[:, None] & real[None, :]


@triton.jit
def times_program(x, factors, y, stride, places, channels, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    example, channel, real = begin(channels, WIDTH)
    factor = tl.load(factors + example * stride + channel, mask=real, other=0.0).to(tl.float32)
    for first in range(0, places, ROWS):
        at, mask = tile(first, example, channel, real, places, channels, row, column, ROWS)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + at, (value * factor[None, :]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def times_backward_program(
    g, y, factors, for_x, for_factors, stride, places, channels, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    example, channel, real = begin(channels, WIDTH)
    factor = tl.load(factors + example * stride + channel, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, places, ROWS):
        at, mask = tile(first, example, channel, real, places, channels, row, column, ROWS)
        slope = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(for_x + at, (slope * factor[None, :]).to(for_x.dtype.element_ty), mask=mask)
        total += tl.sum(slope * value, 0)
    found = tl.where(factor == 0, 0.0, total / factor)
    tl.store(for_factors + example * channels + channel, found.to(for_factors.dtype.element_ty), mask=real)


@triton.jit
def normed_program(
    x, mean, var, weight, bias, y, eps, places, channels, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    example, channel, real = begin(channels, WIDTH)
    centre = tl.load(mean + channel, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    deviation = tl.sqrt(tl.load(var + channel, mask=real, other=1.0).to(tl.float32) + eps)
    scale = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32) / deviation
    for first in range(0, places, ROWS):
        at, mask = tile(first, example, channel, real, places, channels, row, column, ROWS)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        found = (value - centre[None, :]) * scale[None, :] + shift[None, :]
        tl.store(y + at, found.to(y.dtype.element_ty), mask=mask)


@triton.jit
def normed_backward_program(
    g, x, mean, var, weight, for_x, for_weights, for_biases, eps, places, channels, row, column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    example, channel, real = begin(channels, WIDTH)
    centre = tl.load(mean + channel, mask=real, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.load(var + channel, mask=real, other=1.0).to(tl.float32) + eps)
    scale = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32) * inverse
    for_weight, for_bias = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for first in range(0, places, ROWS):
        at, mask = tile(first, example, channel, real, places, channels, row, column, ROWS)
        slope = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(for_x + at, (slope * scale[None, :]).to(for_x.dtype.element_ty), mask=mask)
        for_weight += tl.sum(slope * (value - centre[None, :]), 0)
        for_bias += tl.sum(slope, 0)
    tl.store(for_weights + example * channels + channel, for_weight * inverse, mask=real)
    tl.store(for_biases + example * channels + channel, for_bias, mask=real)
