"""Gate: accepts predictions by a threshold on their uncertainty, with a guarantee for the accepted ones."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from dissensus.calibration.conformal_scores import CLASS_UNCERTAINTY, VALUE_UNCERTAINTY, Uncertainty
from dissensus.core.batch import Inputs
from dissensus.core.calibrated import Guarantee
from dissensus.core.predictive import CategoricalPredictive, Predictive


class GateDecision(NamedTuple):
    """The result of a gate for B inputs."""

    accept: Tensor  # (B,) boolean
    score: Tensor  # (B,) float64, higher = more uncertain
    predictive: Predictive


class Gate(Guarantee):
    """Accepts inputs whose score is below `threshold`; made by `ds.selective` and `ds.ood_gate`, saved with the posterior.

    Public attributes: `threshold`, −∞ if no guarantee is possible, so that nothing is accepted; `score`; `facts`, with `risk`
    and `confidence`, or `false_alarm`, and counts on the calibration rows (`rows`, `accepted`, `errors`).
    """

    kind = "gate"

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(facts, tensors)
        self.threshold = float(facts["threshold"])  # JSON has no infinity: written as text
        self.score = str(facts["score"])

    def forward(self, x: Inputs | Predictive) -> GateDecision:
        """`gate(x)`: `GateDecision` for a batch of inputs, or for the posterior's `Predictive` of one."""
        posterior = self.posterior  # raises if its predictions have changed
        return self.decide(x if isinstance(x, Predictive) else posterior.predict(x))

    def decide(self, predictive: Predictive) -> GateDecision:
        """The result for a predictive, without asking whether it is the posterior's present one."""
        score = uncertainty_function(predictive, self.score)(predictive)
        return GateDecision(score < self.threshold, score, predictive)

    def __repr__(self) -> str:
        return f"Gate({self.score} below {self.threshold:.4g}: {self.describe()})"

    def describe(self) -> str:
        """The guarantee in one sentence."""
        if "false_alarm" in self.facts:
            share = self.facts["false_alarm"]
            rows = f"the {self.facts['rows']} calibration rows"
            return f"inputs like {rows} are refused with probability at most {share:g}"
        if self.threshold == float("-inf"):
            return "nothing is accepted: no threshold guarantees this risk on these rows"
        risk, confidence = self.facts["risk"], self.facts["confidence"]
        return f"of accepted inputs at most {100 * risk:g} % are wrong, with confidence {confidence:g}"


def error_mask(predictive: Predictive, y: Tensor, tolerance: float | None) -> Tensor:
    """(B,) boolean: the class is wrong, or an output is off by more than the tolerance."""
    if isinstance(predictive, CategoricalPredictive):
        return predictive.log_mean.argmax(1) != y
    assert tolerance is not None  # required for a regression
    off = (predictive.mean - y).abs() > tolerance
    return off.reshape(len(off), -1).any(1)


def uncertainty_function(predictive: Predictive, score: str) -> Uncertainty:
    """The function that computes this score; raises if such predictives do not have it."""
    classes = isinstance(predictive, CategoricalPredictive)
    return (CLASS_UNCERTAINTY if classes else VALUE_UNCERTAINTY)[score]
