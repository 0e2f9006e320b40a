"""The log density r_i whose derivative FoRDE's force is: what autograd differentiates in tests."""

import torch
from torch import Tensor

from dissensus.numerics import rbf_kernels as kernels
from dissensus.numerics.rbf_kernels import FLOOR, Bandwidth, Scales


def input_gradient_log_density(
    gradients: Tensor, lengthscales: Scales = None, bandwidth: Bandwidth = "reference", *, weight: Tensor | None = None
) -> Tensor:
    """(M,) r_i = log Σ_j k_ij of input gradients (M, B, D), differentiable in the kernel's first argument only."""
    unit = kernels.directions(kernels.to_kernel_precision(gradients))
    points, floor = kernels.scale_directions(unit, lengthscales)
    found = batch_log_density(points, bandwidth, weight, floor=floor)
    return found.to(torch.promote_types(gradients.dtype, torch.float32))


def batch_log_density(
    s: Tensor, bandwidth: Bandwidth = "reference", weight: Tensor | None = None, *, floor: Tensor | float = FLOOR
) -> Tensor:
    """(M,) log Σ_j (1/B) Σ_b κ(s_ib, sg[s_jb]) of vectors (M, B, D), already scaled; floor: least squared bandwidth."""
    exponent = kernels.kernel_exponents(s, bandwidth, floor)[0] + kernels.log_shares(weight, s)
    return torch.logsumexp(exponent.transpose(0, 1).flatten(1), dim=1)  # over b and j
