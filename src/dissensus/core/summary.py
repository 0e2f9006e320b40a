"""Summaries: predictives without their members, whose memory does not grow with M."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dissensus.core.predictive import (
    CategoricalPredictive,
    ClassificationPredictive,
    Predictive,
    RegressionPredictive,
)
from dissensus.numerics.entropy import entropy_terms


class SummaryPredictive(Predictive):
    """A prediction without its members: mean, aleatoric and epistemic; made by `summarise` and calibrations of the mean.

    It offers everything that a `Predictive` does, except what needs single members: `members` raises, and for classes
    also `interval` and `tempered`. A regression is treated as the Gaussian with the mixture's mean and variance.

    Args:
        centre: (1, B, ...), log of the mean probabilities, or the mean.
        aleatoric, epistemic: (1, B, ...).
    """

    def __init__(self, centre: Tensor, aleatoric: Tensor, epistemic: Tensor) -> None:
        self._described: tuple[Tensor, ...] = (centre, aleatoric, epistemic)

    @property
    def members(self) -> Tensor:
        raise TypeError(
            "expected a predictive with its members, got a summary; use ds.predict instead of ds.summarise, and a "
            "calibration of the members (temperature, vector) instead of one of their mean (isotonic, histogram)"
        )

    @property
    def aleatoric(self) -> Tensor:
        return self._described[1][0]

    @property
    def epistemic(self) -> Tensor:
        return self._described[2][0]

    def described(self) -> tuple[Tensor, ...]:
        return self._described

    def __repr__(self) -> str:
        return f"{type(self).__name__}(inputs={len(self)}, outputs={tuple(self._described[0].shape[2:])})"


class ClassificationSummary(SummaryPredictive, CategoricalPredictive):
    """log p̄ (1, B, C, ...), aleatoric and epistemic (1, B, ...) in nats."""

    def __init__(self, centre: Tensor, aleatoric: Tensor, epistemic: Tensor) -> None:
        super().__init__(centre, aleatoric, epistemic)
        self.log_mean = centre[0]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return ClassificationPredictive(self.members).interval(level)

    def tempered(self, temperature: float) -> Predictive:
        return ClassificationPredictive(self.members).tempered(temperature)


class RegressionSummary(SummaryPredictive):
    """Mean, aleatoric and epistemic variance (1, B, D): the Gaussian with the mixture's mean and variance."""

    @property
    def mean(self) -> Tensor:
        return self._described[0][0]

    def _gaussian(self) -> RegressionPredictive:
        return RegressionPredictive(self.mean[None], self.total[None])

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,) log-density of the Gaussian with the mixture's mean and variance, not of the mixture."""
        return self._gaussian().log_prob(y)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return self._gaussian().interval(level)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self._gaussian().sample(n, generator=generator)

    def tempered(self, temperature: float) -> RegressionSummary:
        mean, aleatoric, epistemic = self._described
        return RegressionSummary(mean, aleatoric * temperature**2, epistemic)


class RunningSummary:
    """A summary updated with one member after the other, in the memory of a few members."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: tuple[Tensor, ...] = ()
        self._classification = False

    def add(self, predictive: Predictive) -> None:
        """Adds the members of one more predictive for the same inputs."""
        if isinstance(predictive, ClassificationPredictive):
            self._add_classes(predictive)
        elif isinstance(predictive, RegressionPredictive):
            self._add_gaussians(predictive)
        else:
            raise TypeError(
                f"expected a classification or regression to summarise, got {type(predictive).__name__}; use ds.predict"
            )

    def _add_classes(self, predictive: ClassificationPredictive) -> None:
        new = len(predictive.members)
        log_sum = predictive.log_mean + math.log(new)  # (B, C, ...)
        entropies = predictive.aleatoric * new  # (B, ...)
        if self.count:
            log_sum, entropies = torch.logaddexp(self._sums[0], log_sum), self._sums[1] + entropies
        self.count, self._sums, self._classification = self.count + new, (log_sum, entropies), True

    def _add_gaussians(self, predictive: RegressionPredictive) -> None:
        new = len(predictive.members)
        mean, scatter, noise = predictive.mean, predictive.epistemic * new, predictive.aleatoric * new
        if self.count:
            # Chan, Golub & LeVeque 1979: merges means and scatters of two groups without cancellation.
            total, shift = self.count + new, mean - self._sums[0]
            mean = self._sums[0] + shift * (new / total)
            scatter = self._sums[1] + scatter + shift**2 * (self.count * new / total)
            noise = self._sums[2] + noise
        self.count, self._sums = self.count + new, (mean, scatter, noise)

    def summary(self) -> SummaryPredictive:
        """The summary of all members so far."""
        if self._classification:
            log_mean = self._sums[0] - math.log(self.count)
            aleatoric = self._sums[1] / self.count
            entropy = entropy_terms(log_mean.exp()).sum(1)
            return ClassificationSummary(log_mean[None], aleatoric[None], (entropy - aleatoric).clamp(min=0)[None])
        mean, scatter, noise = self._sums
        return RegressionSummary(mean[None], (noise / self.count)[None], (scatter / self.count)[None])
