"""Training dynamics in closed form: gradient descent on the squared error under a fixed kernel, and that of a wide ensemble.

L = (1/2B) Σ_b (f − y)². With s = ηλ/B for an eigenvalue λ, a residual's component falls by e^{−s} in the flow, 1 − s per step.

Members of an embedded ensemble are exchangeable, so their kernel over members and inputs has two eigenspaces over members.
With equal targets y for all, f̄ follows Θ_mean towards y, and the differences δf_α = f_α − f̄ follow Θ_diff towards 0:

    Θ_mean = (γ/M)(Θ_d + (M − 1) Θ_o) + Θ_ind        Θ_diff = (γ/M)(Θ_d − Θ_o) + Θ_ind
    f̄(x, t) = f̄₀(x) + A_mean(t) (y − f̄₀(X))          δf_α(x, t) = δf_α₀(x) − A_diff(t) δf_α₀(X)
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.theory.embedded_ensembles import EmbeddedKernels
from dissensus.utils.checks import integer, number, one_of

Descent = Literal["flow", "steps"]
Times = Sequence[float] | Tensor


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
        return torch.einsum("nk,tk,k...->tn...", self._towards, self._gains(times, rate, descent), parts)

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
    theta: Tensor, initial: Tensor, times: Times, *, learning_rate: float, batch: int, descent: Descent = "flow"
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


def as_times(times: Times, like: Tensor) -> Tensor:
    """The times as a tensor (T,) in float64."""
    found = torch.as_tensor(times, dtype=torch.float64, device=like.device)
    if found.ndim != 1 or bool((found < 0).any()):
        raise ValueError(f"expected times of shape (T,), none before 0, got {tuple(found.shape)}; pass a list")
    return found


KernelFunction = Callable[..., EmbeddedKernels]


class EnsembleLaw(NamedTuple):
    """Mean and variances of an ensemble's outputs over random initialisations, at T times and n points."""

    mean: Tensor  # (T, n, …) E f̄
    variance: Tensor  # (T, n) Var f̄, for each output
    spread: Tensor  # (T, n) E (1/M) Σ_α δf_α²


class EnsembleDynamics:
    """Predicted training of M members on x, y, evaluated at the points; made by `ensemble_dynamics`."""

    def __init__(self, kernels: Sequence[EmbeddedKernels], targets: Tensor, *, members: int, gamma: float) -> None:
        self.members_count, self.gamma = members, gamma
        self._targets, self._kernels = targets.to(torch.float64), kernels
        train, towards, _ = kernels  # the third: of the points with themselves
        self._mean = FactorisedKernel(train.mean_mode(members, gamma), towards.mean_mode(members, gamma))
        self._difference = FactorisedKernel(*(k.difference_mode(members, gamma) for k in (train, towards)))

    @property
    def mean_eigenvalues(self) -> Tensor:
        """(B,) eigenvalues of Θ_mean(X, X), ascending."""
        return self._mean.eigenvalues

    @property
    def difference_eigenvalues(self) -> Tensor:
        """(B,) eigenvalues of Θ_diff(X, X), ascending; each has multiplicity M − 1, which is 0 for one member."""
        return self._difference.eigenvalues

    @property
    def largest_rate(self) -> float:
        """The largest stable learning rate, 2B/λ_max: steps with a larger one diverge."""
        largest = float(self.mean_eigenvalues[-1])
        if self.members_count > 1:
            largest = max(largest, float(self.difference_eigenvalues[-1]))
        return 2 * len(self._targets) / largest

    def members(
        self,
        initial: Tensor,
        times: Times,
        *,
        learning_rate: float,
        at_points: Tensor | None = None,
        descent: Descent = "flow",
    ) -> Tensor:
        """Outputs (T, M, n, …) of the members at T times, from their outputs at the start.

        Args:
            initial: (M, B, …) outputs on x at the start.
            times: T times, in optimiser steps from 0.
            learning_rate: η.
            at_points: (M, n, …) outputs at the points at the start; None if the points are x.
            descent: "flow" for continuous time, "steps" for gradient descent at whole times.
        """
        expected = (self.members_count, *self._targets.shape)
        if initial.shape != expected:
            raise ValueError(f"expected initial outputs {expected}, got {tuple(initial.shape)}; put members first")
        on_train = initial.to(torch.float64)
        on_points = on_train if at_points is None else at_points.to(torch.float64)
        n = self._kernels[1].gp_same.shape[0]
        if on_points.shape[1] != n:
            raise ValueError(f"expected initial outputs at {n} points, got {on_points.shape[1]}; pass at_points")
        when = as_times(times, on_train)
        centre, centre_points = on_train.mean(0), on_points.mean(0)
        moved = self._mean.apply_to_residual(self._targets - centre, when, learning_rate, descent)
        mean = centre_points + moved  # (T, n, …)
        apart = (on_train - centre).movedim(0, -1)  # (B, …, M)
        gone = self._difference.apply_to_residual(apart, when, learning_rate, descent).movedim(-1, 1)  # (T, M, n, …)
        return mean[:, None] + (on_points - centre_points) - gone

    def law(self, times: Times, *, learning_rate: float, descent: Descent = "flow") -> EnsembleLaw:
        """`EnsembleLaw` over initialisations: mean, variance of the members' mean, and spread of members at the points.

        Arguments as in `members`.
        """
        when = as_times(times, self._targets)
        mean = torch.tensordot(self._mean.response_matrix(when, learning_rate, descent), self._targets, 1)
        count = self.members_count
        # K' = K_o + (K_d − K_o)/M
        centre = [k.gp_cross + (k.gp_same - k.gp_cross) / count for k in self._kernels]
        apart = [k.gp_same - k.gp_cross for k in self._kernels]
        variance = _trained_variance(self._mean.response_matrix(when, learning_rate, descent), *centre)
        response = self._difference.response_matrix(when, learning_rate, descent)
        return EnsembleLaw(mean, variance, (1 - 1 / count) * _trained_variance(response, *apart))


def ensemble_dynamics(
    x: Tensor, y: Tensor, points: Tensor | None = None, *, kernels: KernelFunction, members: int, gamma: float
) -> EnsembleDynamics:
    """Predicts how a wide embedded ensemble trains on x, y by gradient descent on the squared error.

    Args:
        x, y: training inputs (B, D) and targets (B, …).
        points: inputs (n, D) at which outputs are predicted; None means x.
        kernels: a function (x1, x2) -> `EmbeddedKernels`, such as functools.partial(embedded_kernels, depth=2, …).
        members: number of members, M.
        gamma: M trains shared weights with the sum of the members' gradients (independent), 1 with their mean (collective).
    """
    integer("members", members, hint="4 is a usual number")
    number("gamma", gamma, above=0, hint="pass M for the independent regime, 1 for the collective one")
    if len(y) != len(x) or y.ndim < 1:
        raise ValueError(f"expected targets for {len(x)} inputs, got {tuple(y.shape)}; pass one row each")
    train = kernels(x, None)
    towards, own = (train, train) if points is None else (kernels(points, x), kernels(points, None))
    return EnsembleDynamics((train, towards, own), y, members=members, gamma=gamma)


def _trained_variance(answers: Tensor, train: Tensor, towards: Tensor, points: Tensor) -> Tensor:
    """(T, n) diagonal of K − A K(X, ·) − (A K(X, ·))ᵀ + A K(X, X) Aᵀ."""
    crossed = torch.einsum("tnb,nb->tn", answers, towards)
    return points.diagonal() - 2 * crossed + torch.einsum("tnb,bc,tnc->tn", answers, train, answers)
