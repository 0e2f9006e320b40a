"""Eigenvectors at one end of the spectrum; on a GPU by matrix products only, so that a CUDA graph can capture it."""

import math
from typing import Literal

import torch
from torch import Tensor

Order = Literal["largest", "smallest"]
SQUARINGS = 40  # A^(2^40): separates eigenvalues with a relative difference of 1e-10
NOTHING = 1e-12  # share of the trace: a smaller remainder after deflation is rounding and has no direction
EVERY = 4  # squarings between two scalings: eigenvalues of at least 1/M, to the power 2^4, do not underflow


def extreme_eigenvectors(matrix: Tensor, count: int, order: Order) -> tuple[Tensor, Tensor]:
    """(values (k,), vectors (M, k)) at one end of the spectrum of a symmetric matrix ≥ 0 (M, M); NaN if it is not finite."""
    if matrix.device.type == "cuda":
        return eigenvectors_by_products(matrix, count, order)
    finite = matrix.isfinite().all()
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0))  # ascending; would raise if not finite
    values, vectors = torch.where(finite, values, math.nan), torch.where(finite, vectors, math.nan)
    chosen = slice(len(matrix) - count, None) if order == "largest" else slice(0, count)
    return values[chosen], vectors[:, chosen]


def eigenvectors_by_products(matrix: Tensor, count: int, order: Order) -> tuple[Tensor, Tensor]:
    """`extreme_eigenvectors` without eigh; the smallest eigenvectors are the leading ones of (tr A) I − A."""
    if order == "largest":
        return leading_eigenvectors(matrix, count)
    shift = matrix.diagonal().sum()
    turned, vectors = leading_eigenvectors(torch.diag(shift.expand(len(matrix))) - matrix, count)
    return shift - turned, vectors


def leading_eigenvectors(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values (k,), vectors (M, k)), largest first, of a symmetric matrix ≥ 0 in float64; zeros beyond its rank."""
    # Squaring A converges to λ^n v vᵀ; A is then deflated, A ← (I − v vᵀ) A (I − v vᵀ). eigh would read an error on the host.
    values: list[Tensor] = []
    vectors: list[Tensor] = []
    least = NOTHING * matrix.diagonal().sum()
    for _ in range(count):
        vector = _leading_direction(matrix, least)
        for before in vectors:  # removes components along earlier vectors that rounding leaves
            vector = vector - (before @ vector) * before
        vector = vector / vector.norm().clamp(min=torch.finfo(matrix.dtype).tiny)
        values.append(vector @ matrix @ vector)
        vectors.append(vector)
        along = matrix @ vector
        matrix = matrix - torch.outer(vector, along) - torch.outer(along, vector)
        matrix = matrix + (vector @ along) * torch.outer(vector, vector)
    return torch.stack(values), torch.stack(vectors, 1)


def _leading_direction(matrix: Tensor, least: Tensor) -> Tensor:
    """(M,) proportional to the leading eigenvector; zeros if the trace is at most `least`, that is rounding."""
    power, tiny = torch.where(matrix.diagonal().sum() > least, matrix, 0.0), torch.finfo(matrix.dtype).tiny
    for step in range(SQUARINGS):
        if step % EVERY == 0:
            power = power / power.diagonal().sum().clamp(min=tiny)  # eigenvalues at most 1, the largest ≥ 1/M
        power = power @ power
    return power.index_select(1, power.diagonal().argmax()[None])[:, 0]
