"""Regression with the kernels of wide networks: predictions of an infinitely wide ensemble, without training."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dissensus.core.predictive import RegressionSummary
from dissensus.theory.wide_kernel import Kernels
from dissensus.utils.checks import number, one_of


def gp_predict(
    kernel: Callable[..., Kernels],
    x: Tensor,
    y: Tensor,
    points: Tensor,
    *,
    noise: float,
    kind: Literal["nngp", "ntk"] = "nngp",
    jitter: float = 0.0,
) -> RegressionSummary:
    """Predicts with an infinitely wide network by kernel regression: a `SummaryPredictive` at the points.

    Args:
        kernel: a function (x1, x2) -> `Kernels`, such as functools.partial(ds.theory.kernel, network, weight_variance=2.0).
        x, y: training inputs (B, …) and targets (B,) or (B, D).
        points: inputs (n, …) to predict at.
        noise: standard deviation σ of the targets' noise, in their units.
        kind: "nngp" for the Bayesian posterior of a wide network, A = K(·, X)(K + σ²I)⁻¹; "ntk" for wide networks trained by
            gradient descent (σ as a ridge), A = Θ(·, X)(Θ + σ²I)⁻¹, where epistemic is the variance over initialisations.
        jitter: added to the kernel's diagonal.

    Raises:
        ValueError: the kernel cannot be factorised; the message suggests a jitter.
    """
    one_of("kind", kind, ("nngp", "ntk"))
    number("noise", noise, least=0, hint="it is a standard deviation")
    if len(y) != len(x) or y.ndim not in (1, 2):
        raise ValueError(f"expected {len(x)} targets, (N,) or (N, D), got {tuple(y.shape)}; pass one target per input")
    targets = (y if y.ndim == 2 else y[:, None]).to(torch.float64)
    train, towards, own = kernel(x, None), kernel(points, x), kernel(points, None)
    solved, cross = (train.nngp, towards.nngp) if kind == "nngp" else (train.ntk, towards.ntk)
    factor = _cholesky(solved, noise**2 + jitter)
    answers = torch.cholesky_solve(cross.T, factor).T  # A (n, B)
    mean = answers @ targets
    variance = own.nngp.diagonal() - (answers * towards.nngp).sum(1)
    if kind == "ntk":
        # K** − A K(X, ·) − (A K(X, ·))ᵀ + A K(X, X) Aᵀ
        variance += ((answers @ train.nngp - towards.nngp) * answers).sum(1)
    epistemic = variance.clamp(min=0)[:, None].expand_as(mean)
    return RegressionSummary(mean[None], torch.full_like(mean, noise**2)[None], epistemic[None].clone())


def _cholesky(matrix: Tensor, ridge: float) -> Tensor:
    """The lower Cholesky factor of matrix + ridge·I; the error suggests a sufficient jitter."""
    shifted = matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor: Tensor
    factor, trouble = torch.linalg.cholesky_ex(shifted)
    smallest = float(torch.linalg.eigvalsh(shifted)[0])
    scale = float(matrix.diagonal().mean())
    if int(trouble) or smallest <= 1e-14 * scale:
        suggested = 1e-8 * scale + max(0.0, -smallest)
        got = f"a smallest eigenvalue of {smallest:.2g} with {ridge:.2g} on the diagonal"
        advice = f"pass jitter={suggested:.1g}, a noise above 0, or inputs that differ"
        raise ValueError(f"expected a positive definite kernel, got {got}; {advice}")
    return factor
