"""Calibrations of class probabilities, by members' logits, or by mean probabilities, one class against the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dissensus.core.calibrated import Calibration
from dissensus.core.predictive import ClassificationPredictive, ClassificationSummary, Predictive, entropy_terms
from dissensus.metrics.calibration import confidence_bin
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
