"""Predictions of standardised targets, brought back to the units the targets came in."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from dissensus import metrics
from dissensus.core.predictive import RegressionPredictive
from dissensus.data.standardise import Standardiser
from dissensus.evaluation.predictions import Predictions


def in_original_units(predictions: Predictions, targets: Standardiser | None, y: Tensor) -> Predictions:
    """The predictions with means m·sd + mean and variances v·sd², in float64, and the original targets y (N, D)."""
    if targets is None:
        return predictions
    means, variances = cast(RegressionPredictive, predictions.predictive).described()
    means, variances, _ = metrics.unstandardise(
        means.double(), variances.double(), location=targets.mean, scale=targets.std
    )
    return replace(predictions, predictive=RegressionPredictive(means, variances), targets=y.double())
