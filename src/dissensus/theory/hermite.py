"""Hermite expansions and quadrature.

E φ(z) φ(z') = Σ_k α_k(a) α_k(b) ρ^k for Gaussian z, z' of variances a, b and correlation ρ (Mehler): a sum of products of
one-dimensional integrals replaces a two-dimensional integral; integrals over modulations are one-dimensional too.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from dissensus.layers.modulation import Modulation

ORDER = 512  # nodes of an expansion of an activation
LAW_NODES = 40  # nodes of a normal modulation; even, so that none is 0
# Largest share of E φ² in the upper half of the coefficients: a kink leaves 1e-2 there. The error of a smooth function beyond
# the last coefficient is smaller by orders of magnitude.
TAIL = 2e-5


def coefficients(
    function: Callable[[Tensor], Tensor], variance: Tensor, factors: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V, n) coefficients of φ(vz), v φ'(vz) and z φ'(vz) in the Hermite polynomials of z/√variance, for V factors v.

    `weights`: the factors' probabilities, used to judge whether the function is smooth enough.
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


def sum_expansion(left: Tensor, right: Tensor, weights: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
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
        got = f"a share {worst:.1e} of its expansion beyond degree {half}"
        advice = "pass smaller weight variances, or 'relu' or 'leaky_relu', which have closed forms"
        raise ValueError(f"expected a smooth activation, got {got}, above {TAIL:.0e}; {advice}")


@lru_cache(maxsize=8)
def hermite_basis(order: int) -> tuple[Tensor, Tensor]:
    """(nodes (n,), basis (n, n)) with basis[k, j] = √w_j h_k(x_j), h_k the normalised Hermite polynomials of N(0, 1).

    Golub & Welsch 1969: eigenvalues and eigenvectors of the polynomials' tridiagonal recurrence. Rows are orthonormal. Nothing
    overflows, although h_k would.
    """
    off = torch.arange(1, order, dtype=torch.float64).sqrt()
    nodes, basis = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, basis * basis[0].sign()  # √w_j = basis[0, j] > 0


def law_nodes(law: Modulation) -> tuple[Tensor, Tensor]:
    """(values, weights) with Σ w f(v) = E f(v): exact for laws with atoms, Gauss-Hermite for normal ones."""
    if law.discrete:
        values, weights = zip(*law.atoms(), strict=True)
        return torch.tensor(values, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    mean, std = law.parameters
    nodes, basis = hermite_basis(LAW_NODES)
    return mean + std * nodes, basis[0] ** 2  # exact for polynomials of degree below 2·LAW_NODES
