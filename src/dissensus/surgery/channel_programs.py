"""The programs of `channel_kernels`, in triton's language: for channels innermost in memory and for others.

`_inner`: one program for an example and up to 128 channels, which goes over the places. `_outer`: one for an example and a
channel. Sums are kept in float32 and each is one program's, so that they come out the same every time.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def times_inner(x, factors, y, places, channels, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    factor = tl.load(factors + example * stride + channel, mask=real, other=0.0).to(tl.float32)
    for first in range(0, places, ROWS):
        row = first + tl.arange(0, ROWS)
        at = (example * places + row[:, None]) * channels + channel[None, :]
        mask = (row < places)[:, None] & real[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + at, (value * factor[None, :]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def times_outer(x, factors, y, places, channels, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + (line // channels) * stride + line % channels).to(tl.float32)
    for first in range(0, places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(x + line * places + place, mask=place < places, other=0.0).to(tl.float32)
        tl.store(y + line * places + place, (value * factor).to(y.dtype.element_ty), mask=place < places)


@triton.jit
def times_inner_backward(
    g, y, factors, for_x, for_factors, places, channels, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    example = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    factor = tl.load(factors + example * stride + channel, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, places, ROWS):
        row = first + tl.arange(0, ROWS)
        at = (example * places + row[:, None]) * channels + channel[None, :]
        mask = (row < places)[:, None] & real[None, :]
        slope = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(for_x + at, (slope * factor[None, :]).to(for_x.dtype.element_ty), mask=mask)
        total += tl.sum(slope * value, 0)
    found = tl.where(factor == 0, 0.0, total / factor)
    tl.store(for_factors + example * channels + channel, found.to(for_factors.dtype.element_ty), mask=real)


@triton.jit
def times_outer_backward(g, y, factors, for_x, for_factors, places, channels, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + (line // channels) * stride + line % channels).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        at = line * places + place
        slope = tl.load(g + at, mask=place < places, other=0.0).to(tl.float32)
        value = tl.load(y + at, mask=place < places, other=0.0).to(tl.float32)
        tl.store(for_x + at, (slope * factor).to(for_x.dtype.element_ty), mask=place < places)
        sums += slope * value
    total = tl.sum(sums)
    found = tl.where(factor == 0, 0.0, total / factor)
    tl.store(for_factors + line, found.to(for_factors.dtype.element_ty))


@triton.jit
def normed_inner(x, mean, var, weight, bias, y, places, channels, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    centre = tl.load(mean + channel, mask=real, other=0.0)
    scale = tl.load(weight + channel, mask=real, other=0.0) / tl.sqrt(
        tl.load(var + channel, mask=real, other=1.0) + eps
    )
    shift = tl.load(bias + channel, mask=real, other=0.0)
    for first in range(0, places, ROWS):
        row = first + tl.arange(0, ROWS)
        at = (example * places + row[:, None]) * channels + channel[None, :]
        mask = (row < places)[:, None] & real[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        found = (value - centre[None, :]) * scale[None, :] + shift[None, :]
        tl.store(y + at, found.to(y.dtype.element_ty), mask=mask)


@triton.jit
def normed_outer(x, mean, var, weight, bias, y, places, channels, eps, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    channel = line % channels
    centre, shift = tl.load(mean + channel).to(tl.float32), tl.load(bias + channel).to(tl.float32)
    scale = tl.load(weight + channel).to(tl.float32) / tl.sqrt(tl.load(var + channel).to(tl.float32) + eps)
    for first in range(0, places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(x + line * places + place, mask=place < places, other=0.0).to(tl.float32)
        found = (value - centre) * scale + shift
        tl.store(y + line * places + place, found.to(y.dtype.element_ty), mask=place < places)


@triton.jit
def normed_inner_backward(
    g, x, mean, var, weight, for_x, sums, places, channels, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    example = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    centre = tl.load(mean + channel, mask=real, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.load(var + channel, mask=real, other=1.0).to(tl.float32) + eps)
    scale = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32) * inverse
    for_weight, for_bias = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for first in range(0, places, ROWS):
        row = first + tl.arange(0, ROWS)
        at = (example * places + row[:, None]) * channels + channel[None, :]
        mask = (row < places)[:, None] & real[None, :]
        slope = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(for_x + at, (slope * scale[None, :]).to(for_x.dtype.element_ty), mask=mask)
        for_weight += tl.sum(slope * (value - centre[None, :]), 0)
        for_bias += tl.sum(slope, 0)
    into = sums + example * channels + channel
    tl.store(into, for_weight * inverse, mask=real)
    tl.store(into + tl.num_programs(0).to(tl.int64) * channels, for_bias, mask=real)


@triton.jit
def normed_outer_backward(g, x, mean, var, weight, for_x, sums, places, channels, eps, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    channel = line % channels
    centre = tl.load(mean + channel).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.load(var + channel).to(tl.float32) + eps)
    scale = tl.load(weight + channel).to(tl.float32) * inverse
    for_weight, for_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        at = line * places + place
        slope = tl.load(g + at, mask=place < places, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=place < places, other=0.0).to(tl.float32)
        tl.store(for_x + at, (slope * scale).to(for_x.dtype.element_ty), mask=place < places)
        for_weight += slope * (value - centre)
        for_bias += slope
    tl.store(sums + line, tl.sum(for_weight) * inverse)
    tl.store(sums + line + tl.num_programs(0).to(tl.int64), tl.sum(for_bias))
