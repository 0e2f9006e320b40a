"""Gaussian likelihoods of real targets, whose noise is fixed, learned, or an output of the network."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core.batch import Batch
from dissensus.core.likelihood import Likelihood, expand_weight, full_precision
from dissensus.core.particles import Particles
from dissensus.core.predictive import Predictive, RegressionPredictive
from dissensus.utils.checks import number, one_of


class RealTargets(Likelihood):
    """Base class of likelihoods of real targets, which may be standardised for the network.

    With targets (mean, std) the network's outputs are z = (y − mean) / std, but targets, predictions and densities are
    always in the units of y: users never see z.
    """

    def __init__(self, targets: Any = None, unit: str | None = None) -> None:
        super().__init__()
        self.targets: dict[str, list[float]] | None = None  # JSON, saved with the likelihood's arguments
        self.unit = unit  # unit of y, for reports
        self._scales: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        if targets is not None:
            self.set_target_scale(targets)

    def set_target_scale(self, targets: Any) -> None:
        """Makes outputs mean z from now on. `targets`: {"mean": D numbers, "std": D numbers above 0}, or a `Standardiser`."""
        given = targets if isinstance(targets, Mapping) else {"mean": targets.mean, "std": targets.std}
        # Ten digits, so that a mean over shuffled batches does not depend on their order.
        exact = {key: torch.as_tensor(given[key], dtype=torch.float64).flatten().tolist() for key in given}
        rounded = {key: [float(f"{value:.10g}") for value in values] for key, values in exact.items()}
        for each in rounded["std"]:
            number("every std of the targets", each, above=0, hint="a constant target has std 1")
        if self.targets not in (None, rounded):
            raise ValueError("expected targets that are standardised once, got a second scale; build a new likelihood")
        self.targets = {"mean": rounded["mean"], "std": rounded["std"]}
        self._scales = {}

    def target_scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, std) of y, each (D,)."""
        key = (like.device, like.dtype)
        if key not in self._scales:  # made before a CUDA graph is captured, or a graph traced
            given = self.targets or {"mean": [0.0], "std": [1.0]}
            mean, std = (torch.tensor(given[name], device=like.device, dtype=like.dtype) for name in ("mean", "std"))
            self._scales[key] = mean, std
        return self._scales[key]

    def to_output_units(self, y: Tensor) -> Tensor:
        """z, in the units of the network's outputs."""
        if self.targets is None:
            return y
        mean, std = self.target_scale(y)
        return (y - mean) / std

    def target_log_density(self, y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """(B,) log-density of y, given mean and variance of z."""
        each = gaussian_log_prob(self.to_output_units(y), mean, variance)
        if self.targets is not None:
            each = each - self.target_scale(y)[1].log()
        return each.flatten(1).sum(1) if each.ndim > 1 else each

    def to_target_units(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of z, converted to the units of y."""
        if self.targets is None:
            return mean, variance
        shift, std = self.target_scale(mean)
        return mean * std + shift, variance * std**2

    def predictive(self, *described: Tensor) -> Predictive:
        return RegressionPredictive(*described)

    def config(self) -> dict[str, Any]:
        return {"targets": self.targets, "unit": self.unit}

    def check_targets(self, shape: torch.Size, y: Tensor) -> None:
        """Raises if y does not fit means of this shape, or the scale of the targets does not."""
        if self.targets is not None and len(self.targets["mean"]) not in (1, shape[-1] if len(shape) > 1 else 1):
            found = len(self.targets["mean"])
            raise ValueError(f"expected one scale of the targets or {shape[-1]}, got {found}; pass one per output")
        _check_real_targets(shape, y)


class Regression(RealTargets):
    """The likelihood y ~ N(mean, noise²) of real targets; the network outputs the mean, the noise is fixed or learned.

    Outputs and targets are (B, D) or (B,).

    Args:
        noise: a standard deviation in the units of y, or "learned": one number per member, trained with the network.
        initial: initial value of a learned noise. None: 1, or the network's error on the first training batch if that is
            above 5, as for targets that are not standardised.
        targets: {"mean": …, "std": …} or a `Standardiser`: the network's outputs are then (y − mean) / std, and a learned
            noise starts at 1 in those units; users always see the units of y. Set by `fit(targets="standardised")`.
        unit: unit of y, for reports.
    """

    def __init__(
        self,
        noise: float | Literal["learned"] = "learned",
        *,
        initial: float | None = None,
        targets: Any = None,
        unit: str | None = None,
    ) -> None:
        super().__init__(targets, unit)
        if isinstance(noise, str):
            one_of("noise", noise, ("learned",), hint="or pass the standard deviation of y")
        else:
            number("noise", noise, above=0, hint='pass the standard deviation of y, or "learned"')
        if initial is not None:
            number("initial", initial, above=0, hint="pass a standard deviation")
        self.noise, self.initial = noise, initial
        if noise == "learned":
            self.log_noise = nn.Parameter(torch.tensor(float(initial or 1.0)).log())

    def extra_repr(self) -> str:
        return f"noise={self.noise!r}"

    def _variance(self, outputs: Tensor) -> Tensor:
        if self.noise == "learned":
            return torch.exp(2 * full_precision(self.log_noise)).to(outputs.dtype).expand_as(outputs)
        fixed = torch.full_like(outputs, float(self.noise) ** 2)
        return fixed if self.targets is None else fixed / self.target_scale(outputs)[1] ** 2

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.target_log_density(y, outputs, self._variance(outputs))  # (B,)

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._variance(outputs).reciprocal(), None

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        outputs = full_precision(outputs)
        return self.to_target_units(outputs, self._variance(outputs))

    def config(self) -> dict[str, Any]:
        return {"noise": self.noise, "initial": self.initial, **super().config()}

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        self.check_targets(output_shape, y)


class HeteroscedasticRegression(RealTargets):
    """The likelihood of real targets with noise that depends on the input (Lakshminarayanan et al. 2017).

    Outputs (B, 2D) are D means, then D raw variances v with variance softplus(v) + 1e-6. Targets y are (B, D): give the
    network twice as many outputs as y has columns.

    Args:
        targets, unit: as in `Regression`.
    """

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = outputs.chunk(2, dim=1)  # (B, D) each
        return mean, F.softplus(raw) + 1e-6

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.target_log_density(y, *self._moments(outputs))  # (B,)

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The Fisher information, the Hessian's mean over y ~ p, since the Hessian itself may be indefinite."""
        variance, slope = self._moments(outputs)[1], outputs.chunk(2, dim=1)[1].sigmoid()  # slope of softplus
        return torch.cat([variance.reciprocal(), 0.5 * (slope / variance).square()], dim=1), None

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return self.to_target_units(*self._moments(full_precision(outputs)))

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        if len(output_shape) < 2 or output_shape[1] % 2:
            got = tuple(output_shape)
            raise ValueError(f"expected outputs of shape (B, 2D), got {got}; double the network's last layer")
        self.check_targets(torch.Size((output_shape[0], output_shape[1] // 2, *output_shape[2:])), y)


def gaussian_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), elementwise."""
    return -0.5 * ((y - mean) ** 2 / variance + variance.log() + 1.8378770664093453)  # log 2π


def _check_real_targets(shape: torch.Size, y: Tensor) -> None:
    if not y.is_floating_point():
        raise ValueError(f"expected real targets, got {y.dtype}; convert them with y.float()")
    if y.shape != shape:
        raise ValueError(f"expected targets of shape {tuple(shape)}, got {tuple(y.shape)}; reshape one of them")
    if y.device.type == "cpu" and y.numel() and not all(math.isfinite(end.item()) for end in y.aminmax()):
        raise ValueError("expected finite targets, got NaN or infinity; clean the data")


FAR = 5.0  # errors above this start the noise elsewhere than at 1: errors of standardised targets are smaller


def untrained_noise(particles: Particles) -> Tensor | None:
    """Logarithm of a learned noise, () or (M,), if it still has its initial value; else None."""
    noise = {**particles.shared_parameters(), **particles.own_parameters()}.get("likelihood.log_noise")
    if noise is None or not noise.requires_grad or not isinstance(particles.likelihood, Regression):
        return None
    start = math.log(particles.likelihood.initial or 1.0)
    return noise if bool(((noise.detach() - start).abs() < 1e-6).all()) else None


def start_noise(particles: Particles, outputs: Callable[[], Tensor], batch: Batch) -> str | None:
    """Starts the noise at the error of the outputs if that is far above 1, where a start at 1 would take long to correct."""
    noise, likelihood = untrained_noise(particles), particles.likelihood
    heads = isinstance(likelihood, HeteroscedasticRegression)  # its variances are network outputs and cannot be set
    if not heads and (noise is None or likelihood.initial is not None):
        return None
    mean, variance = likelihood.describe(outputs()) if heads else (outputs(), 1.0)
    y = batch.y if heads else likelihood.to_output_units(batch.y)  # in the units of the outputs
    squares = (y - mean).double().square() / variance
    w = torch.ones_like(squares) if batch.weight is None else expand_weight(batch.weight, squares)
    error = float(((w * squares).sum() / w.sum()).sqrt())
    if not FAR < error < math.inf:
        return None
    if noise is not None:
        noise.data.fill_(math.log(error))
    what = "intervals start too narrow" if heads else "the learned noise starts there instead of at 1"
    return (
        f"outputs differ from targets by {error:.3g}{' standard deviations' if heads else ''} in the first batch: {what}; "
        'standardise the targets, fit(..., targets="standardised"), or training will take long'
    )


def noise_warning(particles: Particles) -> str | None:
    """A warning if the noise was never trained, else None."""
    return None if (noise := untrained_noise(particles)) is None else (
        f"the learned noise was never trained and is still {float(noise.detach().flatten()[0].exp()):g}; train it, pass "
        "Regression(noise=...), or pass the likelihood of the posterior in which the network was trained"
    )  # fmt: skip
