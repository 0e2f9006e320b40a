"""Flat weights: one vector split into the tensors of a network, and one block of memory viewed as many tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def state_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype for sums over a trajectory: at least float32, since half precision loses small steps."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in at least float32, for sums over many numbers whose differences matter."""
    return tensor.to(state_dtype([tensor]))


class Block:
    """One vector `flat` (P,) and `views` of it with the memory layout of the given tensors."""

    # One kernel can process all of them through `flat`; fused list operations can combine `views` with the tensors.

    def __init__(self, like: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.flat = torch.zeros(sum(tensor.numel() for tensor in like), dtype=dtype, device=like[0].device)
        self.views: list[Tensor] = []
        self.strides = [tensor.stride() for tensor in like]
        parts = torch.split(self.flat, [tensor.numel() for tensor in like])
        for tensor, part in zip(like, parts, strict=True):
            # Tensors with holes or overlaps in memory have no dense layout of their own: their view is contiguous.
            dense = torch.empty_like(tensor, device="meta").stride()
            self.views.append(part.as_strided(tensor.shape, dense))

    def has_layout_of(self, like: Sequence[Tensor]) -> bool:
        """Whether the tensors still have the same memory layout (it may change in the middle of a run)."""
        return self.strides == [tensor.stride() for tensor in like]
