# mypy: ignore-errors
"""Triton kernels over many tensors in one launch. Only `multi_tensor.py` imports this file: not every machine has Triton.

Program number p works on one chunk: of the tensor `which[p]` the BLOCK entries after its first `start[p]` chunks, in the order
in which they lie in memory. `table` (rows, T) has numbers of each of T tensors: addresses first, entries last, in row SIZES.
"""

import triton
import triton.language as tl


@triton.jit
def chunk(table, which, start, tensors, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """(number of the tensor, this program's entries of it, which of them exist)."""
    program = tl.program_id(0)
    number = tl.load(which + program)
    at = tl.load(start + program) * BLOCK + tl.arange(0, BLOCK)
    return number, at, at < tl.load(table + SIZES * tensors + number)


@triton.jit
def look(
    table, which, start, tensors, flag, KIND: tl.constexpr, ROW: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr
):
    """Sets the flag to 1 if an entry of the tensors in row ROW of the table is not finite."""
    number, at, there = chunk(table, which, start, tensors, SIZES, BLOCK)
    values = tl.load(tl.load(table + ROW * tensors + number).to(tl.pointer_type(KIND)) + at, mask=there, other=0.0)
    finite = tl.abs(values.to(tl.float32)) < float("inf")  # false for NaN
    if tl.min(finite.to(tl.int32), axis=0) == 0:
        tl.store(flag, 1.0)


@triton.jit
def clear(table, which, start, tensors, flag, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Sets the tensors to 0 if the flag is above 0. Rows of the table: tensors, sizes."""
    if tl.load(flag) > 0:
        number, at, there = chunk(table, which, start, tensors, 1, BLOCK)
        nothing = tl.zeros((BLOCK,), KIND)
        tl.store(tl.load(table + number).to(tl.pointer_type(KIND)) + at, nothing, mask=there)


@triton.jit
def read(pointers, there, FULL: tl.constexpr):
    """Entries in float32. FULL: all are there."""
    found = tl.load(pointers) if FULL else tl.load(pointers, mask=there, other=0.0)
    return found.to(tl.float32)


@triton.jit
def write(pointers, values, there, FULL: tl.constexpr):
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=there)


@triton.jit
def filter_chunk(
    weights, gradients, means, variances, there, flag, rate, gain, keep, spread, DRIFT: tl.constexpr, FULL: tl.constexpr
):
    """One chunk of `filters`, by pointers to its entries."""
    w, mean, variance = read(weights, there, FULL), read(means, there, FULL), read(variances, there, FULL)
    if DRIFT:
        move = tl.where(tl.load(flag) > 0, 0.0, rate * read(gradients, there, FULL))
        mean -= move
        variance += move * move
    distance = w - mean
    write(means, mean + gain * distance, there, FULL)
    write(variances, keep * variance + spread * distance * distance, there, FULL)


@triton.jit
def filters(
    table, which, start, tensors, means, variances, flag, rate, gain, keep, spread,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, DRIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of the filters of `methods/tradi.py`. Rows of the table: weights, gradients, places in μ and s, sizes."""
    number, at, there = chunk(table, which, start, tensors, 3, BLOCK)
    w, g, place = tl.load(table + number), tl.load(table + tensors + number), tl.load(table + 2 * tensors + number)
    full = tl.load(start + tl.program_id(0)) * BLOCK + BLOCK <= tl.load(table + 3 * tensors + number)
    if full & (w % 16 == 0) & (g % 16 == 0) & (place % 4 == 0):
        # What the compiler must know to read and write four entries at a time.
        weights = tl.multiple_of(w.to(tl.pointer_type(WEIGHT)), 16) + at
        gradients = tl.multiple_of(g.to(tl.pointer_type(GRADIENT)), 16) + at
        mean, variance = tl.multiple_of(means + place, 16) + at, tl.multiple_of(variances + place, 16) + at
        filter_chunk(weights, gradients, mean, variance, there, flag, rate, gain, keep, spread, DRIFT, True)
    else:
        weights, gradients = w.to(tl.pointer_type(WEIGHT)) + at, g.to(tl.pointer_type(GRADIENT)) + at
        mean, variance = means + place + at, variances + place + at
        filter_chunk(weights, gradients, mean, variance, there, flag, rate, gain, keep, spread, DRIFT, False)
