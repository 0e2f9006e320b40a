"""Gradients of a network that is not copied: by its own parameters, and after their tensor hooks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from dissensus.core.batch import Batch
from dissensus.core.exchange import ALONE
from dissensus.core.particles import Particles
from dissensus.numerics.tree import OwnTensors, Tensors

Found = tuple[Tensor, Tensors, Tensors]  # the fields of `core.gradients.Gradients`


def trains_itself(posterior: Any, batch: Batch) -> bool:
    """Whether the one member is the caller's module, on a CPU and in one process only.

    A CUDA graph is captured with new leaves: nodes of the caller's own may be on another stream.
    """
    particles = posterior.particles
    whole = particles.held and not particles.divided and not particles.fully
    return whole and particles.exchange is ALONE and not posterior.coupled and batch.y.device.type == "cpu"


def gradients_by_its_own(posterior: Any, batch: Batch) -> Found:
    """(losses (1,), gradients, buffers (1, ...)) by the module's own parameters, so that nothing is put in their place."""
    particles = posterior.particles
    params = OwnTensors(particles.template)
    before, wanted = params.buffers, {name: each for name, each in params.items() if each.requires_grad}

    def run(*_: Any) -> Found:
        with torch.enable_grad():
            value, _, after = posterior.member_loss(params, before, batch)
        found = _derivatives(value, tuple(wanted.values())) if wanted and value.requires_grad else ()
        used = {name: g for name, g in zip(wanted, found, strict=False) if g is not None}
        return value.detach()[None], used, {name: each.detach()[None] for name, each in after.items()}

    if not before:
        return run()
    # Buffers are copies while it runs, also where activations are recomputed.
    return particles.runner.differentiate(run, lambda: particles.call(run, params, before))  # type: ignore[no-any-return]


def _derivatives(value: Tensor, by: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, without what it does before it starts the engine: that takes as long as a small layer."""
    if value.ndim:  # it raises, where ones would silently make a sum
        return torch.autograd.grad(value, by, allow_unused=True)
    start = torch.ones_like(value)
    return _engine_run_backward((value,), (start,), False, False, by, allow_unreachable=True, accumulate_grad=False)


@torch.no_grad()
def hooked(particles: Particles, found: Tensors) -> Tensors:
    """Gradients by other leaves than the caller's parameters, after the tensor hooks of these, which autograd has not run."""
    if not particles.held or particles.divided or particles.fully:
        return found
    gradients, named = dict(found), particles.shared_parameters()
    for name in gradients:
        for hook in (named[name]._backward_hooks or {}).values():
            gradient = gradients[name].to(named[name].dtype)  # it may be in half precision still
            changed = hook(gradient)
            gradients[name] = gradient if changed is None else changed
    return gradients
