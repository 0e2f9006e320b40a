"""Summaries: predictives without their members, whose memory does not grow with M."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.numerics.entropy import entropy_terms


class SummaryPredictive(Predictive):
    """A prediction without its members: mean, aleatoric and epistemic; made by `summarise` and calibrations of the mean.

    It offers everything that a `Predictive` does, except what needs single members: `member_means` and `log_probs`
    raise, and for classes also `interval` and `apply_temperature`. A regression is treated as the Gaussian with the
    mixture's mean and variance.

    Args:
        centre: (1, B, ...), log of the mean probabilities, or the mean.
        aleatoric, epistemic: (1, B, ...).
    """

    def __init__(self, centre: Tensor, aleatoric: Tensor, epistemic: Tensor) -> None:
        self._described: tuple[Tensor, ...] = (centre, aleatoric, epistemic)

    @property
    def member_means(self) -> Tensor:
        raise TypeError(
            "expected a predictive with its members, got a summary; use ds.predict instead of ds.summarise, and a "
            "calibration of the members (temperature, vector) instead of one of their mean (isotonic, histogram)"
        )

    @property
    def log_probs(self) -> Tensor:
        return self.member_means  # raises

    @property
    def aleatoric(self) -> Tensor:
        return self._described[1][0]

    @property
    def epistemic(self) -> Tensor:
        return self._described[2][0]

    def defining_tensors(self) -> tuple[Tensor, ...]:
        return self._described

    def __repr__(self) -> str:
        return f"{type(self).__name__}(inputs={len(self)}, outputs={tuple(self._described[0].shape[2:])})"


class ClassificationSummary(SummaryPredictive, CategoricalPredictive):
    """log p̄ (1, B, C, ...), aleatoric and epistemic (1, B, ...) in nats."""

    def __init__(self, centre: Tensor, aleatoric: Tensor, epistemic: Tensor) -> None:
        super().__init__(centre, aleatoric, epistemic)
        self.log_mean = centre[0]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return ClassificationPredictive(self.log_probs).interval(level)

    def apply_temperature(self, temperature: float) -> Predictive:
        return ClassificationPredictive(self.log_probs).apply_temperature(temperature)


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

    def apply_temperature(self, temperature: float) -> RegressionSummary:
        mean, aleatoric, epistemic = self._described
        return RegressionSummary(mean, aleatoric * temperature**2, epistemic)


class RunningSummary:
    """A summary updated with one member after the other, in the memory of a few members."""

    def __init__(self, predictives: Iterable[Predictive] = ()) -> None:
        self.count = 0
        self._sums: tuple[Tensor, ...] = ()
        self._classification = False
        for predictive in predictives:
            self.add(predictive)

    def add(self, predictive: Predictive) -> None:
        """Adds the members of one more predictive for the same inputs."""
        new = RunningSummary()
        if isinstance(predictive, ClassificationPredictive):
            new.count, new._classification = len(predictive.log_probs), True
            log_sum = predictive.log_mean + math.log(new.count)  # (B, C, ...)
            new._sums = log_sum, predictive.aleatoric * new.count  # (B, ...)
        elif isinstance(predictive, RegressionPredictive):
            new.count = len(predictive.member_means)
            new._sums = predictive.mean, predictive.epistemic * new.count, predictive.aleatoric * new.count
        else:
            kind = type(predictive).__name__
            raise TypeError(f"expected a classification or regression to summarise, got {kind}; use ds.predict")
        self.merge(new)

    def merge(self, other: RunningSummary) -> None:
        """Takes in what another one has taken in, for the same inputs."""
        if self.count and self._classification:
            self._sums = torch.logaddexp(self._sums[0], other._sums[0]), self._sums[1] + other._sums[1]
        elif self.count:
            # Chan, Golub & LeVeque 1979: means and scatters of two groups merged without cancellation.
            (mean, scatter, noise), total = other._sums, self.count + other.count
            shift = mean - self._sums[0]
            mean = self._sums[0] + shift * (other.count / total)
            scatter = self._sums[1] + scatter + shift**2 * (self.count * other.count / total)
            self._sums = mean, scatter, self._sums[2] + noise
        else:
            self._sums, self._classification = other._sums, other._classification
        self.count += other.count

    def summary(self) -> SummaryPredictive:
        """The summary of all members so far."""
        if self._classification:
            log_mean = self._sums[0] - math.log(self.count)
            aleatoric = self._sums[1] / self.count
            entropy = entropy_terms(log_mean.exp()).sum(1)
            return ClassificationSummary(log_mean[None], aleatoric[None], (entropy - aleatoric).clamp(min=0)[None])
        mean, scatter, noise = self._sums
        return RegressionSummary(mean[None], (noise / self.count)[None], (scatter / self.count)[None])
