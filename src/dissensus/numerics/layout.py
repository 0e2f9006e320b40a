"""How a tensor lies in memory. Libraries underneath choose their path by it, and paths differ in the last bit."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SPARSE = 4  # times its own size that a tensor with holes may span in memory; beyond it the dense twin is kept


def rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a plainly contiguous tensor of this shape."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def owned(tensor: Tensor) -> Tensor:
    """The tensor in contiguous memory that is all its own: itself where it lies so, else a copy."""
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if alone and tensor.stride() == rows(tensor.shape):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def kept_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides a copy of the tensor should have: its own, or those of its dense twin where it overlaps itself."""
    if tensor.numel() == 0:
        return rows(tensor.shape)
    own = tensor.stride()
    return own if fits(tensor.shape, own) else torch.empty_like(tensor, device="meta").stride()


def laid_out(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of the tensor, in memory of its own, with these strides."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if tensor.numel() == 0 or span < tensor.numel():
        return tensor.clone()
    memory = torch.zeros(span, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def fits(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor can lie so: no two entries in one place, and not strewn over far more memory than it fills."""
    reached = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < reached:
            return False
        reached += stride * (size - 1)
    return reached <= SPARSE * max(1, math.prod(shape))
