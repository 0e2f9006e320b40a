"""Calibrations of a regression: of the standard deviation, and of the cumulative distribution."""

from typing import cast

from torch import Tensor

from dissensus.core.predictive import Predictive, RegressionPredictive
from dissensus.core.recalibrated import RecalibratedRegression
from dissensus.core.standing import Calibration
from dissensus.core.summary import RegressionSummary


class DeviationScaling(Calibration):
    """Stretches the mixture about its mean by a factor: members' distances from the mean, and their noise.

    The mean does not change; the standard deviation is multiplied, in its epistemic and aleatoric parts (a temperature
    multiplies only the noise).
    """

    kind = "scale"
    factor: Tensor  # ()

    def mixture(self, predictive: Predictive) -> Predictive:
        if isinstance(predictive, RegressionSummary):
            mean, aleatoric, epistemic = predictive.described()
            return RegressionSummary(mean, aleatoric * self.factor**2, epistemic * self.factor**2)
        means, variances = predictive.described()
        return RegressionPredictive(
            predictive.mean + self.factor * (means - predictive.mean), variances * self.factor**2
        )


class CumulativeCalibration(Calibration):
    """Replaces the mixture's P(Y ≤ y) = F(y) by R(F(y)), with one R per output (Kuleshov et al., ICML 2018).

    A summary is treated as the Gaussian with the mixture's mean and variance.
    """

    kind = "cumulative"
    at: Tensor  # (K, *outputs) knots of g, strictly increasing: scores Φ⁻¹(F(y))
    value: Tensor  # (K, *outputs) values of g, strictly increasing

    def mixture(self, predictive: Predictive) -> Predictive:
        if isinstance(predictive, RegressionSummary):
            predictive = RegressionPredictive(predictive.mean[None], predictive.total[None])
        means, variances = cast(RegressionPredictive, predictive).described()
        knots = (each.to(means.dtype)[:, None].expand(-1, *means.shape[1:]) for each in (self.at, self.value))
        return RecalibratedRegression(means, variances, *knots)
