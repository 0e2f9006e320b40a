"""Batch norm over the rows of all processes, with the statistics and all derivatives of one process.

Sums over ranks are autograd functions whose derivative is again a sum over ranks; everything else is written out:
mean = Σ x / n, var = Σ (x − mean)² / n, n over all ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.distributed.mesh import Axis
from dissensus.kernels.layer_overrides import LayerOverrides
from dissensus.utils.torch_modes import set_attributes, thread


class _SumOverRanks(torch.autograd.Function):
    """Σ over the ranks of an axis; the gradient by what a rank put in is the sum of all ranks' gradients."""

    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return axis.sum(x.detach().clone(memory_format=torch.contiguous_format))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(gradient, ctx.axis), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, axis: Axis) -> tuple[Tensor, int]:
        return _SumOverRanks.apply(x.movedim(dims[0], 0), axis), 0  # type: ignore[no-untyped-call]


@contextmanager
def synchronise_norms(axis: Axis) -> Iterator[None]:
    """Inside, batch norm in training mode has the statistics of the rows of all ranks of the axis."""
    table = {F.batch_norm: partial(synchronised_batch_norm, axis)}
    with set_attributes(thread, norms=False), LayerOverrides(table):
        yield


def synchronised_batch_norm(
    axis: Axis,
    otherwise: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """What `F.batch_norm` gives for the rows of all ranks, of which these are some."""
    if not training:
        return otherwise(input, running_mean, running_var, weight, bias, False, momentum, eps)
    axes = [each for each in range(input.ndim) if each != 1]
    shape = [1, -1, *[1] * (input.ndim - 2)]
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    # The count is summed with the numbers, so that one exchange serves both.
    here = input.numel() // input.shape[1]
    sums = _sum_over_ranks(axis, torch.cat([x.sum(axes), x.new_full((1,), here)]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.reshape(shape)
    variance = _sum_over_ranks(axis, centred.square().sum(axes)) / count
    found = centred * (variance + eps).rsqrt().reshape(shape)
    if weight is not None:
        found = found * weight.reshape(shape)
    if bias is not None:
        found = found + bias.reshape(shape)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(momentum * mean.detach().to(running_mean.dtype))
        if running_var is not None:
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            running_var.mul_(1 - momentum).add_(momentum * unbiased.to(running_var.dtype))
    return found.to(input.dtype)


def _sum_over_ranks(axis: Axis, x: Tensor) -> Tensor:
    return _SumOverRanks.apply(x, axis)  # type: ignore[no-untyped-call]
