"""Gradients of all members on one batch, as pure functions: all members at once by vmap, or one after the other.

A strategy is a function `(posterior, batch) -> Gradients`. The two strategies here work everywhere and give the same results;
the engines add compiled, streamed and captured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core.batch import Batch
from dissensus.core.exchange import ALONE
from dissensus.core.gathering import Gradients as Gradients
from dissensus.core.gathering import State as State
from dissensus.core.gathering import gathered, placed, stacks_for
from dissensus.core.halves import Halves, halved
from dissensus.core.held import gradients_by_its_own, hooked, trains_itself
from dissensus.core.lazy_norm import thread
from dissensus.core.particles import Particles, Rows
from dissensus.core.running import ONE_LANE, MemberLanes, mapped
from dissensus.numerics.divided import is_divided
from dissensus.numerics.randomness import random_state
from dissensus.numerics.tree import Tensors, computed_names, named_tensors


class Objective(Protocol):
    """The functions of a posterior that are differentiated."""

    particles: Particles
    ranks: Literal["independent"] | None

    @property
    def coupled(self) -> bool: ...

    @property
    def mixes(self) -> bool: ...

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]: ...

    def couple(self, z: Any) -> Any: ...

    def mix(self, gradients: Tensors) -> Tensors: ...


Strategy = Callable[[Objective, Batch], Gradients]


def vectorised(posterior: Objective, batch: Batch) -> Gradients:
    """Gradients of the members' sum, all members at once by vmap: shared tensors need no copy per member."""
    state = state_of(posterior)
    # Detached leaves, not the parameters themselves, so that `.grad` and the parameters' own graphs do not change.
    wanted = {name: tensor.requires_grad_() for name, tensor in {**state.shared, **state.own}.items()}
    with posterior.particles.vectorising(), torch.enable_grad():
        total, losses, after = all_members(posterior, state, batch)
    # Plain autograd, because function transforms would also keep a graph of the gradients.
    found = torch.autograd.grad(total, list(wanted.values()), materialize_grads=True) if total.requires_grad else ()
    return Gradients(losses.detach(), dict(zip(wanted, found, strict=False)), detached(after))


def all_members(posterior: Objective, state: State, batch: Batch) -> tuple[Tensor, Tensor, Tensors]:
    """(objective (), losses (M,), buffers afterwards), all members at once. Call it within `particles.vectorising()`."""

    def one(row: Rows) -> tuple[Tensor, Any, Tensors]:
        params = {**state.shared, **state.shared_frozen, **row.own}
        return posterior.member_loss(params, {**state.shared_buffers, **row.buffers}, batch)

    rows = Rows({**state.own, **state.own_frozen}, state.own_buffers, {})
    losses, z, after = torch.func.vmap(one, randomness="different")(rows)
    return objective(posterior, losses, z), losses, after


def objective(posterior: Objective, losses: Tensor, z: Any) -> Tensor:
    """() Σ_i loss_i + ⟨z_i, v_i⟩ from losses (M,) and the members' z."""
    total = posterior.particles.exchange.weighed(losses.sum())
    return total + inner(z, cotangents(posterior, z)) if posterior.coupled else total


def cotangents(posterior: Objective, z: Any) -> Any:
    """v, the detached factors of the members' z (M, ...)."""
    return posterior.particles.exchange.coupled(posterior.couple, detached(z))


def looped(
    posterior: Objective,
    batch: Batch,
    *,
    member: Callable[..., Gradients] | None = None,
    lanes: MemberLanes = ONE_LANE,
) -> Gradients:
    """Gradients with one member after the other; only one graph exists at a time.

    Coupled members run twice: first without a graph, for z; then, with v known, for the gradient of loss_i + ⟨z_i, v_i⟩.
    Random layers draw the same numbers both times. `member`: computes one member's gradients.
    """
    if member is None and lanes is ONE_LANE and trains_itself(posterior, batch):
        return Gradients(*gradients_by_its_own(posterior, batch))
    member = member or member_gradients
    state, (lane, join), exchange = state_of(posterior), lanes, posterior.particles.exchange
    members, whole = range(posterior.particles.members), posterior.particles.put_together
    streams: list[Callable[[], None]] = []
    pulls: list[Any] = [None] * len(members)
    with exchange.in_turn():
        if posterior.coupled:
            seen = []
            for i in members:
                # For the second run: dropout must drop the same units, or z would not be the one that v belongs to.
                streams.append(random_state())
                mine = state.member(i)
                with lane(i), torch.no_grad():
                    seen.append(posterior.member_loss(whole(mine.parameters()), mine.buffers(), batch)[1])
            join()
            streams.append(random_state())  # after one run of each member: the final state of the generators
            pulls = _cotangents_of_each(posterior, seen)

        found, stacks = [], stacks_for(posterior.particles, state, lanes)
        for i in members:
            if streams:
                streams[i]()
            with lane(i):
                one = member(posterior, state.member(i), batch, pulls[i])
                one = exchange.found(one._replace(gradients=hooked(posterior.particles, one.gradients)))
                found.append(placed(one, stacks, i))
        join()
        if streams:
            streams[-1]()
    return gathered(state, found, stacks)


