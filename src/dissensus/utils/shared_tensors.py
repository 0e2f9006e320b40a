"""Tensors that several modules hold as one memory: a base below adapters, a backbone below heads."""

import copy
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from dissensus.utils.module_state import deepcopy_memo
from dissensus.utils.sharding import local_part
from dissensus.utils.torch_private import version_of


def memory_place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are one and the same memory, read in the same way."""
    return local_part(tensor).data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype


def is_one_tensor(rows: Sequence[Tensor]) -> bool:
    """Whether all rows are the same memory."""
    return len({memory_place(row) for row in rows}) == 1


def alias(tensor: Tensor, *, trained: bool) -> Tensor:
    """The same memory as another parameter or buffer: to move or freeze one leaves the other as it is."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach()
    # Other classes of parameters, such as quantised weights, hold more than their numbers.
    return nn.Parameter(tensor.detach(), requires_grad=trained) if type(tensor) is nn.Parameter else tensor


def copy_sharing_tensors(module: nn.Module) -> nn.Module:
    """A copy whose tensors are the module's memory; to freeze, move or rebuild the copy leaves the module as it is."""
    held = (*module.parameters(), *module.buffers())
    memo = deepcopy_memo(module) | {id(tensor): alias(tensor, trained=tensor.requires_grad) for tensor in held}
    return copy.deepcopy(module, memo)


def make_from_base(make: Callable[[nn.Module], nn.Module], base: nn.Module, members: int) -> list[nn.Module]:
    """Networks that share the tensors of `base`; raises if one trains them, or if the function changes them."""
    held = [*base.named_parameters(), *base.named_buffers()]
    versions = [version_of(tensor) for _, tensor in held]
    networks = [make(copy_sharing_tensors(base)) for _ in range(members)]
    for (name, tensor), version in zip(held, versions, strict=True):
        if version_of(tensor) != version:
            fix = f"replace the layer instead, as in base.{name.rpartition('.')[0] or 'fc'} = nn.Linear(…)"
            raise ValueError(f"expected a function that leaves the base's values, got '{name}' changed in place; {fix}")
    trained = {memory_place(p) for network in networks for p in network.parameters() if p.requires_grad}
    for name, tensor in held:
        if memory_place(tensor) in trained:
            fix = "freeze it with base.requires_grad_(False), or replace the layer that members train"
            raise ValueError(f"expected members that leave the base frozen, got '{name}', which all would train; {fix}")
    return networks
