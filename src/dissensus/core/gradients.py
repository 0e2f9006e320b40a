"""Gradients of all members on one batch, found without changing anything: all at once by vmap, or one after the other.

A strategy is a function `(posterior, batch) -> Gradients`. The two here work everywhere and give the same results;
the engines add compiled, streamed and captured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core.batch import Batch
from dissensus.core.particles import Lane, Particles, Rows
from dissensus.core.running import averaged
from dissensus.numerics.randomness import random_state
from dissensus.numerics.tree import Tensors


class Objective(Protocol):
    """What is to be differentiated: the functions that a posterior declares of its members."""

    particles: Particles
    train_samples: int
    ranks: Literal["independent"] | None

    @property
    def coupled(self) -> bool: ...

    @property
    def mixes(self) -> bool: ...

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]: ...

    def couple(self, z: Any) -> Any: ...

    def mix(self, gradients: Tensors) -> Tensors: ...


class Gradients(NamedTuple):
    """Results of one batch: losses, the gradient of each trained tensor by name, buffers (M, ...) afterwards.

    Losses: (M,), or (M·S,) where each member is trained by S samples, a member's samples side by side. Gradients: of the sum
    over members of the mean over samples. Buffers: means over samples.
    """

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


Strategy = Callable[[Objective, Batch], Gradients]


def vectorised(posterior: Objective, batch: Batch) -> Gradients:
    """Gradients with all members at once by vmap, of their sum: shared tensors need no copy per member."""
    state = state_of(posterior)
    wanted = {name: tensor.requires_grad_() for name, tensor in {**state.shared, **state.own}.items()}
    with posterior.particles.vectorising(), torch.enable_grad():
        total, losses, after = _objective(posterior, state, batch)
    # By plain autograd: function transforms would keep a graph of the gradients as well.
    found = torch.autograd.grad(total, list(wanted.values()), materialize_grads=True) if total.requires_grad else ()
    members, samples = posterior.particles.members, posterior.train_samples
    gradients = dict(zip(wanted, found, strict=True)) if found else {}
    return Gradients(losses.detach(), gradients, of_members(detached(after), members, samples))


def vectorised_by_transforms(posterior: Objective, state: State, batch: Batch) -> Gradients:
    """What `vectorised` gives, as a pure function of tensors that the compiler can follow.

    To be called within `particles.vectorising()`.
    """

    def objective(own: Tensors, shared: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        total, losses, after = _objective(posterior, state._replace(own=own, shared=shared), batch)
        return total, (losses, after)

    (own, shared), (losses, after) = torch.func.grad(objective, argnums=(0, 1), has_aux=True)(state.own, state.shared)
    members, samples = posterior.particles.members, posterior.train_samples
    return Gradients(losses, {**shared, **own}, of_members(after, members, samples))


def _objective(posterior: Objective, state: State, batch: Batch) -> tuple[Tensor, Tensor, Tensors]:
    """(objective (), losses, buffers afterwards), all members at once."""

    def one(row: Rows) -> tuple[Tensor, Any, Tensors]:
        params = {**state.shared, **state.shared_frozen, **row.own}
        return posterior.member_loss(params, {**state.shared_buffers, **row.buffers}, batch)

    members, samples = posterior.particles.members, posterior.train_samples
    rows = Rows({**state.own, **state.own_frozen}, state.own_buffers, {}).repeated(members, samples)
    losses, z, after = torch.func.vmap(one, randomness="different")(rows)
    total = losses.sum()
    if posterior.coupled:
        total = total + inner(z, posterior.couple(detached(z)))
    return total if samples == 1 else total / samples, losses, after


def looped(
    posterior: Objective,
    batch: Batch,
    *,
    member: Callable[..., Gradients] | None = None,
    lane: Lane = lambda index: nullcontext(),
    join: Callable[[], None] = lambda: None,
) -> Gradients:
    """Gradients with one member after the other, one graph alive at a time.

    Coupled members run twice: first without a graph, for z; then, with v known, for the gradient of loss_i + ⟨z_i, v_i⟩.
    Random layers draw the same numbers both times. `member`: finds one member's gradients. `lane(i)`: the context (a CUDA
    stream) of function i; `join()` waits for all.
    """
    member = member or member_gradients
    state, samples = state_of(posterior), posterior.train_samples
    functions = posterior.particles.members * samples
    streams, cotangents = [], None
    if posterior.coupled:
        seen = []
        for i in range(functions):
            streams.append(random_state())
            with lane(i), torch.no_grad():
                params, buffers = member_tensors(state, i // samples)
                seen.append(posterior.member_loss(params, buffers, batch)[1])
        join()
        streams.append(random_state())
        cotangents = posterior.couple(pytree.tree_map(lambda *each: torch.stack(each), *seen))

    found = []
    for i in range(functions):
        if streams:
            streams[i]()
        with lane(i):
            mine = None if cotangents is None else pytree.tree_map(lambda v, i=i: v[i], cotangents)
            found.append(member(posterior, member_state(state, i // samples), batch, mine))
    join()
    if streams:
        streams[-1]()
    return gathered(state, found, samples)


def looped_keeping_graphs(
    posterior: Objective,
    batch: Batch,
    *,
    forward: Callable[..., tuple[Tensor, Any, Tensors]] | None = None,
    lane: Lane = lambda index: nullcontext(),
    join: Callable[[], None] = lambda: None,
) -> Gradients:
    """Gradients of coupled members in one pass, all graphs kept until v is known: faster than `looped`, M times its memory."""
    forward = forward or posterior.member_loss
    state, samples = state_of(posterior), posterior.train_samples
    leaves, results = [], []
    for i in range(posterior.particles.members * samples):
        mine = member_state(state, i // samples)
        wanted = {name: tensor.detach().requires_grad_() for name, tensor in {**mine.shared, **mine.own}.items()}
        with lane(i), torch.enable_grad():
            params = {**mine.shared_frozen, **mine.own_frozen, **wanted}
            results.append(forward(params, {**mine.shared_buffers, **mine.own_buffers}, batch))
        leaves.append(wanted)
    join()
    cotangents = posterior.couple(
        pytree.tree_map(lambda *each: torch.stack(each), *(detached(z) for _, z, _ in results))
    )
    found = []
    for i, (wanted, (value, z, buffers)) in enumerate(zip(leaves, results, strict=True)):
        with lane(i):
            pulled = [v[i] for v in pytree.tree_leaves(cotangents)]
            outputs = [value, *pytree.tree_leaves(z)]
            cotangents_of = [torch.ones_like(value), *pulled]
            gradients = torch.autograd.grad(outputs, list(wanted.values()), cotangents_of, allow_unused=True)
        used = {name: g for name, g in zip(wanted, gradients, strict=True) if g is not None}
        found.append(Gradients(value.detach(), used, detached(buffers)))
    join()
    return gathered(state, found, samples)


def gathered(state: State, found: list[Gradients], samples: int) -> Gradients:
    """Results of single functions put together: own gradients stacked, in their parameter's layout; shared ones summed."""
    if samples > 1:
        found = [_mean(found[i : i + samples]) for i in range(0, len(found), samples)]
    gradients: Tensors = {}
    targets, sources = [], []
    for name in dict.fromkeys(name for each in found for name in each.gradients):
        each = [one.gradients.get(name) for one in found]
        if name in state.own:
            # A member may not have used a tensor that others did.
            gradients[name] = torch.empty_like(state.own[name])
            targets += list(gradients[name].unbind())
            sources += [torch.zeros_like(t) if g is None else g for t, g in zip(gradients[name], each, strict=True)]
        else:
            given = [g for g in each if g is not None]
            gradients[name] = sum(given[1:], given[0])
    if targets:
        torch._foreach_copy_(targets, sources)
    buffers = {name: torch.stack([one.buffers[name] for one in found]) for name in found[0].buffers}
    return Gradients(torch.stack([one.losses for one in found]).flatten(), gradients, buffers)


