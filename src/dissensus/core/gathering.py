"""Results of single members, joined: own gradients in stacks (M, ...), shared ones summed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.core.exchange import ALONE
from dissensus.core.finite import amax
from dissensus.core.particles import Particles
from dissensus.core.running import ONE_LANE, MemberLanes
from dissensus.numerics.copying import copy_all
from dissensus.numerics.divided import here
from dissensus.numerics.tree import Tensors


class Gradients(NamedTuple):
    """Results of one batch: losses (M,), gradients of their sum for each trained tensor, buffers (M, ...) afterwards.

    `largest`: (M,) the largest absolute value of each member's own gradients, NaN if there is one; None if nobody has looked.
    """

    losses: Tensor
    gradients: Tensors
    buffers: Tensors
    largest: Tensor | None = None


class State(NamedTuple):
    """All tensors of the members: trained ones apart from frozen ones, own ones (M, ...) apart from shared ones."""

    own: Tensors
    shared: Tensors
    own_frozen: Tensors
    shared_frozen: Tensors
    own_buffers: Tensors
    shared_buffers: Tensors

    def member(self, index: int) -> State:
        """One member's tensors."""
        if not (self.own or self.own_frozen or self.own_buffers):
            return self

        def row(part: Tensors) -> Tensors:
            return {name: tensor[index] for name, tensor in part.items()}

        return self._replace(own=row(self.own), own_frozen=row(self.own_frozen), own_buffers=row(self.own_buffers))

    def leaves(self) -> Tensors:
        """The trained tensors, as leaves that require gradients."""
        return {name: tensor.detach().requires_grad_() for name, tensor in {**self.shared, **self.own}.items()}

    def parameters(self, trained: Tensors | None = None) -> Tensors:
        """All parameters, with `trained` in place of the trained ones."""
        mine = {**self.shared, **self.own} if trained is None else trained
        return {**self.shared_frozen, **self.own_frozen, **mine}

    def buffers(self) -> Tensors:
        return {**self.shared_buffers, **self.own_buffers}


def stacks_for(particles: Particles, state: State, lanes: MemberLanes) -> Tensors:
    """Stacks (M, ...) for own gradients and for buffers, which members in several lanes fill beside the work of the others."""
    if lanes is ONE_LANE or particles.exchange is not ALONE or particles.members < 2:
        return {}
    buffers = {
        name: each.new_empty((particles.members, *each.shape)) for name, each in state.member(0).buffers().items()
    }
    return {**buffers, **{name: torch.empty_like(stack) for name, stack in state.own.items()}}


def placed(one: Gradients, stacks: Tensors, index: int) -> Gradients:
    """A member's results, copied into their rows of the stacks, and the largest () of its own gradients."""
    if not stacks:
        return one
    rows = {name: stack[index] for name, stack in stacks.items()}
    gradients = {name: rows[name] for name in one.gradients if name in rows}
    buffers = {name: rows[name] for name, each in one.buffers.items() if name in rows and _alike(each, rows[name])}
    mine, given = {**gradients, **buffers}, {**one.gradients, **one.buffers}
    copy_all(list(mine.values()), [given[name] for name in mine])
    largest = amax(list(gradients.values()), one.losses.device)
    return Gradients(one.losses, {**one.gradients, **gradients}, {**one.buffers, **buffers}, largest)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether a forward pass has left a buffer its shape and dtype."""
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def gathered(state: State, found: list[Gradients], stacks: Tensors) -> Gradients:
    """Joins the results of single members: own gradients are stacked in their parameter's layout, shared ones summed.

    `stacks`: those in which gradients are already in place.
    """
    like = {**state.shared, **(state.member(0).own if len(found) == 1 else {})}
    found = [one._replace(gradients=_in_full(one.gradients, like)) for one in found]
    if len(found) == 1:
        (one,) = found
        mine = {name: g[None] if name in state.own else g for name, g in one.gradients.items()}
        return Gradients(one.losses[None], mine, {name: buffer[None] for name, buffer in one.buffers.items()})
    gradients: Tensors = {}
    targets, sources = [], []
    for name in dict.fromkeys(name for each in found for name in each.gradients):
        each = [one.gradients.get(name) for one in found]
        if name in state.own:
            gradients[name] = stacks[name] if name in stacks else torch.empty_like(state.own[name])
            rows = zip(here(gradients[name]).unbind(), each, strict=True)
            # A member may not have used a tensor that other members used.
            missing = [(row, g) for row, g in rows if g is None or name not in stacks]
            targets += [row for row, _ in missing]
            sources += [torch.zeros_like(row) if g is None else here(g) for row, g in missing]
        else:
            given = [g for g in each if g is not None]
            gradients[name] = sum(given[1:], given[0])
    buffers: Tensors = {}
    for name, first in found[0].buffers.items():
        in_place = name in stacks and _alike(first, stacks[name][0])
        buffers[name] = stacks[name] if in_place else first.new_empty((len(found), *first.shape))
        pairs = zip(buffers[name].unbind(), [one.buffers[name] for one in found], strict=True)
        elsewhere = [(row, b) for row, b in pairs if row.data_ptr() != b.data_ptr()]
        targets += [row for row, _ in elsewhere]
        sources += [b for _, b in elsewhere]
    copy_all(targets, sources)  # few kernels for all tensors and members
    looked = [one.largest for one in found if one.largest is not None]
    largest = torch.stack(looked) if stacks else None
    return Gradients(torch.stack([one.losses for one in found]), gradients, buffers, largest)


def _in_full(gradients: Tensors, like: Tensors) -> Tensors:
    """Gradients in the precision of these parameters, if they are in half precision; others as they are."""
    lower = [name for name, g in gradients.items() if name in like and g.dtype != like[name].dtype]
    full = {name: torch.empty_like(like[name]) for name in lower}
    copy_all(list(full.values()), [gradients[name] for name in lower])
    return {**gradients, **full}
