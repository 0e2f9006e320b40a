"""Memory layout of tensors: libraries choose algorithms by it, whose results differ in the last bit."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SPARSE = 4  # a tensor with holes may span this many times its own size in memory; beyond that a dense layout is used


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def with_own_memory(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and does not share its storage, else a copy that is."""
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if alone and tensor.stride() == contiguous_strides(tensor.shape):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def strides_for_copy(tensor: Tensor) -> tuple[int, ...]:
    """The strides for a copy of the tensor: its own, or dense ones if it overlaps itself."""
    if tensor.numel() == 0:
        return contiguous_strides(tensor.shape)
    own = tensor.stride()
    return own if is_valid_layout(tensor.shape, own) else torch.empty_like(tensor, device="meta").stride()


def copy_with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of the tensor with these strides."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if tensor.numel() == 0 or span < tensor.numel():
        return tensor.clone()
    memory = torch.zeros(span, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def is_valid_layout(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these strides are possible: no two entries overlap, and the memory spanned is not far too large."""
    reached = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < reached:
            return False
        reached += stride * (size - 1)
    return reached <= SPARSE * max(1, math.prod(shape))
