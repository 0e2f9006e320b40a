"""Results of single members, joined: own gradients in stacks (M, ...), shared ones summed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.core.exchange import ALONE
from dissensus.core.particles import Particles
from dissensus.core.running import ONE_LANE, MemberLanes
from dissensus.numerics.copying import copy_all
from dissensus.numerics.divided import here
from dissensus.numerics.tree import Tensors


class Gradients(NamedTuple):
    """Results of one batch: losses (M,), gradients of their sum for each trained tensor, buffers (M, ...) afterwards."""

    losses: Tensor
    gradients: Tensors
    buffers: Tensors


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
    """Stacks (M, ...) for own gradients that members in several lanes fill, each beside the work of the others."""
    alone = lanes is not ONE_LANE and particles.exchange is ALONE and particles.members > 1
    return {name: torch.empty_like(stack) for name, stack in state.own.items()} if alone else {}


def placed(one: Gradients, stacks: Tensors, index: int) -> Gradients:
    """A member's results, its own gradients copied into their rows of the stacks."""
    rows = {name: stack[index] for name, stack in stacks.items() if name in one.gradients}
    copy_all(list(rows.values()), [one.gradients[name] for name in rows])
    return one._replace(gradients={**one.gradients, **rows})


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
    buffers = {name: b.new_empty((len(found), *b.shape)) for name, b in found[0].buffers.items()}
    for name, whole in buffers.items():
        targets += whole.unbind()
        sources += [one.buffers[name] for one in found]
    copy_all(targets, sources)  # few kernels for all tensors and members
    return Gradients(torch.stack([one.losses for one in found]), gradients, buffers)


def _in_full(gradients: Tensors, like: Tensors) -> Tensors:
    """Gradients in the precision of these parameters, if they are in half precision; others as they are."""
    lower = [name for name, g in gradients.items() if name in like and g.dtype != like[name].dtype]
    full = {name: torch.empty_like(like[name]) for name in lower}
    copy_all(list(full.values()), [gradients[name] for name in lower])
    return {**gradients, **full}
