"""Metrics of a classification: accuracy, proper scores, calibration, selective prediction, OOD detection, members."""

from typing import cast

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.core.predictive import ClassificationPredictive, SummaryPredictive
from dissensus.evaluation.loader_predictions import MetricFunctions, Predictions

SCORES = ("max_probability", "entropy", "mutual_information", "energy")
OOD_METRICS = {
    "auroc": metrics.auroc,
    "aupr": metrics.aupr,
    "aupr_in": metrics.aupr_in,
    "aupr_adjusted": metrics.aupr_adjusted,
    "fpr95": metrics.fpr95,
    "fpr95_in": metrics.fpr95_in,
}


def class_metrics(predictions: Predictions) -> dict[str, float]:
    """accuracy, nll, brier, ece and aurc of a labelled set."""
    predictive, y = _categorical(predictions), predictions.targets
    probabilities = predictive.mean
    correct = metrics.accuracy_values(probabilities, y)
    return {
        "accuracy": float(correct.mean()),
        "nll": float(metrics.nll(predictive.log_mean, y)),
        "brier": float(metrics.brier(probabilities, y)),
        "ece": float(metrics.ece(probabilities, y)),
        # Ranked by −log max p: probabilities that round to 1 would tie.
        "aurc": float(metrics.aurc(-metrics.max_probability_score(predictive.log_mean), 1 - correct)),
    }


def class_arrays(predictions: Predictions) -> dict[str, Tensor]:
    """Values per example, the reliability bins and the risk–coverage curve."""
    predictive, y = _categorical(predictions), predictions.targets
    probabilities = predictive.mean
    confidence, prediction = probabilities.max(1)
    correct = metrics.accuracy_values(probabilities, y)
    bins = metrics.reliability_bins(probabilities, y)
    curve = metrics.risk_coverage(-metrics.max_probability_score(predictive.log_mean), 1 - correct)
    return {
        "test/target": y,
        "test/prediction": prediction,
        "test/confidence": confidence,
        "test/correct": correct,
        "test/nll": metrics.nll_values(predictive.log_mean, y),
        "test/brier": metrics.brier_values(probabilities, y),
        **{f"reliability/{name}": value for name, value in bins._asdict().items()},
        **{f"risk_coverage/{name}": value for name, value in curve._asdict().items()},
    }


def class_scores(predictions: Predictions) -> dict[str, Tensor]:
    """OOD scores: name -> (N,) float64, higher = more foreign; mutual information only with several members."""
    predictive = _categorical(predictions)
    found = {
        "max_probability": metrics.max_probability_score(predictive.log_mean),
        "entropy": metrics.entropy_score(predictive.log_mean),
    }
    if predictions.members > 1:
        found["mutual_information"] = metrics.mutual_information_score(predictive.log_probs)
    elif isinstance(predictive, SummaryPredictive) and (predictions.energy is None or len(predictions.energy) > 1):
        found["mutual_information"] = predictive.epistemic.double()  # of the members; a summary keeps it
    if predictions.energy is not None:
        found["energy"] = predictions.energy.mean(0)
    return found


def member_scores(predictions: Predictions, score: str) -> Tensor | None:
    """(M, N) score of each member alone; None for mutual information, which needs several members."""
    if score == "energy":
        return predictions.energy
    function = {"max_probability": metrics.max_probability_score, "entropy": metrics.entropy_score}.get(score)
    return None if function is None else torch.stack([function(m) for m in _categorical(predictions).log_probs])


def class_members(predictions: Predictions) -> dict[str, float]:
    """Metrics of the members, alone and together; empty for a single member."""
    if predictions.members == 1:
        return {}
    members, y = _categorical(predictions).log_probs, predictions.targets
    nll = torch.stack([metrics.nll(member, y) for member in members])
    accuracy = torch.stack([metrics.accuracy(member.exp(), y) for member in members])
    return {
        "members/count": float(len(members)),
        "members/nll": float(nll.mean()),
        "members/nll_best": float(nll.min()),
        "members/accuracy": float(accuracy.mean()),
        "members/accuracy_best": float(accuracy.max()),
        "members/diversity": float(metrics.ensemble_gain(members, y).diversity),
        "members/disagreement": float(metrics.disagreement(members)),
        "members/effective_members": float(metrics.effective_members(members, y)),
    }


def ood_metrics(score_in: Tensor, score_ood: Tensor, prevalence: float | None = None) -> dict[str, float]:
    """The six ranking metrics with OOD as the positive class; prevalence: share of OOD in aupr_adjusted, default ½."""
    found = {name: float(function(score_in, score_ood)) for name, function in OOD_METRICS.items()}
    if prevalence is not None:
        found["aupr_adjusted"] = float(metrics.aupr_adjusted(score_in, score_ood, prevalence=prevalence))
    return found


def union_metrics(test: Predictions, ood: Predictions, prevalence: float | None = None) -> dict[str, float]:
    """ece_union: ECE of test and OOD inputs together; every answer to an OOD input is wrong. prevalence: share of OOD."""
    inside, outside = _categorical(test).mean, _categorical(ood).mean
    return {"ece_union": float(metrics.union_ece(inside, test.targets, outside, prevalence=prevalence))}


def _categorical(predictions: Predictions) -> ClassificationPredictive:
    return cast(ClassificationPredictive, predictions.predictive)


CLASSIFICATION = MetricFunctions("classification", class_metrics, class_arrays, class_scores, class_members)
