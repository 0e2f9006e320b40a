"""The calibrations that a posterior can have: of class probabilities, and of a regression's distribution."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from dissensus.core.calibrated import Calibration
from dissensus.core.predictive import (
    ClassificationPredictive,
    ClassificationSummary,
    Predictive,
    RegressionPredictive,
    RegressionSummary,
    SummaryPredictive,
    entropy_terms,
    match_targets,
    tail_probability,
)
from dissensus.metrics.classification import confidence_bin
from dissensus.numerics.isotonic import between_knots


class VectorScaling(Calibration):
    """Multiplies every member's logits by a scale and adds a bias, both per class (Guo et al., ICML 2017, section 4.2).

    Logits are normalised to log-probabilities first; otherwise a constant added to all logits of an input, which changes no
    prediction, would change the result. Scales are above 0, so a larger logit always makes its class likelier.
    """

    kind = "vector"
    scale: Tensor  # (C,)
    bias: Tensor  # (C,)

    def calibrate_members(self, predictive: Predictive) -> Predictive:
        return ClassificationPredictive(self.calibrate_logits(predictive.log_probs).log_softmax(2))

    def calibrate_logits(self, logits: Tensor) -> Tensor:
        shape = (-1, *[1] * (logits.ndim - 3))
        scale, bias = (each.to(logits.dtype).reshape(shape) for each in (self.scale, self.bias))
        return scale * logits + bias


class MeanCalibration(Calibration, ABC):
    """Base class: applies a function per class to the mean probabilities, then normalises them.

    No probability is 0: with N calibration rows, p = (N · normalised + 1/C) / (N + 1), as if one more row had been seen, split
    equally over the classes. If all functions give 0, p is uniform.

    The members' disagreement is not calibrated: `epistemic` is their mutual information, but at most the calibrated entropy;
    `aleatoric` is the rest of that entropy.
    """

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(facts, tensors)
        self.rows = float(facts["weight"])  # N

    def calibrate_mixture(self, predictive: Predictive) -> Predictive:
        mean = predictive.mean  # (B, C, ...)
        found = self.one_against_rest(mean.movedim(1, 0).flatten(1))  # (C, n)
        by_class = found.reshape(mean.shape[1], mean.shape[0], *mean.shape[2:]).movedim(0, 1)
        total, rows, uniform = by_class.sum(1, keepdim=True), self.rows, 1 / mean.shape[1]
        normalised = torch.where(total > 0, by_class / total, uniform)
        seen = (rows * normalised + uniform) / (rows + 1)
        entropy = entropy_terms(seen).sum(1)
        epistemic = torch.minimum(predictive.epistemic, entropy)
        return ClassificationSummary(seen.log()[None], (entropy - epistemic)[None], epistemic[None])

    @abstractmethod
    def one_against_rest(self, mean: Tensor) -> Tensor:
        """(C, n) probabilities of each class against the rest, before they are normalised."""


class IsotonicCalibration(MeanCalibration):
    """Isotonic regression of each class's labels on its mean probability (Zadrozny & Elkan, KDD 2002)."""

    kind = "isotonic"
    at: Tensor  # (C, K) knots, increasing
    value: Tensor  # (C, K)

    def one_against_rest(self, mean: Tensor) -> Tensor:
        return between_knots(mean, self.at.to(mean.dtype), self.value.to(mean.dtype))


class HistogramCalibration(MeanCalibration):
    """The share of each class's labels in bins of its mean probability (Zadrozny & Elkan, ICML 2001).

    Bins have equal width and are closed at the right, like those of the calibration error; a bin without rows does not change
    probabilities. Within a bin all probabilities become equal, so the NLL may increase, even on the calibration rows.
    """

    kind = "histogram"
    value: Tensor  # (C, bins), NaN without rows

    def one_against_rest(self, mean: Tensor) -> Tensor:
        found = self.value.to(mean.dtype).gather(1, confidence_bin(mean, self.value.shape[1]))
        return torch.where(found.isnan(), mean, found)


POINTS, AT_ONCE = 256, 32  # points of the integration grid for moments, and how many are evaluated at once
TAIL = 1e-6  # probability on each side of the grid