def _mean(found: list[Gradients]) -> Gradients:
    """One member's samples put together: losses (S,), means of gradients and buffers. An unused tensor's gradient is 0."""
    gradients: Tensors = {}
    for name in dict.fromkeys(name for each in found for name in each.gradients):
        given = [each.gradients[name] for each in found if name in each.gradients]
        gradients[name] = sum(given[1:], given[0]) / len(found)
    stacked = {name: torch.stack([each.buffers[name] for each in found]) for name in found[0].buffers}
    means = {name: averaged(values) for name, values in stacked.items()}
    return Gradients(torch.stack([each.losses for each in found]), gradients, means)


def of_members(buffers: Tensors, members: int, samples: int) -> Tensors:
    """Members' buffers (M, ...) from functions' (M·S, ...): means over samples."""
    if samples == 1:
        return buffers
    split = {name: values.reshape(members, samples, *values.shape[1:]) for name, values in buffers.items()}
    return {name: averaged(values.transpose(0, 1)) for name, values in split.items()}


def member_gradients(posterior: Objective, state: State, batch: Batch, cotangent: Any) -> Gradients:
    """Loss (), gradients and buffers of one member, by plain autograd, which works for every module."""
    wanted = {name: tensor.detach().requires_grad_() for name, tensor in {**state.shared, **state.own}.items()}
    params = {**state.shared_frozen, **state.own_frozen, **wanted}
    before, particles = {**state.shared_buffers, **state.own_buffers}, posterior.particles

    def run(*_: Any) -> Gradients:
        with torch.enable_grad():
            value, z, buffers = posterior.member_loss(params, before, batch)
            total = value if cotangent is None else value + inner(z, cotangent)
        leaves = list(wanted.values()) if total.requires_grad else []
        gradients = torch.autograd.grad(total, leaves, allow_unused=True) if leaves else ()
        used = {name: g for name, g in zip(wanted, gradients, strict=False) if g is not None}
        return Gradients(value.detach(), used, detached(buffers))

    return particles.runner.differentiate(run, lambda: particles.call(run, params, before))  # type: ignore[no-any-return]


