"""Likelihoods of real targets: Gaussian, with a noise that is fixed, learned, or an output of the network."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core.likelihood import Likelihood, full_precision
from dissensus.core.predictive import Predictive, RegressionPredictive
from dissensus.numerics.checks import number, one_of


class Regression(Likelihood):
    """Outputs are the mean, (B, D) or (B,); y ~ N(mean, noise²) with a noise that is fixed or learned.

    Args:
        noise: a standard deviation in the units of y, or "learned": one noise per member, trained with it.
        initial: where a learned noise starts. None: at 1, or at the network's error on the first training batch if that
            is above 3, as for targets that are not standardised.
    """

    def __init__(self, noise: float | Literal["learned"] = "learned", *, initial: float | None = None) -> None:
        super().__init__()
        if isinstance(noise, str):
            one_of("noise", noise, ("learned",), hint="or pass the standard deviation of y")
        else:
            number("noise", noise, above=0, hint='pass the standard deviation of y, or "learned"')
        if initial is not None:
            number("initial", initial, above=0, hint="pass a standard deviation")
        self.noise = noise
        self.initial = initial
        if noise == "learned":
            self.log_noise = nn.Parameter(torch.tensor(float(initial or 1.0)).log())

    def extra_repr(self) -> str:
        return f"noise={self.noise!r}"

    def _variance(self, outputs: Tensor) -> Tensor:
        if self.noise == "learned":
            return torch.exp(2 * full_precision(self.log_noise)).to(outputs.dtype).expand_as(outputs)
        return torch.full_like(outputs, float(self.noise) ** 2)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _per_example(gaussian_log_prob(y, outputs, self._variance(outputs)))  # (B,)

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._variance(outputs).reciprocal(), None

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        outputs = full_precision(outputs)
        return outputs, self._variance(outputs)

    def predictive(self, *described: Tensor) -> Predictive:
        return RegressionPredictive(*described)

    def config(self) -> dict[str, Any]:
        return {"noise": self.noise, **({"initial": self.initial} if self.noise == "learned" else {})}

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        _check_real_targets(output_shape, y)


class HeteroscedasticRegression(Likelihood):
    """Outputs (B, 2D): D means, then D raw variances v with variance softplus(v) + 1e-6 (Lakshminarayanan et al. 2017).

    Targets y are (B, D): give the network twice as many outputs as y has columns.
    """

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = outputs.chunk(2, dim=1)  # (B, D) each
        return mean, F.softplus(raw) + 1e-6

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _per_example(gaussian_log_prob(y, *self._moments(outputs)))  # (B,)

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The Fisher information, the Hessian's mean over y ~ p: the Hessian depends on y and need not be positive."""
        variance, slope = self._moments(outputs)[1], outputs.chunk(2, dim=1)[1].sigmoid()  # of softplus
        return torch.cat([variance.reciprocal(), 0.5 * (slope / variance).square()], dim=1), None

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return self._moments(full_precision(outputs))

    def predictive(self, *described: Tensor) -> Predictive:
        return RegressionPredictive(*described)

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        if len(output_shape) < 2 or output_shape[1] % 2:
            raise ValueError(
                f"expected outputs of shape (B, 2D), means then raw variances, got {tuple(output_shape)}; "
                "double the network's last layer, or use Regression(...)"
            )
        _check_real_targets(torch.Size((output_shape[0], output_shape[1] // 2, *output_shape[2:])), y)


def gaussian_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), elementwise."""
    return -0.5 * ((y - mean) ** 2 / variance + variance.log() + 1.8378770664093453)  # log 2π


def _per_example(log_prob: Tensor) -> Tensor:
    """(B,) sums over everything but the batch axis; (B,) stays as it is."""
    return log_prob.flatten(1).sum(1) if log_prob.ndim > 1 else log_prob


def _check_real_targets(shape: torch.Size, y: Tensor) -> None:
    if not y.is_floating_point():
        raise ValueError(f"expected real targets, got {y.dtype}; convert them with y.float()")
    if y.shape != shape:
        raise ValueError(
            f"expected targets of shape {tuple(shape)}, got {tuple(y.shape)}; "
            "reshape one of them (a (B, 1) mean and a (B,) target would broadcast to (B, B))"
        )
    if y.device.type == "cpu" and not y.isfinite().all():
        raise ValueError("expected finite targets, got NaN or infinity; clean the data")
