"""Hermite expansions: E φ(z) φ(z') = Σ_k α_k(a) α_k(b) ρ^k for Gaussian z, z' of variances a, b and correlation ρ (Mehler).

One sum over one-dimensional integrals replaces a two-dimensional one; modulations stay one-dimensional too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dissensus.theory.hermite import ORDER, hermite_basis

# Share of E φ² that the upper half of the coefficients may hold: a kink leaves 1e-2 there, and what a smooth function leaves
# beyond the last one is smaller by orders of magnitude.
TAIL = 2e-5


def coefficients(
    function: Callable[[Tensor], Tensor], variance: Tensor, factors: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V, n) coefficients of φ(vz), v φ'(vz) and z φ'(vz) in the Hermite polynomials of z/√variance, for V factors v.

    `weights`: the factors' probabilities; what is too rough for an expansion is judged with them.
    """
    nodes, basis = (each.to(variance.device) for each in hermite_basis(ORDER))
    z = variance.clamp(min=0).sqrt()[..., None, None] * nodes  # (..., 1, n)
    at = (factors[:, None] * z).detach().requires_grad_()  # (..., V, n)
    with torch.enable_grad():
        value = function(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    weighted = basis * basis[0]  # w_j h_k(x_j)
    found = tuple(each.detach() @ weighted.T for each in (value, factors[:, None] * slope, z * slope))
    for table in found:
        _check_smooth(table, weights)
    value, slope, product = found
    return value, slope, product


def expanded(left: Tensor, right: Tensor, weights: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Σ_k ρ^k Σ_v weights_v left[..., v, k] right[..., v, k] of c's shape, ρ = c/√(ab), by Horner's rule."""
    scale = (a * b).clamp(min=0).sqrt()
    rho = torch.where(scale > 0, c / scale.where(scale > 0, torch.ones_like(scale)), torch.zeros_like(c)).clamp(-1, 1)
    total = torch.zeros_like(c)
    for k in reversed(range(left.shape[-1])):
        total = total * rho + (weights * left[..., k] * right[..., k]).sum(-1)
    return total


def _check_smooth(table: Tensor, weights: Tensor) -> None:
    energy = (weights[:, None] * table.square()).sum(-2)
    half = table.shape[-1] // 2
    share = energy[..., half:].sum(-1) / energy.sum(-1).clamp(min=1e-300)
    worst = float(share.max())
    if not worst < TAIL:
        raise ValueError(
            f"expected a smooth activation, got one of whose expansion {worst:.1e} lies beyond degree {half}, more than "
            f"{TAIL:.0e}; smaller weight variances help, and 'relu' and 'leaky_relu' have closed forms"
        )
