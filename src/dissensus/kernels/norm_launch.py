# mypy: ignore-errors
"""Batch norm, an added tensor and ReLU as one operation on a GPU, with first and second derivatives (`norm_kernels.py`).

Import this file only if Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dissensus.kernels import triton_norm as kernels

CHANNELS = 64  # of a tile, at most
# Numbers in a tile and warps of a program: small programs, which find room beside those of convolutions.
TILE, WARPS = 1024, 2
# The same of sums over rows, and the number of parts, times tiles of channels: enough to keep a GPU busy.
SUMS = (1024, 1, 256)
STAGES = 4  # tiles that a program reads before it needs them; in float64 one, since they would not fit
FEW = 8  # channels whose parts are summed by one program


class NormSizes:
    """Numbers of rows, channels and parts of a tensor, and how a kernel's grid covers it."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        double = x.dtype == torch.float64
        self.kind = torch.float64 if double else torch.float32
        T = tl.float64 if double else tl.float32
        wide = min(CHANNELS, triton.next_power_of_2(self.channels))
        self.tile = {"ROWS": TILE // wide, "CHANNELS": wide, "T": T, "num_warps": WARPS}
        self.tile_grid = (triton.cdiv(self.rows, TILE // wide), triton.cdiv(self.channels, wide))
        sum_tile, warps, parts = SUMS
        self.long = {"ROWS": sum_tile // wide, "CHANNELS": wide, "T": T, "num_warps": warps}
        self.long["STAGES"] = 1 if double else STAGES
        self.parts = min(triton.cdiv(self.rows, sum_tile // wide), max(1, parts // self.tile_grid[1]))
        self.sum_grid = (self.parts, self.tile_grid[1])
        self.part_block = {"BLOCK": triton.next_power_of_2(self.parts), "CHANNELS": FEW}

    def allocate_parts(self, x: Tensor, sums: int) -> Tensor:
        return x.new_empty((sums, self.parts, self.channels), dtype=self.kind)

    def sum_parts(self, parts: Tensor) -> Tensor:
        """(K, C) sums of parts (K, P, C)."""
        sums = parts.new_empty((len(parts), self.channels))
        grid = (triton.cdiv(self.channels, FEW), len(parts))
        kernels.sum_parts[grid](parts, sums, self.channels, self.parts, **self.part_block)
        return sums


def statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """(m, r) of x, each (C,); running statistics are updated in place."""
    sizes = NormSizes(x)
    parts = sizes.allocate_parts(x, 2)
    mean, rstd = parts.new_empty((2, sizes.channels)).unbind()
    # Triton passes numbers as float32: not good enough for the momentum of float64.
    running = running_mean is not None and running_var is not None and x.dtype != torch.float64
    kept = (mean, rstd, running_mean if running else mean, running_var if running else mean)
    numbers = (sizes.rows, sizes.channels, sizes.parts)
    kernels.moments[sizes.sum_grid](x, parts, *numbers, **sizes.long)
    grid = (triton.cdiv(sizes.channels, FEW),)
    kernels.combine_moments[grid](
        parts, *kept, momentum, *numbers,
        EPS=eps, RUNNING=running, ROWS=sizes.long["ROWS"], **sizes.part_block,
    )  # fmt: skip
    if running_mean is not None and running_var is not None and not running:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_((rstd**-2 - eps) * (sizes.rows / (sizes.rows - 1)), momentum)
    return mean, rstd


def normalise_rows(
    x: Tensor, added: Tensor | None, mean: Tensor, spread: Tensor, weight: Tensor, bias: Tensor, *,
    relu: bool, eps: float | None = None,
) -> Tensor:  # fmt: skip
    """y. With `eps`, spread is the variance; without it, r."""
    sizes, y = NormSizes(x), torch.empty_like(x)
    kernels.normalise_rows[sizes.tile_grid](
        x, x if added is None else added, y, mean, spread, weight, bias, sizes.rows, sizes.channels,
        EPS=eps or 0.0, ADDED=added is not None, RELU=relu, VARIANCE=eps is not None, **sizes.tile,
    )  # fmt: skip
    return y


def gradients(
    g: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, *, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(J t, t, sums (2, C): Σ x̂ t and Σ t). y: given if a tensor was added before ReLU; without it t is not computed."""
    sizes, added = NormSizes(x), y is not None
    parts, t = sizes.allocate_parts(x, 2), torch.empty_like(x) if added else g
    layer, numbers = (mean, rstd, weight, bias), (sizes.rows, sizes.channels)
    data, flags = (g, x, x if y is None else y), {"ADDED": added, "RELU": relu}
    kernels.gradient_parts[sizes.sum_grid](*data, *layer, parts, t, *numbers, sizes.parts, **flags, **sizes.long)
    sums = sizes.sum_parts(parts)
    # t is g beyond ReLU already, if it was written.
    return input_gradient(t, x, None, *layer, sums, relu=relu and not added), t, sums


def input_gradient(
    g: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, sums: Tensor, *,
    relu: bool,
) -> Tensor:  # fmt: skip
    """J t, with the sums known."""
    sizes, by_x = NormSizes(x), torch.empty_like(x)
    kernels.gradients[sizes.tile_grid](
        g, x, x if y is None else y, mean, rstd, weight, bias, sums, by_x, sizes.rows, sizes.channels,
        ADDED=y is not None, RELU=relu, **sizes.tile,
    )  # fmt: skip
    return by_x


def second_gradients(
    u: Tensor, v: Tensor | None, g: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, rstd: Tensor, weight: Tensor,
    bias: Tensor, sums: Tensor, *, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Derivatives of ⟨u, J t⟩ + ⟨v, t⟩ by g, x and w; `sums` are those of `gradients`."""
    sizes, added = NormSizes(x), y is not None
    parts, by_g, by_x = sizes.allocate_parts(x, 3), torch.empty_like(x), torch.empty_like(x)
    by_weight = sums.new_empty(sizes.channels)
    common = (g, x, x if y is None else y, mean, rstd, weight, bias)
    flags = {"ADDED": added, "RELU": relu}
    ends = (parts, sizes.rows, sizes.channels, sizes.parts)
    kernels.second_parts[sizes.sum_grid](u, *common, *ends, **flags, **sizes.long)
    second = sizes.sum_parts(parts)
    kernels.second_derivatives[sizes.tile_grid](
        u, u if v is None else v, *common, sums, second, by_g, by_x, by_weight, sizes.rows, sizes.channels,
        BESIDE=v is not None, **flags, **sizes.tile,
    )  # fmt: skip
    return by_g, by_x, by_weight


def fold_norm(
    kernel: Tensor, offset: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(kernel (O, I, H, W), bias (O,)) of a convolution that includes the batch norm after it; `offset`: its own bias."""
    found = torch.empty_like(kernel, dtype=dtype)
    kernel = kernel if kernel.stride() == found.stride() else torch.empty_like(found, dtype=kernel.dtype).copy_(kernel)
    shift, size = mean.new_empty(len(kernel), dtype=dtype), kernel[0].numel()
    kernels.fold_norm[(triton.cdiv(kernel.numel(), 1024),)](
        kernel, kernel if offset is None else offset, mean, variance, weight, bias, eps, found, shift, len(kernel), size,
        OFFSET=offset is not None, BLOCK=1024,
    )  # fmt: skip
    return found, shift
