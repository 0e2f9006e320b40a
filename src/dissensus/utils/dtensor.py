"""Tensors of which each process has a part (torch's DTensor): the part that lies here, the whole, and cutting it again.

Of ordinary tensors all of these are the tensor itself.
"""

from torch import Tensor

from dissensus.utils.tensor_tree import Tensors


def is_divided(tensor: Tensor) -> bool:
    """Whether processes have parts of it."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process."""
    return tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The tensor put together, in every process. Its gradient in each counts: by the part that lies here it is their sum."""
    if not is_divided(tensor):
        return tensor
    from torch.distributed.tensor import Partial  # imported by who divided it: it takes seconds

    return tensor.full_tensor(grad_placements=[Partial()])  # type: ignore[attr-defined, no-any-return]


def gather_full_tensors(tensors: Tensors) -> Tensors:
    """Name -> the tensor put together."""
    return {name: gather_full_tensor(tensor) for name, tensor in tensors.items()}


def shard_like(tensor: Tensor, like: Tensor, *, before: int = 0) -> Tensor:
    """A whole tensor, the same in all processes, divided as `like` is; it has so many more axes in front."""
    return _shard_axis(tensor, like, like.placements[0].dim + before) if is_divided(like) else tensor  # type: ignore[attr-defined]


def shard_last_axis(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same in all processes, divided along its last axis over those that `like` is divided over."""
    return _shard_axis(tensor, like, tensor.ndim - 1) if is_divided(like) else tensor


def _shard_axis(tensor: Tensor, like: Tensor, axis: int) -> Tensor:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, [Shard(axis)], src_data_rank=None)  # type: ignore[attr-defined]