def looped_keeping_graphs(
    posterior: Objective,
    batch: Batch,
    *,
    forward: Callable[..., tuple[Tensor, Any, Tensors]] | None = None,
    lanes: MemberLanes = ONE_LANE,
) -> Gradients:
    """Gradients of coupled members in one pass that keeps all graphs until v is known.

    Faster than `looped`, with M times its memory.
    """
    forward = forward or posterior.member_loss
    state, (lane, join) = state_of(posterior), lanes
    leaves, results, halves = [], [], []
    for i in range(posterior.particles.members):
        mine = state.member(i)
        leaves.append(mine.leaves())
        with lane(i), torch.enable_grad(), in_half(posterior, leaves[i]) as its:
            halves.append(its)
            results.append(forward(mine.parameters(leaves[i]), mine.buffers(), batch))
    join()
    pulls = _cotangents_of_each(posterior, [z for _, z, _ in results])
    found, stacks = [], stacks_for(posterior.particles, state, lanes)
    for i, wanted in enumerate(leaves):
        with lane(i):
            # Taken off the list, so that what is left of its graph is freed for the next member in this lane.
            one = _differentiated(posterior.particles.exchange.share, wanted, *results.pop(0), pulls[i], halves[i])
            found.append(placed(one, stacks, i))
    join()
    return gathered(state, found, stacks)


def _cotangents_of_each(posterior: Objective, each: list[Any]) -> list[Any]:
    """Each member's v, from all members' z."""
    together = cotangents(posterior, pytree.tree_map(lambda *parts: torch.stack(parts), *each))
    return [pytree.tree_map(lambda part, i=i: part[i], together) for i in range(len(each))]


def in_half(posterior: Objective, leaves: Tensors) -> AbstractContextManager[Halves | None]:
    """The context of a member's forward: layers that may be fused get weights cast at once (`core/halves.py`)."""
    return halved(leaves, usable=thread.fusing and posterior.particles.exchange is ALONE)


def member_gradients(posterior: Objective, state: State, batch: Batch, cotangent: Any) -> Gradients:
    """Loss (), gradients and buffers of one member, by plain autograd, which works for every module."""
    if posterior.particles.fully:
        return _fully_sharded_gradients(posterior, batch)
    wanted, particles = state.leaves(), posterior.particles
    params, before = state.parameters(wanted), state.buffers()
    if particles.divided:  # gradients by the parts follow from those of the whole
        with torch.enable_grad():
            params = particles.put_together(params)

    def run(*_: Any) -> Gradients:
        with torch.enable_grad(), in_half(posterior, wanted) as halves:
            result = posterior.member_loss(params, before, batch)
        return _differentiated(particles.exchange.share, wanted, *result, cotangent, halves)

    return particles.runner.differentiate(run, lambda: particles.call(run, params, before))  # type: ignore[no-any-return]


def _fully_sharded_gradients(posterior: Objective, batch: Batch) -> Gradients:
    """As `member_gradients`, for a network divided by `fully_shard`: its hooks gather weights and reduce gradients."""
    particles = posterior.particles
    params, buffers = particles.at(0)
    before = {name: parameter.grad for name, parameter in params.items()}
    for parameter in params.values():
        parameter.grad = None
    with torch.enable_grad():
        value, _, after = posterior.member_loss(params, buffers, batch)
    # torch takes the mean over ranks; here the shares of one batch must be summed.
    share, ranks = particles.exchange.share, particles.exchange.ranks
    (value if share is None else value * (share * ranks).to(value.dtype)).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in params.items() if parameter.grad is not None}
    for name, parameter in params.items():
        parameter.grad = before[name]
    gradients = {name: g if is_divided(g) else g / ranks for name, g in found.items()}
    return Gradients(value.detach(), gradients, detached(after))


def _differentiated(
    share: Tensor | None, wanted: Tensors, value: Tensor, z: Any, buffers: Tensors, cotangent: Any,
    halves: Halves | None = None,
) -> Gradients:  # fmt: skip
    """One member's `Gradients`, of share · loss + ⟨z, v⟩; tensors that it did not use have no gradient."""
    share = None if share is None else share.to(value.dtype)
    pulled = [] if cotangent is None else zip(pytree.tree_leaves(z), pytree.tree_leaves(cotangent), strict=True)
    pairs = [(output, v) for output, v in ((value, share), *pulled) if output.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if pairs and wanted:
        outputs, weights = zip(*pairs, strict=True)
        if halves is not None:
            halves.wanted = True
        gradients = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
    used = {name: g for name, g in zip(wanted, gradients, strict=False) if g is not None}
    if halves is not None:
        used = halves.joined(used)
        used = {name: used[name] for name in wanted if name in used}
    return Gradients(value.detach(), used, detached(buffers))


def state_of(posterior: Objective) -> State:
    """The posterior's tensors, detached."""
    particles = posterior.particles
    shared, common = named_tensors(particles.shared)
    own, changing, _ = particles.rows(common=common)
    for name in (*computed_names(particles.own), *computed_names(particles.shared)):
        raise ValueError(
            f"expected stored tensors to train, got '{name}', pruned or parametrised in the stack of all members; prune or "
            "parametrise the networks first, then build the posterior"
        )
    trained: tuple[Tensors, Tensors] = {}, {}
    frozen: tuple[Tensors, Tensors] = {}, {}
    for i, tensors in enumerate((own, shared)):
        for name, tensor in tensors.items():
            (trained if tensor.requires_grad else frozen)[i][name] = tensor.detach()
    return State(*trained, *frozen, changing, common)


def inner(a: Any, b: Any) -> Tensor:
    """⟨a, b⟩ over two equal trees of tensors."""
    terms = [(p * q).sum() for p, q in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)]
    return torch.stack(terms).sum()


def detached(tree: Any) -> Any:
    return mapped(lambda column: column[0].detach(), [tree])
