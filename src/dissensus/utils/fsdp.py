"""Networks that torch has wrapped for many processes: divided by `fully_shard`, or in DistributedDataParallel."""

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dissensus.utils.tensor_tree import Tensors


def is_fully_sharded(network: nn.Module) -> bool:
    """Whether torch's `fully_shard` has divided the network's tensors over processes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported where it was used: the import takes seconds
    return fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in network.modules())


def reshard_after_forward(network: nn.Module) -> None:
    """Lets `fully_shard`, where it was used, divide all parts again after a forward pass, the outermost too.

    Its tensors would lie whole in the place of those that optimisers and files know.
    """
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
        raise ValueError(
            "expected a network divided by fully_shard to run with its own tensors, got others, sampled or copied; use "
            "ds.distributed.shard, or MAP or MCDropout"
        )
