"""Tensors and networks divided over processes (torch's DTensor, `fully_shard`); of ordinary tensors, a part is the whole."""

import sys

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dissensus.utils.process_group import run_collective
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

    group = tensor.device_mesh.get_group(0)  # type: ignore[attr-defined]
    return run_collective(lambda group: tensor.full_tensor(grad_placements=[Partial()]), group=group)  # type: ignore[attr-defined]


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


def is_fully_sharded(network: nn.Module) -> bool:
    """Whether torch's `fully_shard` has divided the network's tensors over processes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported where it was used: the import takes seconds
    return fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in network.modules())


def reshard_after_forward(network: nn.Module) -> None:
    """Lets `fully_shard`, where it was used, divide all parts again after a forward pass, the outermost too."""
    # Its tensors would lie whole in the place of those that optimisers and files know.
    for part in network.modules() if is_fully_sharded(network) else ():
        if hasattr(part, "set_reshard_after_forward"):
            part.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]


def check_copyable(network: nn.Module) -> None:
    """Raises where copies are needed of a network that no process has, or whose gradients would no longer be summed."""
    if any(isinstance(part, DistributedDataParallel) for part in network.modules()):
        raise ValueError("expected a network to copy, got DistributedDataParallel; pass net.module")
    if is_fully_sharded(network):
        hint = "use ds.distributed.shard, or wrap it alone, ds.MAP(network)"
        raise NotImplementedError(f"expected a network that lies whole in a process, got one under fully_shard; {hint}")


def check_own_tensors(params: Tensors, own: Tensors) -> None:
    """Raises where a network that `fully_shard` has divided is to run with other tensors than its own."""
    if any(params[name] is not mine for name, mine in own.items()):
        got = "others, sampled or copied; use ds.distributed.shard, or MAP or MCDropout"
        raise ValueError(f"expected a network divided by fully_shard to run with its own tensors, got {got}")
