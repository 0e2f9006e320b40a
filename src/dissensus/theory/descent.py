"""Gradient descent on the squared error under a fixed kernel, in closed form by eigenvectors.

L = (1/2B) Σ_b (f − y)²: with s = ηλ/B for the kernel's eigenvalues λ, a residual's component is multiplied by e^{−s} a unit of
time in the flow and by 1 − s in a step.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dissensus.numerics.checks import one_of

Descent = Literal["flow", "steps"]


class FactorisedKernel:
    """One kernel Θ(X, X), factorised, and Θ(points, X): what descent on X does at the points."""

    def __init__(self, train: Tensor, points: Tensor | None = None) -> None:
        self.eigenvalues, self.eigenvectors = spectrum(train)
        self._towards = (train if points is None else points) @ self.eigenvectors  # (n, B)

    def answers(self, times: Tensor, rate: float, descent: Descent) -> Tensor:
        """(T, n, B) A(t) = Θ(points, X) Θ⁻¹ (I − e^{−ηΘt/B}): what of the initial residual the points have been moved by."""
        return torch.einsum("nk,tk,bk->tnb", self._towards, self._gains(times, rate, descent), self.eigenvectors)

    def moved(self, residual: Tensor, times: Tensor, rate: float, descent: Descent) -> Tensor:
        """(T, n, …) A(t) residual (B, …), without the matrices."""
        parts = torch.tensordot(self.eigenvectors.T, residual, 1)  # (B, …)
        gains = self._gains(times, rate, descent)
        return torch.einsum("nk,tk,k...->tn...", self._towards, gains, parts)

    def _gains(self, times: Tensor, rate: float, descent: Descent) -> Tensor:
        """(T, B) (1 − what is left at t)/λ; ηt/B at λ = 0."""
        batch = len(self.eigenvalues)
        s = rate * self.eigenvalues / batch
        done = 1 - left(s, times, descent)
        small = s < 1e-12 * max(1.0, float(s.max()))
        limit = (rate * times / batch)[:, None].expand_as(done)
        return torch.where(small, limit, done / self.eigenvalues.clamp(min=1e-300))


def left(s: Tensor, times: Tensor, descent: Descent) -> Tensor:
    """(T, B) share of each component that is left at each time."""
    if one_of("descent", descent, ("flow", "steps")) == "flow":
        return torch.exp(-times[:, None] * s)
    if bool((times != times.round()).any()):
        raise ValueError("expected whole numbers of steps, got others; use descent='flow' between them")
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
    """(T, n) residuals at the times, by gradient descent on the squared error under any fixed kernel (n, n).

    Args:
        theta: (n, n), for an ensemble that of all members together: rows members × inputs.
        initial: (n,) residuals at the start.
        times: T of them, in optimiser steps from 0.
        learning_rate: η, with a loss that is a mean over inputs.
        batch: B, inputs of each member.
        descent: "flow", continuous time, or "steps", plain gradient descent at whole times.
    """
    eigenvalues, eigenvectors = spectrum(theta)
    share = left(learning_rate * eigenvalues / batch, as_times(times, theta), descent)
    return (share * (eigenvectors.T @ initial.to(theta.dtype))) @ eigenvectors.T


def spectrum(theta: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues, eigenvectors); raises where a kernel has negative ones beyond rounding, sets those within it to 0."""
    theta = theta.to(torch.float64)
    square = theta.ndim == 2 and theta.shape[0] == theta.shape[1]
    if not square or not torch.allclose(theta, theta.T, rtol=0, atol=1e-5 * float(theta.abs().max())):
        raise ValueError(
            f"expected a symmetric kernel, got another of shape {tuple(theta.shape)}; pass that of inputs with themselves"
        )
    values, vectors = torch.linalg.eigh((theta + theta.T) / 2)
    if float(values.min()) < -1e-5 * max(float(values.max()), 0.0) or float(values.max()) < 0:
        raise ValueError(
            f"expected a kernel without negative eigenvalues, got {float(values.min()):.3g} beside "
            f"{float(values.max()):.3g}; it is no kernel of gradients"
        )
    return values.clamp(min=0), vectors


def as_times(times: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """(T,) float64."""
    found = torch.as_tensor(times, dtype=torch.float64, device=like.device)
    if found.ndim != 1 or bool((found < 0).any()):
        raise ValueError(f"expected times of shape (T,), none before 0, got {tuple(found.shape)}; pass a list")
    return found
