"""Gradient clipping that does not couple members: by the norm of each member's own tensors, and by that of shared ones."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dissensus.core.particles import Particles


def clip_members(particles: Particles, largest: float) -> Tensor:
    """(M,) norms before clipping; scales gradients, own ones member by member, to norms of at most `largest`."""
    own = [p.grad for p in particles.own_parameters().values() if p.grad is not None]
    shared = [p.grad for p in particles.shared_parameters().values() if p.grad is not None]
    if not own and not shared:
        return torch.zeros(particles.members)
    norms = _norms(own, members=particles.members) if own else _norms([g.unsqueeze(0) for g in shared], members=1)
    if own:
        factor = (largest / norms.clamp(min=1e-12)).clamp(max=1.0)  # (M,)
        for gradient in own:
            gradient.mul_(factor.to(gradient.dtype).reshape(-1, *[1] * (gradient.ndim - 1)))
    if shared:
        norm = _norms([g.unsqueeze(0) for g in shared], members=1)
        factor = (largest / norm.clamp(min=1e-12)).clamp(max=1.0)
        for gradient in shared:
            gradient.mul_(factor[0].to(gradient.dtype))
    return norms


def _norms(gradients: Iterable[Tensor], *, members: int) -> Tensor:
    # In float32 at least: a norm that overflows in float16 would clip every gradient to zero.
    full = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    squares = [gradient.reshape(members, -1).square().sum(1) for gradient in full]
    return torch.stack(squares).sum(0).sqrt()