class RecalibratedRegression(SummaryPredictive):
    """The distribution with P(Y ≤ y) = R(F(y)) for each output, F a mixture of Gaussians (Kuleshov et al., ICML 2018).

    R = Φ ∘ g ∘ Φ⁻¹, with Φ the normal distribution and g increasing and piecewise linear, also beyond its knots. So a
    standard deviation that is wrong by a factor gives a straight g, tails stay Gaussian, and the density exists everywhere:
    φ(g(z)) g'(z) / φ(z) · f(y) with z = Φ⁻¹(F(y)). Outputs are treated as independent. `epistemic` is the variance of the
    members' means, but at most the recalibrated variance; `aleatoric` is the rest of that variance.

    Args:
        means, variances: (M, B, D) or (M, B), of the mixture.
        at, value: (K, B, D) or (K, B), the knots of g for each output, both strictly increasing.
    """

    kind = "regression"

    def __init__(self, means: Tensor, variances: Tensor, at: Tensor, value: Tensor) -> None:
        self._described = (means, variances, at, value)
        self._mixture, self._at, self._value = (means, variances), at, value

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
        return torch.minimum(self._mixture[0].var(0, correction=0), self.total)

    def cdf(self, y: Tensor) -> Tensor:
        """(B, D) P(Y ≤ y), for each output separately."""
        below: Tensor = torch.special.ndtr(self.scores(match_targets(y, self._at.shape[1:])[None]))
        return below[0]

    def quantile(self, q: float) -> Tensor:
        """(B, D) y with P(Y ≤ y) = q, for each output, by bisection to machine precision; q strictly between 0 and 1."""
        return self._quantiles(torch.full_like(self._at[:1], q))[0]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(lower, upper) of the mean's shape: the central interval, for each output separately."""
        tail = tail_probability(level)
        return self.quantile(tail), self.quantile(1 - tail)

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,) log-density; outputs are independent."""
        means, variances = self._mixture
        y = match_targets(y, means.shape[1:])
        each = -0.5 * ((y - means) ** 2 / variances + variances.log() + math.log(2 * math.pi))
        density = each.logsumexp(0) - math.log(len(means))  # (B, D)
        z = normal_scores(means, variances, y[None])
        low = knot_index(z, self._at)
        rise, run = (each.gather(0, low + 1) - each.gather(0, low) for each in (self._value, self._at))
        found = density + (0.5 * (z**2 - interpolate_knots(z, self._at, self._value) ** 2) + (rise / run).log())[0]
        return found.flatten(1).sum(1) if found.ndim > 1 else found

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, D) draws."""
        like = self._mixture[0]
        uniform = torch.rand(n, *like.shape[1:], generator=generator, dtype=like.dtype, device=like.device)
        return self._quantiles(uniform.clamp(TAIL, 1 - TAIL))

    def apply_temperature(self, temperature: float) -> RecalibratedRegression:
        means, variances, at, value = self._described
        return RecalibratedRegression(means, variances * temperature**2, at, value)

    def scores(self, y: Tensor) -> Tensor:
        """(n, B, D) g(Φ⁻¹(F(y))) at y (n, B, D)."""
        return interpolate_knots(normal_scores(*self._mixture, y), self._at, self._value)

    def _quantiles(self, q: Tensor) -> Tensor:
        """(n, B, D) y with P(Y ≤ y) = q (n, B, D)."""
        return values_at_scores(*self._mixture, interpolate_knots(torch.special.ndtri(q), self._value, self._at))

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """(B, D) mean and variance: E Y = b − ∫ G, E (Y − b)² = 2 ∫ (b − y) G over [a, b], by Simpson's rule."""
        tails = torch.stack([torch.full_like(self._at[0], each) for each in (TAIL, 1 - TAIL)])
        scores = interpolate_knots(torch.special.ndtri(tails), self._value, self._at)
        lower, upper = score_bracket(*self._mixture, scores)
        a, b = lower[0], upper[1]
        mean, square = torch.zeros_like(a), torch.zeros_like(a)
        for start in range(0, POINTS + 1, AT_ONCE):
            steps = torch.arange(start, min(start + AT_ONCE, POINTS + 1), dtype=a.dtype, device=a.device)
            steps = steps.reshape(-1, *[1] * a.ndim)
            inner = torch.where(steps % 2 == 1, 4.0, 2.0)
            weight = torch.where((steps == 0) | (steps == POINTS), 1.0, inner) / (3 * POINTS)
            y = torch.lerp(a, b, steps / POINTS)  # (n, B, D)
            below = weight * torch.special.ndtr(self.scores(y))
            mean, square = mean + below.sum(0), square + 2 * (below * (1 - steps / POINTS)).sum(0)
        width = b - a
        return b - width * mean, width**2 * (square - mean**2).clamp(min=torch.finfo(a.dtype).eps)


