# mypy: ignore-errors
"""Triton kernels of batch norm, an added tensor and ReLU in one, with first and second derivatives.

    y = relu(w x̂ + b + a),    x̂ = (x − m) r,    r = 1 / √(var + ε),

a and relu each present or not. Tensors are read as (n, C), the channels side by side in memory. With ⟨·⟩ the mean over n,
g the gradient by y and t = g where y > 0, the gradients by x and a are

    J t = w r (t − ⟨t⟩ − x̂ ⟨x̂ t⟩)    and    t.

The derivative of ⟨u, J t⟩ + ⟨v, t⟩ by g is J u + v where y > 0; those by x and w are in `kernels/double_backward.py`. Sums
over n take two kernels in a fixed order: results are the same at every run. `TRITON_INTERPRET=1` runs them on a CPU.
"""

import triton
import triton.language as tl


@triton.jit
def tile(row, rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """(offsets, which exist, channels, which exist) of the tile that starts at a row."""
    r = row + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < channels
    return r.to(tl.int64)[:, None] * channels + c[None, :], (r < rows)[:, None] & there[None, :], c, there


@triton.jit
def moments(
    x, parts, rows, channels, P, ROWS: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """parts (2, P, C): the mean and the sum of squares around it of every P-th tile."""
    first = tl.program_id(0)
    at, there, c, known = tile(first * ROWS, rows, channels, ROWS, CHANNELS)
    count = tl.minimum(rows - first * ROWS, ROWS)
    v = tl.load(x + at, there, 0.0).to(T)
    # Sums of squares around the mean of the first tile, which is near the mean: digits are not lost.
    pivot = tl.sum(v, 0) / count
    once = tl.where(there, v - pivot[None, :], 0.0)
    squared = once * once
    for row in tl.range((first + P) * ROWS, rows, P * ROWS, num_stages=STAGES):
        at, there, _, _ = tile(row, rows, channels, ROWS, CHANNELS)
        apart = tl.where(there, tl.load(x + at, there, 0.0).to(T) - pivot[None, :], 0.0)
        count += tl.minimum(rows - row, ROWS)
        once += apart
        squared += apart * apart
    step = tl.sum(once, 0) / count
    around = tl.maximum(tl.sum(squared, 0) - count * step * step, 0.0)
    tl.store(parts + first * channels + c, pivot + step, known)
    tl.store(parts + (P + first) * channels + c, around, known)


@triton.jit
def load_part(parts, k, c, known, channels, P, BLOCK: tl.constexpr):
    """(P, channels) the k-th of parts (K, P, C), for channels c."""
    number = tl.arange(0, BLOCK)
    at, there = (k * P + number)[:, None] * channels + c[None, :], (number < P)[:, None] & known[None, :]
    return tl.load(parts + at, there, 0.0)


@triton.jit
def combine_moments(
    parts, mean, rstd, running_mean, running_var, momentum, rows, channels, P,
    EPS: tl.constexpr, RUNNING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / √(var + ε), from parts of `moments`; running statistics move towards them."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = c < channels
    number, tiles = tl.arange(0, BLOCK), tl.cdiv(rows, ROWS)
    # Rows of a part: those of every P-th tile, the last of which may be cut.
    held = tl.where(number < P, tl.cdiv(tiles - number, P) * ROWS, 0)
    held -= tl.where(number == (tiles - 1) % P, tiles * ROWS - rows, 0)
    own = load_part(parts, 0, c, known, channels, P, BLOCK)
    m = tl.sum(own * held[:, None], 0) / rows
    apart = own - m[None, :]
    around = tl.sum(load_part(parts, 1, c, known, channels, P, BLOCK) + held[:, None] * apart * apart, 0)
    tl.store(mean + c, m, known)
    tl.store(rstd + c, 1 / tl.sqrt(around / rows + EPS), known)
    if RUNNING:
        before = tl.load(running_mean + c, known, 0.0)
        tl.store(running_mean + c, before + momentum * (m - before), known)
        before = tl.load(running_var + c, known, 0.0)
        tl.store(running_var + c, before + momentum * (around / (rows - 1) - before), known)


@triton.jit
def sum_parts(parts, sums, channels, P, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):
    """sums (K, C) of parts (K, P, C)."""
    c, k = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1)
    known = c < channels
    tl.store(sums + k * channels + c, tl.sum(load_part(parts, k, c, known, channels, P, BLOCK), 0), known)


@triton.jit
def normalise_rows(
    x, added, y, mean, spread, weight, bias, rows, channels,
    EPS: tl.constexpr, ADDED: tl.constexpr, RELU: tl.constexpr, VARIANCE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """y from x; spread is r, or the variance."""
    at, there, c, known = tile(tl.program_id(0) * ROWS, rows, channels, ROWS, CHANNELS)
    r = tl.load(spread + c, known, 0.0).to(T)
    if VARIANCE:
        r = 1 / tl.sqrt(r + EPS)
    scale = tl.load(weight + c, known, 0.0).to(T) * r
    m, b = tl.load(mean + c, known, 0.0).to(T), tl.load(bias + c, known, 0.0).to(T)
    found = (tl.load(x + at, there, 0.0).to(T) - m[None, :]) * scale[None, :] + b[None, :]
    if ADDED:
        found += tl.load(added + at, there, 0.0).to(T)
    if RELU:
        found = tl.where(found < 0, 0.0, found)  # NaN stays NaN
    tl.store(y + at, found.to(y.dtype.element_ty), there)


@triton.jit
def relu_gradient(g, y, at, there, centred, scale, b, ADDED: tl.constexpr, RELU: tl.constexpr, T: tl.constexpr):
    """(t, where y > 0). Without an added tensor y is computed again, which is faster than reading it."""
    t = tl.load(g + at, there, 0.0).to(T)
    passes = there
    if RELU:
        if ADDED:  # noqa: SIM108
            passes = there & (tl.load(y + at, there, 0.0) > 0)
        else:
            passes = there & (centred * scale[None, :] + b[None, :] > 0)
        t = tl.where(passes, t, 0.0)
    return t, passes


@triton.jit
def gradient_parts(
    g, x, y, mean, rstd, weight, bias, parts, by_added, rows, channels, P,
    ADDED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """parts (2, P, C) of Σ x̂ t and Σ t; with an added tensor also t, its gradient."""
    first = tl.program_id(0)
    _, _, c, known = tile(0, rows, channels, ROWS, CHANNELS)
    m, r = tl.load(mean + c, known, 0.0), tl.load(rstd + c, known, 0.0)
    scale, b = tl.load(weight + c, known, 0.0).to(T) * r, tl.load(bias + c, known, 0.0).to(T)
    of_xt, of_t = tl.zeros((ROWS, CHANNELS), T), tl.zeros((ROWS, CHANNELS), T)
    for row in tl.range(first * ROWS, rows, P * ROWS, num_stages=STAGES):
        at, there, _, _ = tile(row, rows, channels, ROWS, CHANNELS)
        centred = tl.load(x + at, there, 0.0).to(T) - m[None, :]
        t, _ = relu_gradient(g, y, at, there, centred, scale, b, ADDED, RELU, T)
        if ADDED:
            tl.store(by_added + at, t.to(by_added.dtype.element_ty), there)
        of_xt += t * centred
        of_t += t
    tl.store(parts + first * channels + c, tl.sum(of_xt, 0) * r, known)
    tl.store(parts + (P + first) * channels + c, tl.sum(of_t, 0), known)


@triton.jit
def gradients(
    g, x, y, mean, rstd, weight, bias, sums, by_x, rows, channels,
    ADDED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """J t."""
    at, there, c, known = tile(tl.program_id(0) * ROWS, rows, channels, ROWS, CHANNELS)
    m, r = tl.load(mean + c, known, 0.0), tl.load(rstd + c, known, 0.0)
    scale, b = tl.load(weight + c, known, 0.0).to(T) * r, tl.load(bias + c, known, 0.0).to(T)
    xt, mean_t = tl.load(sums + c, known, 0.0) / rows, tl.load(sums + channels + c, known, 0.0) / rows
    centred = tl.load(x + at, there, 0.0).to(T) - m[None, :]
    t, _ = relu_gradient(g, y, at, there, centred, scale, b, ADDED, RELU, T)
    found = scale[None, :] * (t - mean_t[None, :] - centred * (r * xt)[None, :])
    tl.store(by_x + at, found.to(by_x.dtype.element_ty), there)


@triton.jit
def second_parts(
    u, g, x, y, mean, rstd, weight, bias, parts, rows, channels, P,
    ADDED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """parts (3, P, C) of Σ x̂ u, Σ u and Σ t u."""
    first = tl.program_id(0)
    _, _, c, known = tile(0, rows, channels, ROWS, CHANNELS)
    m, r = tl.load(mean + c, known, 0.0), tl.load(rstd + c, known, 0.0)
    scale, b = tl.load(weight + c, known, 0.0).to(T) * r, tl.load(bias + c, known, 0.0).to(T)
    of_xu, of_u = tl.zeros((ROWS, CHANNELS), T), tl.zeros((ROWS, CHANNELS), T)
    of_tu = tl.zeros((ROWS, CHANNELS), T)
    for row in tl.range(first * ROWS, rows, P * ROWS, num_stages=STAGES):
        at, there, _, _ = tile(row, rows, channels, ROWS, CHANNELS)
        centred = tl.load(x + at, there, 0.0).to(T) - m[None, :]
        t, _ = relu_gradient(g, y, at, there, centred, scale, b, ADDED, RELU, T)
        s = tl.load(u + at, there, 0.0).to(T)
        of_xu += s * centred
        of_u += s
        of_tu += s * t
    tl.store(parts + first * channels + c, tl.sum(of_xu, 0) * r, known)
    tl.store(parts + (P + first) * channels + c, tl.sum(of_u, 0), known)
    tl.store(parts + (2 * P + first) * channels + c, tl.sum(of_tu, 0), known)


@triton.jit
def second_derivatives(
    u, v, g, x, y, mean, rstd, weight, bias, sums, second, by_g, by_x, by_weight, rows, channels,
    ADDED: tl.constexpr, BESIDE: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The derivatives by g, x and w."""
    at, there, c, known = tile(tl.program_id(0) * ROWS, rows, channels, ROWS, CHANNELS)
    m, r = tl.load(mean + c, known, 0.0), tl.load(rstd + c, known, 0.0)
    w, b = tl.load(weight + c, known, 0.0).to(T), tl.load(bias + c, known, 0.0).to(T)
    scale = w * r
    xt, mean_t = tl.load(sums + c, known, 0.0) / rows, tl.load(sums + channels + c, known, 0.0) / rows
    xu, mean_u = tl.load(second + c, known, 0.0) / rows, tl.load(second + channels + c, known, 0.0) / rows
    cov = tl.load(second + 2 * channels + c, known, 0.0) / rows - mean_t * mean_u
    centred = tl.load(x + at, there, 0.0).to(T) - m[None, :]
    t, passes = relu_gradient(g, y, at, there, centred, scale, b, ADDED, RELU, T)
    s = tl.load(u + at, there, 0.0).to(T) - mean_u[None, :]
    found = scale[None, :] * (s - centred * (r * xu)[None, :])
    if BESIDE:
        found += tl.load(v + at, there, 0.0).to(T)
    tl.store(by_g + at, tl.where(passes, found, 0.0).to(by_g.dtype.element_ty), there)
    bent = centred * (r * (cov - 3 * xt * xu))[None, :] + xu[None, :] * (t - mean_t[None, :]) + xt[None, :] * s
    tl.store(by_x + at, (-(scale * r)[None, :] * bent).to(by_x.dtype.element_ty), there)
    if tl.program_id(0) == 0:
        tl.store(by_weight + c, rows * r * (cov - xt * xu), known)


@triton.jit
def fold_norm(
    kernel, offset, mean, variance, weight, bias, eps, folded, shift, channels, size,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kernel (O, size) times w r, and b + w r (offset − m)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < channels * size
    c = at // size
    v = tl.load(variance + c, there, 1.0).to(tl.float32)
    scale = tl.load(weight + c, there, 0.0).to(tl.float32) / tl.sqrt(v + eps)
    k = tl.load(kernel + at, there, 0.0).to(tl.float32)
    tl.store(folded + at, (k * scale).to(folded.dtype.element_ty), there)
    own = at < channels  # numbers of channels, too
    v = tl.load(variance + at, own, 1.0).to(tl.float32)
    scale = tl.load(weight + at, own, 0.0).to(tl.float32) / tl.sqrt(v + eps)
    m = tl.load(mean + at, own, 0.0).to(tl.float32)
    if OFFSET:
        m -= tl.load(offset + at, own, 0.0).to(tl.float32)
    tl.store(shift + at, (tl.load(bias + at, own, 0.0).to(tl.float32) - scale * m).to(shift.dtype.element_ty), own)
