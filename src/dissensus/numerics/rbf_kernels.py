"""Kernels between members: squared distances, the median heuristic, the kernel density of input gradients, score estimates.

Kernels are computed in float64 for members of any precision (in float32 on devices without it), because members may be very
close to each other, and because autocast does not change float64. Nothing here synchronises with the device.

A score estimate is ∇ log q at every particle, where the particles are samples of q. With the RBF kernel K and its slopes
G_i = Σ_j ∇_{z_i} k(z_i, z_j) = (1/h) Σ_j K_ij (z_j − z_i),

    kde              G_i / Σ_j K_ij                      kernel density (D'Angelo & Fortuin, NeurIPS 2021)
    stein            (K + ηI)⁻¹ G                        Stein gradient estimator (Li & Turner, ICLR 2018)
    spectral_stein   K (K + ηI)⁻² G                      spectral Stein gradient estimator (Shi et al., ICML 2018)

Each is a matrix (M, M) applied to the particles: `score_matrix` returns it, so that particles may consist of several tensors.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.numerics.lengthscales import Lengthscales
from dissensus.utils.checks import one_of
from dissensus.utils.torch_private import pytree

# With the median bandwidth the force grows like 1/distance; this least squared bandwidth bounds it.
FLOOR = 1e-5
EPSILON = 1e-24  # added to squared norms of gradients, as in the paper: (1e-12)²

Bandwidth = Literal["reference", "sample", "algorithm"]
BANDWIDTHS = ("reference", "sample", "algorithm")
Scales = Lengthscales | None  # None is the identity


def squared_distances(z: Any, other: Any = None) -> Tensor:
    """(M, M) ‖z_i − z_j‖² between the rows of z, a tensor (M, ...) or a tree of them; (M, n) to the rows of `other`."""
    rows = [as_rows(tensor) for tensor in pytree.tree_leaves(z)]
    columns = rows if other is None else [as_rows(tensor) for tensor in pytree.tree_leaves(other)]
    total: Tensor | float = 0.0
    for a, b in zip(rows, columns, strict=True):
        # Centred first, so that ‖a‖² + ‖b‖² − 2 a·b does not lose digits when the mean is large.
        mean = a.mean(0)
        a, b = a - mean, b - mean
        product = a @ b.T
        if other is None:
            norm = product.diagonal()
            total = total + (norm[:, None] + norm[None, :] - 2 * product)  # exactly 0 on the diagonal
        else:
            total = total + (a.square().sum(1)[:, None] + b.square().sum(1)[None, :] - 2 * product)
    assert isinstance(total, Tensor)
    return total.clamp(min=0.0)


def median(values: Tensor, dim: int) -> Tensor:
    """The median along dim, kept as an axis of length one; for an even number, the mean of the two middle values."""
    ordered, count = values.sort(dim).values, values.shape[dim]
    return (ordered.narrow(dim, (count - 1) // 2, 1) + ordered.narrow(dim, count // 2, 1)) / 2


def median_bandwidth(squared: Tensor) -> Tensor:
    """() h = median ‖z_i − z_j‖² / (2 log(M + 1)) over all M × M entries, zeros of the diagonal included."""
    return (median(squared.flatten(), 0)[0] / (2 * math.log(squared.shape[0] + 1))).clamp(min=FLOOR)


def rbf(squared: Tensor, bandwidth: Tensor | float) -> Tensor:
    """k = exp(−‖z_i − z_j‖² / (2 h)), elementwise."""
    return torch.exp(-squared / (2 * bandwidth))


def input_gradient_force(
    gradients: Tensor, lengthscales: Scales = None, bandwidth: Bandwidth = "reference", *, weight: Tensor | None = None
) -> Tensor:
    """(M, B, D) ∂r_i/∂g_ib, r_i = log Σ_j k_ij: FoRDE's repulsion before scaling (Trinh et al. 2024, eq. 15).

        s_ib = g_ib / ‖g_ib‖,   k_ij = (1/B) Σ_b exp(−(s_ib − sg[s_jb])ᵀ Σ⁻¹ (s_ib − sg[s_jb]) log M / med)
        −2 (1 − s_ib s_ibᵀ) Σ⁻¹ Σ_j q_ijb (s_ib − s_jb) / ‖g_ib‖,   q_ijb = softmax_jb(…) log M / med

    The kernel is differentiated in its first argument only, so that the sum over i gives each member its own force.
    `bandwidth` chooses the values of the median: "reference" over i for each j and example, as in the authors' code;
    "sample" over all pairs of an example (eq. 17); "algorithm" the same with an exponent twice as large (algorithm 1).
    `weight`: (B,) weights of the examples in the mean over b. Written out because autograd would keep a dozen tensors of
    this size.
    """
    wide = to_kernel_precision(gradients)
    unit = directions(wide)
    points, floor = scale_directions(unit, lengthscales)
    exponent, per_distance, centred = kernel_exponents(points, bandwidth, floor)
    logits = (exponent + log_shares(weight, points)).transpose(0, 1)  # (M, B, M)
    q = logits.flatten(1).softmax(1).view_as(logits).transpose(0, 1) * per_distance  # (B, M_i, M_j)
    # Without the diagonal, which exerts no force and may be much larger than the rest.
    q = q.masked_fill(torch.eye(len(points), dtype=torch.bool, device=q.device), 0.0)
    pull = (torch.diag_embed(q.sum(2)) - q) @ centred  # (B, M, D)
    force = -2 * pull.transpose(0, 1)
    if lengthscales is not None:
        force = lengthscales.pull(force)
    size = wide.square().sum(-1, keepdim=True)
    force = (force - unit * (unit * force).sum(-1, keepdim=True)) * (size + EPSILON).rsqrt()
    return torch.where(size == 0, 0.0, force).to(torch.promote_types(gradients.dtype, torch.float32))


def scale_directions(unit: Tensor, lengthscales: Scales) -> tuple[Tensor, Tensor | float]:
    """(directions in the kernel's lengthscales, least squared bandwidth)."""
    if lengthscales is None:
        return unit, FLOOR
    return lengthscales.scale(unit), FLOOR * lengthscales.mean_precision.to(unit.dtype)


def directions(gradients: Tensor) -> Tensor:
    """(..., D) unit vectors g / √(‖g‖² + 1e-24). A gradient of exactly zero gives 0 and exerts no force."""
    squared = gradients.square().sum(-1, keepdim=True)
    return torch.where(squared == 0, 0.0, gradients * (squared + EPSILON).rsqrt())  # NaN stays NaN


def kernel_exponents(s: Tensor, bandwidth: Bandwidth, floor: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """((B, M_i, M_j) exponents of the kernel, their ratio to −‖s_i − s_j‖², (B, M, D) centred vectors)."""
    one_of("bandwidth", bandwidth, BANDWIDTHS)
    members = len(s)
    mine = (s - s.detach().mean(0)).transpose(0, 1)  # (B, M, D), centred as in squared_distances
    other = mine.detach()
    lengths = mine.square().sum(2)[:, :, None] + other.square().sum(2)[:, None, :]
    squared = lengths - 2 * mine @ other.transpose(1, 2)  # (B, M_i, M_j)
    itself = torch.eye(members, dtype=torch.bool, device=s.device)
    squared = squared.masked_fill(itself, 0.0).clamp(min=0.0)
    seen = squared.detach()
    middle = median(seen, 1) if bandwidth == "reference" else median(seen.flatten(1), 1)[:, :, None]
    # For M = 1, log M = 0 and the only distance is 0: the bandwidth does not matter.
    h = (middle / (math.log(members) or 1.0)).clamp(min=floor)
    per_distance = (1 if bandwidth != "algorithm" else 2) / h
    return -squared * per_distance, per_distance, mine


def log_shares(weight: Tensor | None, s: Tensor) -> Tensor:
    """Logarithms of the examples' shares in the mean over b, (B, 1, 1) or ()."""
    if weight is None:
        return torch.full((), -math.log(s.shape[1]), dtype=s.dtype, device=s.device)
    share = weight.to(s.dtype).clamp(min=torch.finfo(s.dtype).tiny * 1e6)  # finite logs for weights of 0
    return (share / share.sum()).log()[:, None, None]


def as_rows(tensor: Tensor) -> Tensor:
    """(M, P) one row per member, detached, in the precision of the kernels."""
    return to_kernel_precision(tensor.detach()).reshape(len(tensor), -1)


def to_kernel_precision(tensor: Tensor) -> Tensor:
    """The tensor in the precision of the kernels."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


RIDGE = 0.01  # η

Score = Literal["kde", "stein", "spectral_stein"]
SCORES: tuple[Score, ...] = ("kde", "stein", "spectral_stein")


def spectral_stein_at(points: Tensor, samples: Tensor) -> Tensor:
    """(M, P) ∇ log q at points (M, P), q the density of other samples (n, P), whose median gives the bandwidth."""
    squared = squared_distances(samples)
    h = median_bandwidth(squared)
    kernel = rbf(squared, h)
    inner = _solve(kernel, _solve(kernel, slopes(kernel, h)))  # (n, n)
    values = rbf(squared_distances(points, samples), h) @ inner @ as_rows(samples)
    return values.to(points.dtype).reshape(points.shape)


def score_matrix(score: Score, squared: Tensor, bandwidth: float | None = None) -> Tensor:
    """(M, M) A with A z the score estimate, from squared distances (M, M)."""
    kernel, h = kernel_and_bandwidth(squared, bandwidth)
    slope = slopes(kernel, h)
    if score == "kde":
        return slope / kernel.sum(1, keepdim=True)
    solved = _solve(kernel, slope)
    return solved if score == "stein" else kernel @ _solve(kernel, solved)


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


def _solve(kernel: Tensor, right: Tensor) -> Tensor:
    """(K + ηI)⁻¹ right, by a variant that does not read its error code, which would synchronise with the device."""
    ridge = RIDGE * torch.eye(kernel.shape[0], dtype=kernel.dtype, device=kernel.device)
    return torch.cholesky_solve(right, torch.linalg.cholesky_ex(kernel + ridge).L)
