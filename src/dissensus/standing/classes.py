"""Calibrations of class probabilities: of members' logits, or of the mean probabilities, one class against the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dissensus.core.predictive import ClassificationPredictive, Predictive
from dissensus.core.standing import Calibration
from dissensus.core.summary import ClassificationSummary
from dissensus.metrics.calibration import confidence_bin
from dissensus.numerics.entropy import entropy_terms
from dissensus.numerics.isotonic import between_knots


class VectorScaling(Calibration):
    """Every member's logits times a scale, plus a bias, both by class (Guo et al., ICML 2017, section 4.2).

    Logits are taken as log-probabilities: a constant added to all logits of an input, which no prediction shows, would
    otherwise change the result. Scales are above 0, so a likelier class is never made less likely by its own logit.
    """

    kind = "vector"
    scale: Tensor  # (C,)
    bias: Tensor  # (C,)

    def members(self, predictive: Predictive) -> Predictive:
        return ClassificationPredictive(self.logits(predictive.members).log_softmax(2))

    def logits(self, logits: Tensor) -> Tensor:
        shape = (-1, *[1] * (logits.ndim - 3))
        scale, bias = (each.to(logits.dtype).reshape(shape) for each in (self.scale, self.bias))
        return scale * logits + bias


class MeanCalibration(Calibration, ABC):
    """Base class: each class's mean probability goes through a function of its own; then they are normalised.

    With N rows behind it no probability is 0: p = (N · normalised + 1/C) / (N + 1), as if one more row had been seen, of every
    class in equal parts. Where all functions give 0, p is uniform.

    What members disagree on is not calibrated: `epistemic` stays the members' own mutual information, at most the calibrated
    entropy, and `aleatoric` is the rest of that.
    """

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(facts, tensors)
        self.rows = float(facts["weight"])  # N

    def mixture(self, predictive: Predictive) -> Predictive:
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
    """By isotonic regression of each class's labels on its mean probability (Zadrozny & Elkan, KDD 2002)."""

    kind = "isotonic"
    at: Tensor  # (C, K) knots, rising
    value: Tensor  # (C, K)

    def one_against_rest(self, mean: Tensor) -> Tensor:
        return between_knots(mean, self.at.to(mean.dtype), self.value.to(mean.dtype))


class HistogramCalibration(MeanCalibration):
    """By the share of each class's labels in bins of its mean probability (Zadrozny & Elkan, ICML 2001).

    Bins have equal width and are closed at the right, as those of the calibration error; one without rows leaves
    probabilities as they are. Within a bin all become alike, so the NLL may rise, on the calibration rows as well.
    """

    kind = "histogram"
    value: Tensor  # (C, bins), NaN without rows

    def one_against_rest(self, mean: Tensor) -> Tensor:
        found = self.value.to(mean.dtype).gather(1, confidence_bin(mean, self.value.shape[1]))
        return torch.where(found.isnan(), mean, found)
