"""Own and shared tensors: those that each member has for itself, and those stored once for all."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.member import Member
from dissensus.core.statistics import frozen_norms, statistics_names
from dissensus.numerics.layout import owned
from dissensus.numerics.tree import Tensors, TensorTree

NUMBER = "number"  # the buffer with each member's template index, if members have different templates


def split_trees(
    rows: Mapping[str, Sequence[Tensor] | Tensor], *, own: Callable[[str], bool], kept: Collection[str]
) -> tuple[TensorTree, TensorTree]:
    """(own, shared) trees of tensors: the M rows of a name are stacked if `own(name)`, else the first is shared."""
    trees = {True: TensorTree(), False: TensorTree()}
    for name, each in rows.items():
        mine = own(name)
        value = _stacked(each) if mine else each[0].detach().clone()
        first = each if isinstance(each, nn.Parameter) else each[0]
        if isinstance(first, nn.Parameter):
            value = nn.Parameter(value, requires_grad=first.requires_grad)
        trees[mine].plant(name, value, persistent=name in kept)
    return trees[True], trees[False]


def tensors_of(module: nn.Module) -> Tensors:
    """Name -> parameter or buffer."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


def frozen_alike(member: Member, rows: Mapping[str, Sequence[Tensor]]) -> set[str]:
    """Names of frozen tensors that are equal in all members: parameters, and statistics of frozen norm layers.

    Empty if that would be all tensors, or if there is only one member.
    """
    frozen = {name for name, tensor in member.named_parameters() if not tensor.requires_grad}
    layers = frozen_norms(member, frozen)
    kept = {*frozen, *(name for name in statistics_names(member) if name.rpartition(".")[0] in layers)}
    alike = {name for name in kept if all(torch.equal(row, rows[name][0]) for row in rows[name][1:])}
    several = all(len(each) > 1 for each in rows.values())
    return alike if several and len(alike) < len(rows) else set()


def as_stored(state: dict[str, Any], prefix: str, *, own: nn.Module, shared: nn.Module, members: int) -> None:
    """Converts a state dict to the layout of these trees: single tensors are repeated, or equal rows become one."""
    for name in tensors_of(own):
        mine, common = f"{prefix}own.{name}", f"{prefix}shared.{name}"
        if common in state and mine not in state:
            value = state.pop(common)
            state[mine] = value.expand(members, *value.shape)
    for name in tensors_of(shared):
        mine, common = f"{prefix}own.{name}", f"{prefix}shared.{name}"
        if mine in state and common not in state:
            rows = state[mine]
            if rows.ndim and len(rows) and all(torch.equal(row, rows[0]) for row in rows):
                state[common] = state.pop(mine)[0]


def _stacked(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """(M, ...) as a copy: with views of a flat tensor, products would differ in the last bit from those after loading."""
    if isinstance(rows, nn.Parameter):
        return rows.detach()
    return owned(rows.detach()) if isinstance(rows, Tensor) else torch.stack([row.detach() for row in rows])