def state_of(posterior: Objective) -> State:
    """The posterior's tensors, detached."""
    particles = posterior.particles
    own, shared = particles.own_parameters(), particles.shared_parameters()
    return State(
        {name: tensor.detach() for name, tensor in own.items() if tensor.requires_grad},
        {name: tensor.detach() for name, tensor in shared.items() if tensor.requires_grad},
        {name: tensor.detach() for name, tensor in own.items() if not tensor.requires_grad},
        {name: tensor.detach() for name, tensor in shared.items() if not tensor.requires_grad},
        particles.changing_buffers(several=particles.members * posterior.train_samples > 1),
        particles.shared_buffers(),
    )


def member_state(state: State, index: int) -> State:
    """One member's tensors."""

    def row(part: Tensors) -> Tensors:
        return {name: tensor[index] for name, tensor in part.items()}

    return state._replace(own=row(state.own), own_frozen=row(state.own_frozen), own_buffers=row(state.own_buffers))


def member_tensors(state: State, index: int) -> tuple[Tensors, Tensors]:
    """(params, buffers) of one member."""
    mine = member_state(state, index)
    params = {**mine.shared, **mine.shared_frozen, **mine.own, **mine.own_frozen}
    return params, {**mine.shared_buffers, **mine.own_buffers}


def inner(a: Any, b: Any) -> Tensor:
    """⟨a, b⟩ over two equal trees of tensors."""
    terms = [(p * q).sum() for p, q in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)]
    return torch.stack(terms).sum()


def detached(tree: Any) -> Any:
    return pytree.tree_map(lambda tensor: tensor.detach(), tree)
