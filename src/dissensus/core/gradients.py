"""Gradients of all members on one batch, as pure functions: all members at once by vmap, or one after the other.

A strategy is a function `(posterior, batch) -> Gradients`. The two strategies here work everywhere and give the same results;
the engines add compiled, streamed and captured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core.batch import Batch
from dissensus.core.held import gradients_by_its_own, hooked, trains_itself
from dissensus.core.particles import Particles, Rows
from dissensus.core.running import ONE_LANE, MemberLanes, mapped
from dissensus.numerics.copying import copy_all
from dissensus.numerics.divided import here, is_divided
from dissensus.numerics.randomness import random_state
from dissensus.numerics.tree import Tensors, named_tensors


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

        found = []
        for i in members:
            if streams:
                streams[i]()
            with lane(i):
                one = member(posterior, state.member(i), batch, pulls[i])
                found.append(exchange.found(one._replace(gradients=hooked(posterior.particles, one.gradients))))
        join()
        if streams:
            streams[-1]()
    return gathered(state, found)


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
    leaves, results = [], []
    for i in range(posterior.particles.members):
        mine = state.member(i)
        leaves.append(mine.leaves())
        with lane(i), torch.enable_grad():
            results.append(forward(mine.parameters(leaves[i]), mine.buffers(), batch))
    join()
    pulls = _cotangents_of_each(posterior, [z for _, z, _ in results])
    found = []
    for i, (wanted, result) in enumerate(zip(leaves, results, strict=True)):
        with lane(i):
            found.append(_differentiated(posterior.particles.exchange.share, wanted, *result, pulls[i]))
    join()
    return gathered(state, found)


def _cotangents_of_each(posterior: Objective, each: list[Any]) -> list[Any]:
    """Each member's v, from all members' z."""
    together = cotangents(posterior, pytree.tree_map(lambda *parts: torch.stack(parts), *each))
    return [pytree.tree_map(lambda part, i=i: part[i], together) for i in range(len(each))]


def gathered(state: State, found: list[Gradients]) -> Gradients:
    """Joins the results of single members: own gradients are stacked in their parameter's layout, shared ones summed."""
    if len(found) == 1:
        (one,) = found
        mine = {name: g[None] if name in state.own else g for name, g in one.gradients.items()}
        return Gradients(one.losses[None], mine, {name: buffer[None] for name, buffer in one.buffers.items()})
    gradients: Tensors = {}
    targets, sources = [], []
    for name in dict.fromkeys(name for each in found for name in each.gradients):
        each = [one.gradients.get(name) for one in found]
        if name in state.own:
            # A member may not have used a tensor that other members used.
            gradients[name] = torch.empty_like(state.own[name])
            rows = here(gradients[name]).unbind()
            targets += list(rows)
            sources += [torch.zeros_like(t) if g is None else here(g) for t, g in zip(rows, each, strict=True)]
        else:
            given = [g for g in each if g is not None]
            gradients[name] = sum(given[1:], given[0])
    buffers = {name: b.new_empty((len(found), *b.shape)) for name, b in found[0].buffers.items()}
    for name, whole in buffers.items():
        targets += whole.unbind()
        sources += [one.buffers[name] for one in found]
    copy_all(targets, sources)  # few kernels for all tensors and members
    return Gradients(torch.stack([one.losses for one in found]), gradients, buffers)


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
        with torch.enable_grad():
            result = posterior.member_loss(params, before, batch)
        return _differentiated(particles.exchange.share, wanted, *result, cotangent)

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
    share: Tensor | None, wanted: Tensors, value: Tensor, z: Any, buffers: Tensors, cotangent: Any
) -> Gradients:
    """One member's `Gradients`, of share · loss + ⟨z, v⟩; tensors that it did not use have no gradient."""
    share = None if share is None else share.to(value.dtype)
    pulled = [] if cotangent is None else zip(pytree.tree_leaves(z), pytree.tree_leaves(cotangent), strict=True)
    pairs = [(output, v) for output, v in ((value, share), *pulled) if output.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if pairs and wanted:
        outputs, weights = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
    used = {name: g for name, g in zip(wanted, gradients, strict=False) if g is not None}
    return Gradients(value.detach(), used, detached(buffers))


def state_of(posterior: Objective) -> State:
    """The posterior's tensors, detached."""
    particles = posterior.particles
    own, (shared, common) = particles.own_parameters(), named_tensors(particles.shared)
    trained: tuple[Tensors, Tensors] = {}, {}
    frozen: tuple[Tensors, Tensors] = {}, {}
    for i, tensors in enumerate((own, shared)):
        for name, tensor in tensors.items():
            (trained if tensor.requires_grad else frozen)[i][name] = tensor.detach()
    return State(*trained, *frozen, particles.changing_buffers(), common)


def inner(a: Any, b: Any) -> Tensor:
    """⟨a, b⟩ over two equal trees of tensors."""
    terms = [(p * q).sum() for p, q in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)]
    return torch.stack(terms).sum()


def detached(tree: Any) -> Any:
    return mapped(lambda column: column[0].detach(), [tree])
