"""The seam: from pure functions of one member to gradients of all.

A method declares `member_loss(params, buffers, x, y, weight) -> (loss, z, buffers)` and, where members interact,
`couple(z) -> v`. The objective is

    Σ_i loss_i + Σ_i ⟨z_i, v_i⟩,    v = couple(stop-gradient(z)),

and `loss` and `backward` of every posterior are the two functions below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core.batch import Inputs
from dissensus.core.particles import Rows, Tensors, random_state

if TYPE_CHECKING:
    from dissensus.core.posterior import Posterior


def loss(posterior: Posterior, x: Inputs, y: Tensor, weight: Tensor | None) -> Tensor:
    """() the objective with a graph to the parameters; batch statistics are updated."""
    particles = posterior.particles
    shared, common = particles.shared_parameters(), particles.shared_buffers()

    def one(row: Rows) -> tuple[Tensor, Any, Tensors]:
        return posterior.member_loss({**shared, **row.own}, {**common, **row.buffers}, x, y, weight)

    losses, z, buffers = particles.run(one, particles.rows(), particles.members)
    particles.write_buffers(buffers)
    total: Tensor = losses.sum()
    return total + inner(z, posterior.couple(detached(z))) if posterior.coupled else total


def backward(posterior: Posterior, x: Inputs, y: Tensor, weight: Tensor | None) -> Tensor:
    """(M,) losses; the objective's gradients are added to `.grad`, batch statistics are updated."""
    particles = posterior.particles
    losses, gradients, buffers = gradients_of(posterior, x, y, weight)
    particles.write_buffers(buffers)
    parameters = {**particles.shared_parameters(), **particles.own_parameters()}
    for name, gradient in gradients.items():
        parameter = parameters[name]
        if parameter.grad is None:
            # In the parameter's memory layout, which vmap does not keep: fused optimisers on the CPU assume it silently.
            same = gradient.stride() == parameter.stride()
            parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad.add_(gradient)
    return losses


def gradients_of(posterior: Posterior, x: Inputs, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensors, Tensors]:
    """(losses (M,), gradient of each trainable tensor by name, buffers afterwards); nothing is changed."""
    particles = posterior.particles
    if particles.how == "vectorised" and particles.members > 1:
        restore = random_state()
        try:
            return _vectorised(posterior, x, y, weight)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            restore()
            result = _one_at_a_time(posterior, x, y, weight)  # raises the caller's own error if it was one
            particles.note_fallback(error)
            return result
    return _one_at_a_time(posterior, x, y, weight)


def _vectorised(posterior: Posterior, x: Inputs, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensors, Tensors]:
    """All members at once by vmap; the gradient of the sum, so that shared tensors need no copy per member."""
    particles = posterior.particles
    own, shared, common = (
        leaves(particles.own_parameters()),
        leaves(particles.shared_parameters()),
        particles.shared_buffers(),
    )

    def one(row: Rows) -> tuple[Tensor, Any, Tensors]:
        return posterior.member_loss({**shared, **row.own}, {**common, **row.buffers}, x, y, weight)

    with torch.enable_grad():
        losses, z, buffers = torch.func.vmap(one, randomness="different")(Rows(own, particles.own_buffers(), {}))
        total = losses.sum()
        if posterior.coupled:
            total = total + inner(z, posterior.couple(detached(z)))
    return losses.detach(), gradient(total, {**shared, **own}), detached(buffers)


def _one_at_a_time(
    posterior: Posterior, x: Inputs, y: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensors, Tensors]:
    """Member after member, one graph alive at a time.

    Coupled members run twice: once without a graph for z, then, with v known, for the gradient of loss_i + ⟨z_i, v_i⟩.
    Random layers see the same random numbers in both passes.
    """
    particles = posterior.particles
    rows, shared, common = particles.rows(), leaves(particles.shared_parameters()), particles.shared_buffers()
    states, cotangents = [], None
    if posterior.coupled:
        seen = []
        with torch.no_grad():
            for i in range(particles.members):
                states.append(random_state())
                row = rows.at(i)
                seen.append(posterior.member_loss({**shared, **row.own}, {**common, **row.buffers}, x, y, weight)[1])
        afterwards = random_state()
        stacked = pytree.tree_map(lambda *each: torch.stack(each), *seen)
        cotangents = posterior.couple(stacked)

    losses, own_gradients, buffers = [], [], []
    shared_gradients: Tensors = {}
    for i in range(particles.members):
        own, mine = leaves(rows.at(i).own), rows.at(i).buffers
        if states:
            states[i]()
        with torch.enable_grad():
            value, z, after = posterior.member_loss({**shared, **own}, {**common, **mine}, x, y, weight)
            total = value
            if cotangents is not None:
                total = total + inner(z, pytree.tree_map(lambda v, i=i: v[i], cotangents))
        found = gradient(total, {**shared, **own})
        for name in shared_gradients.keys() & found.keys():
            shared_gradients[name] += found[name]
        shared_gradients |= {k: g for k, g in found.items() if k in shared and k not in shared_gradients}
        own_gradients.append({k: g for k, g in found.items() if k in own})
        losses.append(value.detach())
        buffers.append(detached(after))
    if states:
        afterwards()
    used = {name for g in own_gradients for name in g}  # a member may not have used a tensor others did
    stacked_own = {
        name: torch.stack([g[name] if name in g else torch.zeros_like(rows.own[name][0]) for g in own_gradients])
        for name in rows.own
        if name in used
    }
    stacked_buffers = {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}
    return torch.stack(losses), {**shared_gradients, **stacked_own}, stacked_buffers


def leaves(tensors: Tensors) -> Tensors:
    """The same values as fresh leaves of autograd; frozen ones stay without gradient."""
    return {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}


def gradient(total: Tensor, tensors: Tensors) -> Tensors:
    """Name -> d total / d tensor for the trainable ones that total depends on."""
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    if not wanted or not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return {name: g for name, g in zip(wanted, found, strict=True) if g is not None}


def inner(a: Any, b: Any) -> Tensor:
    """⟨a, b⟩ over two equal trees of tensors."""
    terms = [(p * q).sum() for p, q in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)]
    return torch.stack(terms).sum()


def detached(tree: Any) -> Any:
    return pytree.tree_map(lambda tensor: tensor.detach(), tree)
