"""A regression whose cumulative distribution was recalibrated: R(F(y)) instead of F(y)."""

import math
from functools import cached_property

import torch
from torch import Tensor

from dissensus.core.predictive import RegressionPredictive, tail_probability
from dissensus.core.summary import SummaryPredictive


class RecalibratedRegression(SummaryPredictive):
    """The distribution with P(Y ≤ y) = R(F(y)), F of a mixture of Gaussians, output by output (Kuleshov et al., ICML 2018).

    R is linear between knots and rises strictly from (0, 0) to (1, 1), so there is a density, R'(F(y)) f(y), and moments are
    exact. Outputs count as independent of each other. `epistemic` is the variance of the members' means as it was, at most
    the recalibrated variance; `aleatoric` is the rest of that.

    Args:
        means, variances: (M, B, D) or (M, B), of the mixture.
        at, value: (K, B, D) or (K, B), the knots of R for each output, the first at (0, 0) and the last at (1, 1).
    """

    def __init__(self, means: Tensor, variances: Tensor, at: Tensor, value: Tensor) -> None:
        self._described = (means, variances, at, value)
        self._mixture = RegressionPredictive(means, variances)
        self._at, self._value = at, value

    @property
    def mean(self) -> Tensor:
        return self._moments[0]

    @property
    def total(self) -> Tensor:
        return self._moments[1]

    @property
    def aleatoric(self) -> Tensor:
        return self.total - self.epistemic

    @property
    def epistemic(self) -> Tensor:
        return torch.minimum(self._mixture.epistemic, self.total)

    def cdf(self, y: Tensor) -> Tensor:
        """(B, D) P(Y ≤ y), output by output."""
        return along(self._mixture.cdf(y)[None], self._at, self._value)[0]

    def quantile(self, q: float) -> Tensor:
        """(B, D) y with P(Y ≤ y) = q, output by output; q strictly between 0 and 1."""
        return self._quantiles(torch.full_like(self._at[:1], q))[0]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(lower, upper) of the mean's shape: the central interval, output by output."""
        tail = tail_probability(level)
        return self.quantile(tail), self.quantile(1 - tail)

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,) log-density, outputs independent: Σ_d log f_d(y) + log R_d'(F_d(y))."""
        means, variances = self._described[:2]
        each = -0.5 * ((y - means) ** 2 / variances + variances.log() + math.log(2 * math.pi))
        density = each.logsumexp(0) - math.log(len(means))  # (B, D)
        low = piece(self._mixture.cdf(y)[None], self._at)
        rise, run = (each.gather(0, low + 1) - each.gather(0, low) for each in (self._value, self._at))
        found = density + (rise / run)[0].log()
        return found.flatten(1).sum(1) if found.ndim > 1 else found

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, D) draws."""
        like = self._described[0]
        return self._quantiles(
            torch.rand(n, *like.shape[1:], generator=generator, dtype=like.dtype, device=like.device)
        )

    def tempered(self, temperature: float) -> "RecalibratedRegression":
        means, variances, at, value = self._described
        return RecalibratedRegression(means, variances * temperature**2, at, value)

    def _quantiles(self, q: Tensor) -> Tensor:
        """(n, B, D) y with P(Y ≤ y) = q (n, B, D)."""
        return mixture_quantiles(*self._described[:2], along(q, self._value, self._at))

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """(B, D) mean and variance: each piece of R weighs a part of the mixture, whose moments are in closed form."""
        means, variances = self._described[:2]
        centre = means.mean(0)
        # ∫_{−∞}^a t f(t) dt and ∫_{−∞}^a t² f(t) dt of a Gaussian: μΦ − σφ and (μ² + σ²)Φ − σ(μ + a)φ; t from the centre on.
        shifted, std = means - centre, variances.sqrt()
        ends = mixture_quantiles(means, variances, self._at[1:-1])[:, None] - centre  # (K − 2, 1, B, D)
        z = (ends - shifted) / std
        below: Tensor = torch.special.ndtr(z)
        peak = (-0.5 * z**2).exp() / math.sqrt(2 * math.pi)
        first = (shifted * below - std * peak).mean(1)
        second = ((shifted**2 + variances) * below - std * (shifted + ends) * peak).mean(1)
        whole = shifted.mean(0), (shifted**2 + variances).mean(0)
        weight = self._value.diff(dim=0) / self._at.diff(dim=0)  # (K − 1, B, D)
        parts = []
        for inner, all_of_it in zip((first, second), whole, strict=True):
            through = torch.cat([torch.zeros_like(all_of_it)[None], inner, all_of_it[None]])  # (K, B, D)
            parts.append((weight * through.diff(dim=0)).sum(0))
        return centre + parts[0], (parts[1] - parts[0] ** 2).clamp(min=torch.finfo(means.dtype).tiny)


def piece(x: Tensor, at: Tensor) -> Tensor:
    """(n, B, D) the index of the knot below each x, the last but one at most."""
    return (x[:, None] >= at[None, 1:-1]).sum(1)


def along(x: Tensor, at: Tensor, value: Tensor) -> Tensor:
    """(n, B, D): the function with knots (at, value), each (K, B, D), at x (n, B, D)."""
    low = piece(x, at)
    x0, x1, y0, y1 = (each.gather(0, i) for each in (at, value) for i in (low, low + 1))
    return torch.lerp(y0, y1, (x - x0) / (x1 - x0))


def mixture_quantiles(means: Tensor, variances: Tensor, levels: Tensor) -> Tensor:
    """(n, B, D) y with F(y) = level (n, B, D), F of the mixture of Gaussians (M, B, D); by bisection to rounding."""
    limit = torch.finfo(levels.dtype).eps
    levels = levels.clamp(limit, 1 - limit)
    reach = -torch.special.ndtri(torch.minimum(levels, 1 - levels))[:, None]  # (n, 1, B, D) in standard deviations
    std = variances.sqrt()
    lower, upper = (means - std * reach).amin(1), (means + std * reach).amax(1)
    middle: Tensor = 0.5 * (lower + upper)
    for _ in range(80 if lower.dtype == torch.float64 else 40):
        below = torch.special.ndtr((middle[:, None] - means) / std).mean(1) < levels
        lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
        middle = 0.5 * (lower + upper)
    return middle
