"""The seam: from pure functions of one member to the loss and gradients of all members.

A method defines `member_loss(params, buffers, batch) -> (loss, z, buffers)` and, if members interact,
`couple(z) -> v`. The objective is

    Σ_i loss_i + Σ_i ⟨z_i, v_i⟩,    v = couple(stop-gradient(z)),

with i over members. `loss` and `backward` of every posterior are computed here from it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, distributed

from dissensus.core.batch import Batch
from dissensus.core.collectives import ALONE
from dissensus.core.forward_attributes import run_separately
from dissensus.core.gradients import (
    Gradients,
    Objective,
    Strategy,
    inner_product,
    looped_gradients,
    total_objective,
    vectorised_gradients,
)
from dissensus.core.locks import PROCESS
from dissensus.core.member_runner import FallbackChain
from dissensus.core.particles import Particles, Rows
from dissensus.utils.tensor_tree import Tensors


def loss(posterior: Objective, batch: Batch) -> Tensor:
    """() the objective, differentiable by the parameters; batch statistics are updated."""
    particles = posterior.particles
    shared, common = particles.shared_parameters(), particles.shared_buffers()
    if posterior.interaction == "mix":
        # A scalar with the value Σ losses and the mixed gradients as its derivative, although no loss has that gradient.
        found = compute_gradients(posterior, batch)
        particles.write_buffers(found.buffers)
        parameters = {**shared, **particles.own_parameters()}
        slope = inner_product({name: parameters[name] for name in found.gradients}, found.gradients)
        return found.losses.sum() + slope - slope.detach()

    def one(row: Rows) -> tuple[Tensor, Any, Tensors]:
        return posterior.member_loss({**shared, **row.own}, {**common, **row.buffers}, batch)

    with _training_lock(posterior):
        losses, z, buffers = run_separately(particles, lambda: particles.run(one, particles.rows(), particles.members))
        particles.write_buffers(buffers)
        return total_objective(posterior, losses, z)


def backward(posterior: Objective, batch: Batch, strategy: Strategy | None = None) -> Tensor:
    """(M,) losses; adds the objective's gradients to `.grad` and updates batch statistics."""
    found = compute_gradients(posterior, batch, strategy)
    posterior.particles.write_buffers(found.buffers)
    add_gradients(posterior.particles.parameters_by_name(), found.gradients)
    return found.losses


def compute_gradients(
    posterior: Objective,
    batch: Batch,
    strategy: Strategy | None = None,
    unmixed: Callable[[Tensors], object] = lambda gradients: None,
) -> Gradients:
    """Gradients by the strategy, mixed if the method mixes them; `unmixed` is called with those before mixing.

    The network is locked against other threads meanwhile.
    """
    exchange = posterior.particles.exchange
    with _training_lock(posterior), posterior.particles.runner.run_context():
        with exchange.gradient_context(posterior, batch):
            found = run_separately(posterior.particles, lambda: (strategy or automatic_gradients)(posterior, batch))
        found = cast(Gradients, exchange.reduce_gradients(posterior, found))
        if posterior.interaction != "mix":
            return found
        unmixed(found.gradients)
        return found._replace(gradients=exchange.mix_gradients(posterior.mix, found.gradients), largest=None)


def add_gradients(parameters: Tensors, gradients: Tensors, *, share: Tensor | None = None) -> None:
    """Adds gradients to the `.grad` of parameters by name; with a share s it becomes (1 − s) · `.grad` + s · gradient."""
    if share is not None:
        gradients = {name: gradient * share for name, gradient in gradients.items()}
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1 - share)
    taken: set[int] = set()
    for name, gradient in gradients.items():
        parameter = parameters[name]
        if parameter.grad is None:
            # In the parameter's memory layout, which vmap does not keep, because fused optimisers silently assume it. And as
            # a copy: if two parameters are added in the network, autograd gives both the same tensor as gradient.
            usable = gradient.stride() == parameter.stride() and gradient.data_ptr() not in taken
            parameter.grad = gradient if usable else torch.empty_like(parameter).copy_(gradient)
            taken.add(gradient.data_ptr())
        else:
            parameter.grad.add_(gradient)


def _training_lock(posterior: Objective) -> AbstractContextManager[object]:
    """Checks that training is possible and locks the network; coupled members lock the whole process.

    Coupled members draw the same random numbers twice and switch attention kernels, and both are global to the process.
    """
    check_trainable(posterior)
    _check_single_process(posterior)
    _check_frozen(posterior.particles)
    return _process_lock(posterior) if posterior.interaction == "couple" else posterior.particles.lock_network()


@contextmanager
def _process_lock(posterior: Objective) -> Iterator[None]:
    with PROCESS, posterior.particles.lock_network():
        yield


def check_trainable(posterior: Objective) -> None:
    """Raises if gradients are not recorded, or if the posterior is only a watcher of the one that trains."""
    if (base := getattr(posterior, "base", None)) is not None:
        watched = f"got {type(posterior).__name__}, which watches {type(base[0]).__name__}"
        raise ValueError(f"expected the posterior that trains, {watched}; train the one that ds.track returned")
    if torch.is_inference_mode_enabled():
        raise ValueError("expected gradients to be recorded, got torch.inference_mode(); leave it, or use no_grad()")


def _check_frozen(particles: Particles) -> None:
    """Raises if a tensor that is stored once because it was frozen is trained now: members would share it."""
    for name, parameter in particles.shared_parameters().items() if particles._frozen else ():
        if parameter.requires_grad and name in particles._frozen:
            raise ValueError(f"expected '{name}' to stay frozen, got requires_grad=True; they share it: set it first")


def _check_single_process(posterior: Objective) -> None:
    """Raises if the processes of a group would each train a separate model by mistake."""
    alone = posterior.ranks is None and posterior.particles.exchange is ALONE
    grouped = alone and distributed.is_available() and distributed.is_initialized()
    if grouped and (size := distributed.get_world_size()) > 1:
        raise ValueError(
            f"expected one process, got rank {distributed.get_rank()} of {size}: outside fit, ranks share no "
            "gradients and no members, even with DistributedDataParallel; use ds.fit, or, for one model per rank, "
            'fit(ranks="independent") or posterior.ranks = "independent", each with its own seed and checkpoint'
        )


def automatic_gradients(posterior: Objective, batch: Batch) -> Gradients:
    """Gradients by vmap, or in a loop if vmap fails; the fallback is logged once."""
    particles = posterior.particles
    if particles.how == "loop" or particles.members == 1:
        return looped_gradients(posterior, batch)
    ways = FallbackChain(particles.runner.note_fallback, vectorised=vectorised_gradients, loop=looped_gradients)
    return ways(posterior, batch)  # type: ignore[no-any-return]