def normal_scores(means: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """(n, B, D) Φ⁻¹(F(y)) at y (n, B, D) for a mixture (M, B, D), by the nearer tail's logarithm, accurate for any y."""
    below, above = log_tails(means, variances, y)
    score = _log_ndtri(torch.minimum(below, above))
    return torch.where(below < above, score, -score)


def log_tails(means: Tensor, variances: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """log F(y) and log (1 − F(y)), each (n, B, D)."""
    z = (y[:, None] - means) / variances.sqrt()
    below, above = (torch.special.log_ndtr(each).logsumexp(1) - math.log(len(means)) for each in (z, -z))
    return below, above


def _log_ndtri(tail: Tensor) -> Tensor:
    """z with log Φ(z) = tail ≤ log ½. Works on logarithms, since the probability of a far tail underflows to 0."""
    far = 2 * tail.clamp(-1e30, -10)
    near = torch.special.ndtri(tail.clamp(min=-10).exp())
    z = torch.where(tail > -10, near, -(-far - (-far * 2 * math.pi).log()).sqrt())
    for _ in range(3):  # Newton; (log Φ)' is (√(z² + 4) − z) / 2 up to O(z⁻³) (Birnbaum 1942)
        z = z - 2 * (torch.special.log_ndtr(z) - tail.clamp(min=-1e30)) / ((z**2 + 4).sqrt() - z)
    return z


def values_at_scores(means: Tensor, variances: Tensor, z: Tensor) -> Tensor:
    """(n, B, D) y with Φ⁻¹(F(y)) = z (n, B, D), by bisection to machine precision."""
    lower, upper = score_bracket(means, variances, z)
    middle: Tensor = 0.5 * (lower + upper)
    tail = torch.special.log_ndtr(-z.abs())
    for _ in range(80 if z.dtype == torch.float64 else 40):
        log_below, log_above = log_tails(means, variances, middle)
        below = torch.where(z < 0, log_below < tail, log_above > tail)
        lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
        middle = 0.5 * (lower + upper)
    return middle


def score_bracket(means: Tensor, variances: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """(n, B, D) smallest and largest y with this score under a member; the mixture's y lies between them."""
    each = means + variances.sqrt() * z[:, None]  # (n, M, B, D)
    return each.amin(1), each.amax(1)


def knot_index(x: Tensor, at: Tensor) -> Tensor:
    """(n, B, D) index of the knot below each x, clamped to the first and the last but one."""
    return (x[:, None] >= at[None, 1:-1]).sum(1)


def interpolate_knots(x: Tensor, at: Tensor, value: Tensor) -> Tensor:
    """(n, B, D) value at x (n, B, D) of the piecewise linear function with knots (at, value), each (K, B, D)."""
    low = knot_index(x, at)
    x0, x1, y0, y1 = (each.gather(0, i) for each in (at, value) for i in (low, low + 1))
    return torch.lerp(y0, y1, (x - x0) / (x1 - x0))


class DeviationScaling(Calibration):
    """Stretches the mixture about its mean by a factor: members' distances, and their noise (a temperature: only noise)."""

    kind = "scale"
    factor: Tensor  # ()

    def calibrate_mixture(self, predictive: Predictive) -> Predictive:
        if isinstance(predictive, RegressionSummary):
            mean, aleatoric, epistemic = predictive.defining_tensors()
            return RegressionSummary(mean, aleatoric * self.factor**2, epistemic * self.factor**2)
        means, variances = predictive.defining_tensors()
        moved = predictive.mean + self.factor * (means - predictive.mean)
        return RegressionPredictive(moved, variances * self.factor**2)


class CumulativeCalibration(Calibration):
    """Replaces the mixture's P(Y ≤ y) = F(y) by R(F(y)), with one R per output (Kuleshov et al., ICML 2018)."""

    kind = "cumulative"
    at: Tensor  # (K, *outputs) knots of g, strictly increasing: scores Φ⁻¹(F(y))
    value: Tensor  # (K, *outputs) values of g, strictly increasing

    def calibrate_mixture(self, predictive: Predictive) -> Predictive:
        if isinstance(predictive, RegressionSummary):  # treated as the Gaussian with its mean and variance
            predictive = RegressionPredictive(predictive.mean[None], predictive.total[None])
        means, variances = cast(RegressionPredictive, predictive).defining_tensors()
        knots = (each.to(means.dtype)[:, None].expand(-1, *means.shape[1:]) for each in (self.at, self.value))
        return RecalibratedRegression(means, variances, *knots)
