"""Member: one network, its likelihood and its latents as one module, the template for each member's tensors.

A member's tensors are its own, or shared: stored once for all members.
"""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.batch import Batch, call_network
from dissensus.core.likelihood import Likelihood
from dissensus.core.locks import network_lock
from dissensus.core.member_runner import first_line
from dissensus.utils.batch_norm_names import frozen_norms, statistics_names
from dissensus.utils.fsdp import check_copyable
from dissensus.utils.memory_layout import with_own_memory
from dissensus.utils.module_state import deepcopy_memo
from dissensus.utils.tensor_tree import Tensors, TensorTree, buffers_by_name, cache_submodules

log = logging.getLogger("dissensus")
PREFIX = "network."  # prefix of the names of a network's tensors in a member


class Member(nn.Module):
    """One network and its likelihood as one module. `forward(f, *args)` returns (f(member, *args), buffers afterwards).

    They are one module so that one `functional_call` serves both. `latents`: tensors that belong to neither, such as
    variational means and deviations, without weight prior and weight decay; f reads them as `member.latents`.
    """

    def __init__(self, network: nn.Module, likelihood: Likelihood, latents: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(likelihood, Likelihood):
            what = likelihood.__name__ + " itself" if isinstance(likelihood, type) else type(likelihood).__name__
            raise TypeError(f"expected a likelihood object, got {what}; pass an instance, for example Classification()")
        self.network, self.likelihood = network, likelihood
        self.latents = TensorTree() if latents is None else latents
        cache_submodules(self, "network", "likelihood", "latents")
        self.training = network.training  # not self.train(), which would change the submodules
        # Submodules that the caller has put in eval mode: they stay in it during training.
        self.always_eval = [name for name, part in self.named_modules() if network.training and not part.training]

    def forward(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Tensors]:
        result = function(self, *args)
        if not self.training:
            return result, {}
        return result, dict(self.named_buffers()) if torch.compiler.is_dynamo_compiling() else buffers_by_name(self)

    def nll(self, batch: Batch) -> Tensor:
        """() mean negative log-likelihood of the batch."""
        return self.likelihood.nll(call_network(self.network, batch.x), batch.y, batch.weight)


def empty_copy(member: Member) -> Member:
    """A copy of the member with empty tensors, into which real ones are put at every call. Tied tensors stay tied."""
    check_copyable(member.network)
    with network_lock(member.network):  # another thread's hooks and forwards must not be copied
        copied: Member = copy.deepcopy(member, empty_tensor_memo(member))
    return copied


def empty_copy_if_possible(member: Member) -> Member:
    """The same, or the member itself where it cannot be copied."""
    try:
        return empty_copy(member)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        # Some modules cannot be copied (they hold a lock). The original is used, under its lock, and restored each time.
        log.info("functions run in the caller's network: it cannot be copied (%s)", first_line(error))
        return member


def empty_tensor_memo(part: nn.Module) -> dict[int, Any]:
    """What a copy of the part gets in place of its tensors: empty ones."""
    found = deepcopy_memo(part)
    for parameter in part.parameters():
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        found[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in part.buffers():
        found[id(buffer)] = buffer.detach().new_empty(0)
    return found


def member_index(index: int, members: int) -> int:
    """The index from 0 to M − 1; negative ones count from the end."""
    if not -members <= index < members:
        raise ValueError(f"expected a member from 0 to {members - 1}, got {index}; there are {members} members")
    return index % members


def check_initialised(network: nn.Module) -> None:
    """Raises if this is not a network, or one with lazy tensors, tensors on the meta device, or parts of TorchScript."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(network).__name__}; pass the network object itself")
    for name, part in network.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{name or 'one'} of torch.jit, which runs only with its own weights"
            raise TypeError(f"expected a network of Python modules, got {what}; pass the one that was traced")
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            what = f"'{name}', which is lazy or on the meta device"
            raise ValueError(f"expected initialised tensors, got {what}; run one batch, or network.to_empty(device=…)")


NUMBER = "number"  # the buffer with each member's template index, if members have different templates


def split_trees(
    rows: Mapping[str, Sequence[Tensor] | Tensor], *, own: Callable[[str], bool], kept: Collection[str]
) -> tuple[TensorTree, TensorTree]:
    """(own, shared) trees of tensors: the M rows of a name are stacked if `own(name)`, else the first is shared."""
    trees = {True: TensorTree(), False: TensorTree()}
    for name, each in rows.items():
        mine = own(name)
        value = _stack_rows(each) if mine else each[0].detach().clone()
        first = each if isinstance(each, nn.Parameter) else each[0]
        if isinstance(first, nn.Parameter):
            value = nn.Parameter(value, requires_grad=first.requires_grad)
        trees[mine].add_tensor(name, value, persistent=name in kept)
    return trees[True], trees[False]


def tensors_by_name(module: nn.Module) -> Tensors:
    """Name -> parameter or buffer."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


def equal_frozen_names(member: Member, rows: Mapping[str, Sequence[Tensor]]) -> set[str]:
    """Names of frozen tensors that are equal in all members: parameters, and statistics of frozen norm layers.

    Empty if that would be all tensors, or if there is only one member.
    """
    frozen = {name for name, tensor in member.named_parameters() if not tensor.requires_grad}
    layers = frozen_norms(member, frozen)
    kept = {*frozen, *(name for name in statistics_names(member) if name.rpartition(".")[0] in layers)}
    alike = {name for name in kept if all(torch.equal(row, rows[name][0]) for row in rows[name][1:])}
    several = all(len(each) > 1 for each in rows.values())
    return alike if several and len(alike) < len(rows) else set()


def convert_state_layout(
    state: dict[str, Any], prefix: str, *, own: nn.Module, shared: nn.Module, members: int
) -> None:
    """Converts a state dict to the layout of these trees: single tensors are repeated, or equal rows become one."""
    for name in tensors_by_name(own):
        mine, common = f"{prefix}own.{name}", f"{prefix}shared.{name}"
        if common in state and mine not in state:
            value = state.pop(common)
            state[mine] = value.expand(members, *value.shape)
    for name in tensors_by_name(shared):
        mine, common = f"{prefix}own.{name}", f"{prefix}shared.{name}"
        if mine in state and common not in state:
            rows = state[mine]
            if rows.ndim and len(rows) and all(torch.equal(row, rows[0]) for row in rows):
                state[common] = state.pop(mine)[0]


def _stack_rows(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """(M, ...) as a copy: with views of a flat tensor, products would differ in the last bit from those after loading."""
    if isinstance(rows, nn.Parameter):
        return rows.detach()
    return with_own_memory(rows.detach()) if isinstance(rows, Tensor) else torch.stack([row.detach() for row in rows])
