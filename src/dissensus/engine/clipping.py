"""Gradient clipping per member: by the norm of each member's own gradients, and by that of shared ones."""

import torch
from torch import Tensor

from dissensus.core.particles import Particles


def clip_members(particles: Particles, largest: float) -> Tensor:
    """Scales gradients in place, each member's own ones separately, to norms of at most `largest`; (M,) norms before."""
    own = [p.grad for p in particles.own_parameters().values() if p.grad is not None]
    shared = [p.grad for p in particles.shared_parameters().values() if p.grad is not None]
    if not own and not shared:
        return torch.zeros(particles.members)
    found = []
    if particles.fully:
        return _clip_divided(shared, largest)
    for gradients in (own, [g.unsqueeze(0) for g in shared]):  # (M, ...), (1, ...)
        if gradients:
            # In at least float32: a norm that overflows in float16 would clip every gradient to zero.
            full = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
            norms = (
                torch.stack([gradient.reshape(len(gradient), -1).square().sum(1) for gradient in full]).sum(0).sqrt()
            )
            factor = (largest / norms.clamp(min=1e-12)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.dtype).reshape(-1, *[1] * (gradient.ndim - 1)))
            found.append(norms)
    return found[0]


def _clip_divided(gradients: list[Tensor], largest: float) -> Tensor:
    """(1,) as `clip_members`, for one network whose gradients are divided over processes (`fully_shard`)."""
    divided = [gradient for gradient in gradients if hasattr(gradient, "full_tensor")]
    plain = [gradient for gradient in gradients if not hasattr(gradient, "full_tensor")]
    squares: Tensor = torch.nn.utils.get_total_norm(divided).full_tensor().square()  # type: ignore[attr-defined]
    norm = (squares + sum(gradient.square().sum() for gradient in plain)).sqrt()
    torch._foreach_mul_(gradients, (largest / norm.clamp(min=1e-12)).clamp(max=1.0).item())
    found: Tensor = norm[None]
    return found
