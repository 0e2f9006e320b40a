"""Score estimates: ∇ log q at every particle, where the particles are samples of q.

With the RBF kernel K and its slopes G_i = Σ_j ∇_{z_i} k(z_i, z_j) = (1/h) Σ_j K_ij (z_j − z_i),

    kde              G_i / Σ_j K_ij                      kernel density (D'Angelo & Fortuin, NeurIPS 2021)
    stein            (K + ηI)⁻¹ G                        Stein gradient estimator (Li & Turner, ICLR 2018)
    spectral_stein   K (K + ηI)⁻² G                      spectral Stein gradient estimator (Shi et al., ICML 2018)

Each is a matrix (M, M) applied to the particles. The `…_matrix` functions return that matrix, so that particles may consist of
several tensors. The last one is the sum over all eigenfunctions,

    Σ_m β_m φ_m(z_i),   φ_m(z) = √M/λ_m Σ_j u_jm k(z, z_j),   β_m = 1/(√M λ_m) Σ_j u_jm G_j,   K + ηI = U diag(λ) Uᵀ.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.numerics.rbf_kernels import as_rows, median_bandwidth, rbf, squared_distances

RIDGE = 0.01  # η

Score = Literal["kde", "stein", "spectral_stein"]


def kde(z: Tensor, *, bandwidth: float | None = None) -> Tensor:
    """(M, P) ∇ log q of particles (M, P) by a kernel density; `bandwidth=None`: the median heuristic."""
    return _estimate(kde_matrix, z, bandwidth)


def stein(z: Tensor, *, bandwidth: float | None = None) -> Tensor:
    """(M, P) ∇ log q of particles (M, P) by the Stein gradient estimator."""
    return _estimate(stein_matrix, z, bandwidth)


def spectral_stein(z: Tensor, *, bandwidth: float | None = None) -> Tensor:
    """(M, P) ∇ log q of particles (M, P) by the spectral Stein gradient estimator, all eigenvectors kept."""
    return _estimate(spectral_stein_matrix, z, bandwidth)


def spectral_stein_at(points: Tensor, samples: Tensor) -> Tensor:
    """(M, P) ∇ log q at points (M, P), q the density of other samples (n, P), whose median gives the bandwidth."""
    squared = squared_distances(samples)
    h = median_bandwidth(squared)
    kernel = rbf(squared, h)
    inner = _solve(kernel, _solve(kernel, slopes(kernel, h)))  # (n, n)
    values = rbf(squared_distances(points, samples), h) @ inner @ as_rows(samples)
    return values.to(points.dtype).reshape(points.shape)


def svgd(z: Tensor, score: Tensor, *, bandwidth: float | None = None) -> Tensor:
    """(M, P) φ_i = (1/M) [Σ_j K_ij ∇ log π(z_j) − G_i] of particles (M, P) and scores ∇ log π (M, P) of the target.

    The direction of Stein variational gradient descent (Liu & Wang, NeurIPS 2016).
    """
    kernel, h = kernel_and_bandwidth(squared_distances(z), bandwidth)
    direction: Tensor = apply_matrix(kernel / len(z), score) - apply_matrix(slopes(kernel, h) / len(z), z - z.mean(0))
    return direction


def kde_matrix(squared: Tensor, bandwidth: float | None = None) -> Tensor:
    """(M, M) A with A z the kernel-density score, from squared distances (M, M)."""
    kernel, h = kernel_and_bandwidth(squared, bandwidth)
    return slopes(kernel, h) / kernel.sum(1, keepdim=True)


def stein_matrix(squared: Tensor, bandwidth: float | None = None) -> Tensor:
    """(M, M) A with A z the Stein score, from squared distances (M, M)."""
    kernel, h = kernel_and_bandwidth(squared, bandwidth)
    return _solve(kernel, slopes(kernel, h))


def spectral_stein_matrix(squared: Tensor, bandwidth: float | None = None) -> Tensor:
    """(M, M) A with A z the spectral Stein score, from squared distances (M, M)."""
    kernel, h = kernel_and_bandwidth(squared, bandwidth)
    return kernel @ _solve(kernel, _solve(kernel, slopes(kernel, h)))


Matrix = Callable[[Tensor], Tensor]
MATRICES: dict[str, Matrix] = {"kde": kde_matrix, "stein": stein_matrix, "spectral_stein": spectral_stein_matrix}


def kernel_and_bandwidth(squared: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor | float]:
    """((M, M) RBF kernel, h), by the median heuristic if no bandwidth is given."""
    h = median_bandwidth(squared) if bandwidth is None else bandwidth
    return rbf(squared, h), h


def slopes(kernel: Tensor, bandwidth: Tensor | float) -> Tensor:
    """(M, M) S with S z = G:  (K − diag(Σ_j K_ij)) / h."""
    return (kernel - torch.diag(kernel.sum(1))) / bandwidth


def apply_matrix(matrix: Tensor, z: Any) -> Any:
    """A z over the member axis of every tensor (M, ...) in a tree, in each tensor's own dtype."""

    def one(tensor: Tensor) -> Tensor:
        return (matrix @ as_rows(tensor)).to(tensor.dtype).reshape(tensor.shape)

    return pytree.tree_map(one, z)


def _estimate(matrix: Callable[..., Tensor], z: Tensor, bandwidth: float | None) -> Tensor:
    centred = z - z.mean(0)  # rows of the matrix sum to zero
    score: Tensor = apply_matrix(matrix(squared_distances(z), bandwidth), centred)
    return score


def _solve(kernel: Tensor, right: Tensor) -> Tensor:
    """(K + ηI)⁻¹ right, by a variant that does not read its error code, which would synchronise with the device."""
    ridge = RIDGE * torch.eye(kernel.shape[0], dtype=kernel.dtype, device=kernel.device)
    return torch.cholesky_solve(right, torch.linalg.cholesky_ex(kernel + ridge).L)
