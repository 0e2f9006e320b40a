"""Gradient clipping per member: by the norm of each member's own gradients, and by that of shared ones."""

import torch
from torch import Tensor

from dissensus.core.particles import Particles
from dissensus.numerics.divided import here, is_divided, joined


def clip_members(particles: Particles, largest: float) -> Tensor:
    """Scales gradients in place, each member's own ones separately, to norms of at most `largest`; (M,) norms before."""
    own = [p.grad for p in particles.own_parameters().values() if p.grad is not None]
    shared = [p.grad for p in particles.shared_parameters().values() if p.grad is not None]
    if not own and not shared:
        return torch.zeros(particles.members)
    found = []
    for gradients in (own, [g.unsqueeze(0) for g in shared]):  # (M, ...), (1, ...)
        if gradients:
            norms = _squares(gradients).sum(0).sqrt()
            factor = (largest / norms.clamp(min=1e-12)).clamp(max=1.0)
            for gradient in map(here, gradients):
                gradient.mul_(factor.to(gradient.dtype).reshape(-1, *[1] * (gradient.ndim - 1)))
            found.append(norms)
    return found[0]


def _squares(gradients: list[Tensor]) -> Tensor:
    """(T, M) squares of each tensor's norm, member by member."""
    # In float32 at least: a norm that overflows in float16 would clip every gradient to zero.
    full = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    return torch.stack(
        [
            joined(each.square().sum(tuple(range(1, each.ndim))))
            if is_divided(each)
            else each.reshape(len(each), -1).square().sum(1)
            for each in full
        ]
    )
