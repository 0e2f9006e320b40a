"""Gradient descent on the squared error under a fixed kernel, in closed form from its eigenvectors.

L = (1/2B) Σ_b (f − y)². With s = ηλ/B for the kernel's eigenvalues λ, a residual's component is multiplied by e^{−s} per unit
of time in the flow, and by 1 − s per step.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dissensus.utils.checks import one_of

Descent = Literal["flow", "steps"]


class FactorisedKernel:
    """A factorised kernel Θ(X, X) with Θ(points, X): computes the effect of descent on X at the points."""

    def __init__(self, train: Tensor, points: Tensor | None = None) -> None:
        self.eigenvalues, self.eigenvectors = spectrum(train)
        self._towards = (train if points is None else points) @ self.eigenvectors  # (n, B)

    def response_matrix(self, times: Tensor, rate: float, descent: Descent) -> Tensor:
        """(T, n, B) A(t) = Θ(points, X) Θ⁻¹ (I − e^{−ηΘt/B}), which maps initial residuals to changes at the points."""
        return torch.einsum("nk,tk,bk->tnb", self._towards, self._gains(times, rate, descent), self.eigenvectors)

    def apply_to_residual(self, residual: Tensor, times: Tensor, rate: float, descent: Descent) -> Tensor:
        """(T, n, …) A(t) times the residual (B, …), without forming A."""
        parts = torch.tensordot(self.eigenvectors.T, residual, 1)  # (B, …)
        gains = self._gains(times, rate, descent)
        return torch.einsum("nk,tk,k...->tn...", self._towards, gains, parts)

    def _gains(self, times: Tensor, rate: float, descent: Descent) -> Tensor:
        """(T, B) (1 − remaining share at t)/λ; ηt/B at λ = 0."""
        batch = len(self.eigenvalues)
        s = rate * self.eigenvalues / batch
        done = 1 - remaining_share(s, times, descent)
        small = s < 1e-12 * max(1.0, float(s.max()))
        limit = (rate * times / batch)[:, None].expand_as(done)
        return torch.where(small, limit, done / self.eigenvalues.clamp(min=1e-300))


def remaining_share(s: Tensor, times: Tensor, descent: Descent) -> Tensor:
    """(T, B) remaining share of each component at each time."""
    if one_of("descent", descent, ("flow", "steps")) == "flow":
        return torch.exp(-times[:, None] * s)
    if bool((times != times.round()).any()):
        raise ValueError("expected whole numbers of steps, got others; pass descent='flow' for times between steps")
    return (1 - s) ** times[:, None]


def residuals(
    theta: Tensor,
    initial: Tensor,
    times: Sequence[float] | Tensor,
    *,
    learning_rate: float,
    batch: int,
    descent: Descent = "flow",
) -> Tensor:
    """Residuals (T, n) of gradient descent on the squared error under a fixed kernel, at T times.

    Args:
        theta: kernel (n, n); for an ensemble that of all members together, with rows members × inputs.
        initial: (n,) residuals at the start.
        times: T times, in optimiser steps from 0.
        learning_rate: η, for a loss that is a mean over inputs.
        batch: number of inputs of each member, B.
        descent: "flow" for continuous time, "steps" for gradient descent at whole times.
    """
    eigenvalues, eigenvectors = spectrum(theta)
    share = remaining_share(learning_rate * eigenvalues / batch, as_times(times, theta), descent)
    return (share * (eigenvectors.T @ initial.to(theta.dtype))) @ eigenvectors.T


def spectrum(theta: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues, eigenvectors); raises if eigenvalues are negative beyond rounding, and sets smaller negative ones to 0."""
    theta = theta.to(torch.float64)
    square = theta.ndim == 2 and theta.shape[0] == theta.shape[1]
    if not square or not torch.allclose(theta, theta.T, rtol=0, atol=1e-5 * float(theta.abs().max())):
        raise ValueError(f"expected a symmetric kernel, got {tuple(theta.shape)}; pass the kernel of x with itself")
    values, vectors = torch.linalg.eigh((theta + theta.T) / 2)
    if float(values.min()) < -1e-5 * max(float(values.max()), 0.0) or float(values.max()) < 0:
        got = f"{float(values.min()):.3g} beside {float(values.max()):.3g}"
        raise ValueError(f"expected a kernel without negative eigenvalues, got {got}; pass a tangent kernel")
    return values.clamp(min=0), vectors


def as_times(times: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """The times as a tensor (T,) in float64."""
    found = torch.as_tensor(times, dtype=torch.float64, device=like.device)
    if found.ndim != 1 or bool((found < 0).any()):
        raise ValueError(f"expected times of shape (T,), none before 0, got {tuple(found.shape)}; pass a list")
    return found
