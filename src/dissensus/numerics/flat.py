"""Flat weights: one vector taken apart into the tensors of a network, and one block of memory seen as many tensors."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dissensus.numerics.tree import Tensors


def state_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that sums over a trajectory are kept in: at least float32, since half precision loses small steps."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least float32: sums over many numbers, whose differences count, need it."""
    return tensor.to(state_dtype([tensor]))


def unflatten(flat: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Name -> (*S, *shape) views of flat (*S, P), in the dtype of the tensors in `like`."""
    sizes = [tensor.numel() for tensor in like.values()]
    parts = torch.split(flat, sizes, dim=-1)
    return {
        name: part.reshape(*flat.shape[:-1], *tensor.shape).to(tensor.dtype)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


class Block:
    """One vector `flat` (P,) and `views` of it that lie in memory as the given tensors do.

    One kernel goes over all of them through `flat`; fused operations on lists go over `views` together with the tensors.
    """

    def __init__(self, like: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.flat = torch.zeros(sum(tensor.numel() for tensor in like), dtype=dtype, device=like[0].device)
        self.views: list[Tensor] = []
        self.strides = [tensor.stride() for tensor in like]
        parts = torch.split(self.flat, [tensor.numel() for tensor in like])
        for tensor, part in zip(like, parts, strict=True):
            # Tensors with holes or overlaps in memory have no dense twin: theirs lies in rows.
            dense = torch.empty_like(tensor, device="meta").stride()
            self.views.append(part.as_strided(tensor.shape, dense))

    def fits(self, like: Sequence[Tensor]) -> bool:
        """Whether the tensors still lie as they did (a layout may be changed in the middle of a run)."""
        return self.strides == [tensor.stride() for tensor in like]
