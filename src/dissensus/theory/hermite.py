"""Gauss-Hermite quadrature and expansions: expectations over one and over two jointly Gaussian numbers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dissensus.surgery.modulation import Modulation

ORDER = 512  # nodes of an expansion of an activation
LAW_NODES = 40  # nodes of a normal modulation; even, so that none is 0


@lru_cache(maxsize=8)
def hermite_basis(order: int) -> tuple[Tensor, Tensor]:
    """(nodes (n,), basis (n, n)) with basis[k, j] = √w_j h_k(x_j), h_k the normalised Hermite polynomials of N(0, 1).

    Golub & Welsch 1969: eigenvalues and eigenvectors of the polynomials' tridiagonal recurrence. Rows are orthonormal, and
    nothing overflows where h_k itself would.
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
