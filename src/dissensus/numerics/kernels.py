"""Kernels between members: squared distances, the median heuristic, and the kernel density of input gradients.

Kernels are computed in float64 for members of any precision (in float32 on devices without it), because members may be very
close to each other, and because autocast does not change float64. Nothing here synchronises with the device.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.numerics.checks import one_of
from dissensus.numerics.lengthscales import Lengthscales

# With the median bandwidth the force grows like 1/distance; this least squared bandwidth bounds it.
FLOOR = 1e-5
EPSILON = 1e-24  # added to squared norms of gradients, as in the paper: (1e-12)²

Bandwidth = Literal["reference", "sample", "algorithm"]
BANDWIDTHS = ("reference", "sample", "algorithm")


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


def input_gradient_log_density(
    gradients: Tensor,
    lengthscales: Lengthscales | None = None,
    bandwidth: Bandwidth = "reference",
    *,
    weight: Tensor | None = None,
) -> Tensor:
    """(M,) r_i = log Σ_j k_ij of input gradients (M, B, D): FoRDE's repulsion before scaling (Trinh et al. 2024, eq. 15).

        s_ib = g_ib / ‖g_ib‖,   k_ij = (1/B) Σ_b exp(−(s_ib − sg[s_jb])ᵀ Σ⁻¹ (s_ib − sg[s_jb]) log M / med)

    Differentiable in the first argument of the kernel only, so that the sum over i gives each member its own force.
    `bandwidth` chooses the values of the median: "reference" over i for each j and example, as in the authors' code;
    "sample" over all pairs of an example (eq. 17); "algorithm" the same with an exponent twice as large (algorithm 1).
    `weight`: (B,) weights of the examples in the mean over b.
    """
    unit = directions(working(gradients))
    if lengthscales is None:
        density = batch_log_density(unit, bandwidth, weight)
    else:
        floor = FLOOR * lengthscales.mean_precision.to(unit.dtype)
        density = batch_log_density(lengthscales.scale(unit), bandwidth, weight, floor=floor)
    return density.to(torch.promote_types(gradients.dtype, torch.float32))


def directions(gradients: Tensor) -> Tensor:
    """(..., D) unit vectors g / √(‖g‖² + 1e-24). A gradient of exactly zero gives 0 and exerts no force."""
    squared = gradients.square().sum(-1, keepdim=True)
    return torch.where(squared == 0, 0.0, gradients * (squared + EPSILON).rsqrt())  # NaN stays NaN


def batch_log_density(
    s: Tensor, bandwidth: Bandwidth = "reference", weight: Tensor | None = None, *, floor: Tensor | float = FLOOR
) -> Tensor:
    """(M,) log Σ_j (1/B) Σ_b κ(s_ib, sg[s_jb]) of vectors (M, B, D), already scaled; floor: least squared bandwidth."""
    one_of("bandwidth", bandwidth, BANDWIDTHS)
    members, size, _ = s.shape
    mine = (s - s.detach().mean(0)).transpose(0, 1)  # (B, M, D), centred as in squared_distances
    other = mine.detach()
    squared = (
        mine.square().sum(2)[:, :, None] + other.square().sum(2)[:, None, :] - 2 * mine @ other.transpose(1, 2)
    )  # (B, M_i, M_j)
    itself = torch.eye(members, dtype=torch.bool, device=s.device)
    squared = squared.masked_fill(itself, 0.0).clamp(min=0.0)
    seen = squared.detach()
    middle = median(seen, 1) if bandwidth == "reference" else median(seen.flatten(1), 1)[:, :, None]
    # For M = 1, log M = 0 and the only distance is 0: the bandwidth does not matter.
    h = (middle / (math.log(members) or 1.0)).clamp(min=floor)
    exponent = -squared / h if bandwidth != "algorithm" else -2 * squared / h
    if weight is None:
        log_weight = torch.full((), -math.log(size), dtype=s.dtype, device=s.device)
    else:
        share = weight.to(s.dtype).clamp(min=torch.finfo(s.dtype).tiny * 1e6)  # finite logs for weights of 0
        log_weight = (share / share.sum()).log()[:, None, None]
    return torch.logsumexp((exponent + log_weight).transpose(0, 1).flatten(1), dim=1)  # over b and j


def as_rows(tensor: Tensor) -> Tensor:
    """(M, P) one row per member, detached, in the precision of the kernels."""
    return working(tensor.detach()).reshape(len(tensor), -1)


def working(tensor: Tensor) -> Tensor:
    """The tensor in the precision of the kernels."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()
