"""Own and shared: which tensors each member has for itself, and which are stored once for all."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.member import Member
from dissensus.core.statistics import frozen_norms, statistics_names
from dissensus.numerics.layout import owned
from dissensus.numerics.tree import Tensors, TensorTree

NUMBER = "number"  # the buffer that says which member's template its tensors belong into, where each has its own


def split_trees(
    rows: Mapping[str, Sequence[Tensor] | Tensor], *, own: Callable[[str], bool], kept: Collection[str]
) -> tuple[TensorTree, TensorTree]:
    """(own, shared) trees of tensors: of each name's M rows all, stacked, where `own(name)`, else the first."""
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
    """Names of tensors that no member trains and all have alike: frozen parameters, and statistics of frozen norm layers.

    No names where that is all that members have, or where there is one member.
    """
    frozen = {name for name, tensor in member.named_parameters() if not tensor.requires_grad}
    layers = frozen_norms(member, frozen)
    kept = {*frozen, *(name for name in statistics_names(member) if name.rpartition(".")[0] in layers)}
    alike = {name for name in kept if all(torch.equal(row, rows[name][0]) for row in rows[name][1:])}
    several = all(len(each) > 1 for each in rows.values())
    return alike if several and len(alike) < len(rows) else set()


def as_stored(state: dict[str, Any], prefix: str, *, own: nn.Module, shared: nn.Module, members: int) -> None:
    """Puts a state dict into the form of these trees: single tensors are repeated, or equal rows become one."""
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
    """(M, ...) in memory of its own: a view of a flat tensor and a tensor from a file differ in the last bit of products."""
    if isinstance(rows, nn.Parameter):
        return rows.detach()
    return owned(rows.detach()) if isinstance(rows, Tensor) else torch.stack([row.detach() for row in rows])
