"""Metrics of a regression: errors, densities, interval coverage, members."""

from typing import Any, cast

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.calibration.value_calibrations import RecalibratedRegression
from dissensus.core.predictive import RegressionPredictive
from dissensus.evaluation.loader_predictions import MetricFunctions, Predictions

SCORES = ("variance", "epistemic")
LEVEL = 0.9


def regression_metrics(predictions: Predictions) -> dict[str, float]:
    """rmse, nll of the mixture, gaussian_nll of its first two moments, crps, and coverage and width of 90 % intervals."""
    predictive, y = _gaussians(predictions), predictions.targets
    lower, upper = predictive.interval(LEVEL)
    return {
        "rmse": float(metrics.rmse(predictive.mean, y)),
        **{name: float(values.mean()) for name, values in _values(predictive, y).items()},
        "coverage90": float(metrics.interval_coverage(lower, upper, y)),
        "width90": float(metrics.mean_interval_width(lower, upper)),
    }


def regression_arrays(predictions: Predictions) -> dict[str, Tensor]:
    """Values per example (means over outputs), the probability integral transform and the risk–coverage curve."""
    predictive, y = _gaussians(predictions), predictions.targets
    squared = (predictive.mean.double() - y.double()).square().reshape(len(y), -1).mean(1)
    curve = metrics.risk_coverage(-_output_means(predictive.total), squared)
    return {
        "test/target": y,
        "test/mean": predictive.mean,
        "test/variance": predictive.total,
        "test/squared_error": squared,
        **{f"test/{name}": _output_means(values) for name, values in _values(predictive, y).items()},
        "test/covered90": _output_means(metrics.interval_coverage_values(*predictive.interval(LEVEL), y)),
        # P(Y ≤ y): a central interval of level l holds y where |2 P − 1| ≤ l, so one array gives every coverage.
        "test/cumulative": predictive.cdf(y),
        **{f"risk_coverage/{name}": value for name, value in curve._asdict().items()},
    }


def regression_scores(predictions: Predictions) -> dict[str, Tensor]:
    """OOD scores: name -> (N,) float64, higher = more foreign; variances summed over outputs."""
    predictive = _gaussians(predictions)
    return {
        "variance": predictive.total.double().reshape(len(predictive), -1).sum(1),
        "epistemic": predictive.epistemic.double().reshape(len(predictive), -1).sum(1),
    }


def regression_members(predictions: Predictions) -> dict[str, float]:
    """Metrics of the members, alone and together; empty for a single member."""
    if predictions.members == 1:
        return {}
    predictive, y = _gaussians(predictions), predictions.targets
    means, variances = predictive.defining_tensors()
    log_likelihood = torch.stack(
        [-metrics.gaussian_nll_values(m, v, y) for m, v in zip(means, variances, strict=True)]
    )  # (M, N)
    gain = metrics.ensemble_gain_of(log_likelihood)
    return {
        "members/count": float(len(means)),
        "members/nll": float(gain.member_nll),
        "members/nll_best": float(-log_likelihood.mean(1).max()),
        "members/rmse": float(torch.stack([metrics.rmse(m, y) for m in means]).mean()),
        "members/diversity": float(gain.diversity),
        "members/effective_members": float(metrics.effective_members_regression(means, y)),
    }


def _values(predictive: Any, y: Tensor) -> dict[str, Tensor]:
    """nll and gaussian_nll (N,) and crps (N, D) of every example, in float64."""
    if isinstance(predictive, RecalibratedRegression):
        return {
            "nll": -predictive.log_prob(y).double(),
            "gaussian_nll": metrics.gaussian_nll_values(predictive.mean, predictive.total, y),
            "crps": _crps_of_cdf(predictive, y),
        }
    means, variances = predictive.defining_tensors()
    return {
        "nll": metrics.mixture_nll_values(means, variances, y),
        "gaussian_nll": metrics.gaussian_nll_values(*metrics.moment_match(means, variances), y),
        "crps": metrics.crps_mixture_values(means, variances, y),
    }


def _crps_of_cdf(predictive: RecalibratedRegression, y: Tensor, points: int = 200) -> Tensor:
    """(N, D) ∫_{−∞}^y G² dt + ∫_y^∞ (1 − G)² dt of a cumulative distribution G, by Simpson's rule on both sides of y."""
    means, variances = predictive.defining_tensors()[:2]
    reach = 8 * variances.sqrt()
    found = torch.zeros_like(y, dtype=torch.float64)
    for end, below in (((means - reach).amin(0).minimum(y), True), ((means + reach).amax(0).maximum(y), False)):
        for i in range(points + 1):
            g = predictive.cdf(torch.lerp(y, end, i / points)).double()
            weight = (1 if i in (0, points) else 2 + 2 * (i % 2)) / (3 * points)
            found += weight * (end - y).abs() * (g if below else 1 - g) ** 2
    return found


def _output_means(values: Tensor) -> Tensor:
    """(N,) means over outputs."""
    return values.double().reshape(len(values), -1).mean(1)


def _gaussians(predictions: Predictions) -> RegressionPredictive:
    return cast(RegressionPredictive, predictions.predictive)


REGRESSION = MetricFunctions("regression", regression_metrics, regression_arrays, regression_scores, regression_members)
