"""Errors, densities and intervals of real-valued predictions, in the units of the targets.

Targets y are (N, D) or (N,). A single Gaussian has mean and variance of that shape, members (M, N, D) or (M, N).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.metrics.metric_inputs import gaussians, member_gaussians, same_shape
from dissensus.utils.checks import fraction


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """() root mean squared error over all entries of mean and y, which have one shape."""
    return squared_errors(mean, y).mean().sqrt()


def squared_errors(mean: Tensor, y: Tensor) -> Tensor:
    """Squared errors (mean − y)², of the shape of y."""
    mean, y = same_shape(mean=mean, y=y)
    return (mean - y).square()


class Gaussian(NamedTuple):
    """Mean and variance of one shape."""

    mean: Tensor
    variance: Tensor


def moment_match(means: Tensor, variances: Tensor) -> Gaussian:
    """Gaussian (N, D) with the mean and variance of the mixture of members (M, N, D); variances may be zero."""
    means, variances = gaussians(means, variances, zero=True)
    return Gaussian(means.mean(0), variances.mean(0) + means.var(0, correction=0))


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """() mean negative log-likelihood −log N(y; mean, variance) over examples, summed over dimensions.

    `gaussian_nll(*moment_match(means, variances), y)` is the number that the Deep Ensembles paper reports; `mixture_nll`
    is that of the mixture itself. The two are not comparable.
    """
    return gaussian_nll_values(mean, variance, y).mean()


def gaussian_nll_values(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """(N,) −log N(y; mean, variance), summed over dimensions."""
    gaussians(mean, variance)
    mean, variance, y = same_shape(mean=mean, variance=variance, y=y)
    return -_log_density(mean, variance, y).reshape(len(y), -1).sum(1)


def mixture_nll(means: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """() mean negative log-likelihood −log (1/M) Σₘ N(y; meanₘ, varianceₘ) of a mixture; densities are joint over dimensions.

    Args:
        means, variances: of the members, (M, N, D) or (M, N).
        y: targets (N, D) or (N,).
    """
    return mixture_nll_values(means, variances, y).mean()


def mixture_nll_values(means: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """(N,) −log (1/M) Σₘ N(y; meanₘ, varianceₘ)."""
    means, variances, y = member_gaussians(means, variances, y)
    members = _log_density(means, variances, y).reshape(*means.shape[:2], -1).sum(2)  # (M, N)
    return math.log(len(means)) - torch.logsumexp(members, 0)


def crps_gaussian(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """() mean CRPS of N(mean, variance) over all entries, in the units of y; |y − mean| at variance 0."""
    return crps_mixture(mean.unsqueeze(0), variance.unsqueeze(0), y)


def crps_mixture(means: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """() mean CRPS of a mixture of Gaussians over all entries, in the units of y; arguments as in `mixture_nll`."""
    return crps_mixture_values(means, variances, y).mean()


def crps_mixture_values(means: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """CRPS of a mixture of Gaussians for each entry, of the shape of y.

    Grimit et al. (2006): with A(μ, σ²) = E|N(μ, σ²)| = 2σ φ(μ/σ) + μ (2Φ(μ/σ) − 1),

        CRPS = (1/M) Σₘ A(y − μₘ, σₘ²) − (1/2M²) Σₘ Σₙ A(μₘ − μₙ, σₘ² + σₙ²).

    Members may have variance 0: the mixture is then an ensemble of points.
    """
    means, variances, y = member_gaussians(means, variances, y, zero=True)
    to_target = _absolute_mean(y - means, variances).mean(0)
    # One member against all at a time: memory grows with M, not M².
    between = sum(
        (_absolute_mean(m - means, v + variances).mean(0) for m, v in zip(means, variances, strict=True)),
        start=torch.zeros_like(y),
    )
    return to_target - between / (2 * len(means))


def interval_coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """() share of entries with lower ≤ y ≤ upper."""
    return interval_coverage_values(lower, upper, y).mean()


def interval_coverage_values(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """1 where lower ≤ y ≤ upper, else 0, of the shape of y."""
    lower, upper, y = _ordered_ends(lower=lower, upper=upper, y=y)
    return ((lower <= y) & (y <= upper)).double()


def mean_interval_width(lower: Tensor, upper: Tensor) -> Tensor:
    """() mean of upper − lower, in the units of y."""
    lower, upper = _ordered_ends(lower=lower, upper=upper)
    return (upper - lower).mean()


def pinball_loss(quantile: Tensor, y: Tensor, *, level: float) -> Tensor:
    """() mean pinball loss max(level (y − q), (level − 1)(y − q)) of predicted quantiles q of that level."""
    quantile, y = same_shape(quantile=quantile, y=y)
    above = y - quantile
    return torch.maximum(fraction("level", level) * above, (level - 1) * above).mean()


class Unstandardised(NamedTuple):
    """Predictions in the original units."""

    mean: Tensor
    variance: Tensor
    nll_shift: Tensor  # () add to an NLL measured in standardised units: Σ_d log scale_d


def unstandardise(mean: Tensor, variance: Tensor, *, location: Tensor, scale: Tensor) -> Unstandardised:
    """Turns predictions for standardised targets into original units: scale·mean + location and scale²·variance.

    Args:
        mean, variance: predictions (N, D) or (N,) for standardised targets.
        location, scale: (D,) numbers subtracted from the targets, and by which they were divided; () for targets (N,).
    """
    if (scale <= 0).any():
        raise ValueError(f"expected scales above zero, got {scale.min().item():.6g}; pass standard deviations")
    return Unstandardised(mean * scale + location, variance * scale.square(), scale.double().log().sum())


def _log_density(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def _absolute_mean(mean: Tensor, variance: Tensor) -> Tensor:
    """E|N(mean, variance)|, of the broadcast shape; |mean| at variance 0."""
    std = variance.sqrt()
    z = mean / std.clamp_min(torch.finfo(std.dtype).tiny)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return 2 * std * density + mean * torch.erf(z / math.sqrt(2))  # erf(z/√2) = 2Φ(z) − 1


def _ordered_ends(**tensors: Tensor) -> list[Tensor]:
    checked = same_shape(**tensors)
    if (checked[0] > checked[1]).any():
        raise ValueError("expected lower ≤ upper everywhere, got an interval with lower > upper; swap its ends")
    return checked
