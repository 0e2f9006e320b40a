"""Metrics of predictions with one answer per input: classifications and regressions."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.calibration.calibrations import AT_ONCE, RecalibratedRegression
from dissensus.calibration.conformal import CLASS_UNCERTAINTY, VALUE_UNCERTAINTY
from dissensus.core.predictive import SummaryPredictive
from dissensus.evaluation.loader_predictions import MetricFunctions, Predictions
from dissensus.utils.example_table import prediction_columns

CLASS_SCORES = (*CLASS_UNCERTAINTY, "energy")
# kind of predictions -> the scores that can rank inputs; the first is the default
OOD_SCORES = dict.fromkeys(("classification", "segmentation", "tokens"), CLASS_SCORES)
OOD_SCORES |= {"regression": tuple(VALUE_UNCERTAINTY), "multilabel": tuple(CLASS_UNCERTAINTY)}
OOD_METRICS = (metrics.auroc, metrics.aupr, metrics.aupr_in, metrics.aupr_adjusted, metrics.fpr95, metrics.fpr95_in)


def class_metrics(predictions: Predictions) -> dict[str, float]:
    """Accuracy, proper scores, calibration and refusal of a labelled set; soft labels count in nll and brier alone."""
    predictive, y, labels = predictions.predictive, predictions.targets, predictions.labels
    probabilities = predictive.mean
    wrong = 1 - metrics.accuracy_values(probabilities, labels)
    # Ranked by −log max p: probabilities that round to 1 would tie.
    ranked = -metrics.max_probability_score(predictive.log_mean).flatten(), wrong
    found = {
        "accuracy": (1 - wrong).mean(),
        "nll": metrics.nll(predictive.log_mean, y),
        "brier": metrics.brier(probabilities, y),
        "ece": metrics.ece(probabilities, labels),
        "adaptive_ece": metrics.adaptive_ece(probabilities, labels),
        "smooth_ece": metrics.smooth_ece(probabilities, labels),
        "aurc": metrics.aurc(*ranked),
        "augrc": metrics.augrc(*ranked),
        "coverage_at_risk5": metrics.coverage_at_risk(*ranked, risk=0.05),
    }
    return {name: float(value) for name, value in found.items()}


def class_arrays(predictions: Predictions) -> dict[str, Tensor]:
    """Values per example, the reliability bins and the risk–coverage curve."""
    predictive, y, labels = predictions.predictive, predictions.targets, predictions.labels
    probabilities = predictive.mean
    correct = metrics.accuracy_values(probabilities, labels)
    bins = metrics.reliability_bins(probabilities, labels)
    curve = metrics.risk_coverage(-metrics.max_probability_score(predictive.log_mean).flatten(), 1 - correct)
    return {
        **_columns(predictions),
        "test/correct": correct,
        "test/nll": metrics.nll_values(predictive.log_mean, y),
        "test/brier": metrics.brier_values(probabilities, y),
        **{f"reliability/{name}": value for name, value in bins._asdict().items()},
        **{f"risk_coverage/{name}": value for name, value in curve._asdict().items()},
    }


def _columns(predictions: Predictions) -> dict[str, Tensor]:
    """test/NAME of a DataFrame's columns: target, answer, confidence or interval, and parts of the uncertainty."""
    columns = prediction_columns(predictions.predictive, predictions.targets)
    return {f"test/{name}": values for name, values in columns.items()}


def class_scores(predictions: Predictions) -> dict[str, Tensor]:
    """OOD scores: name -> (N,) float64, higher = more foreign; the epistemic one only with several members."""
    predictive, energy = predictions.predictive, predictions.energy
    summary = isinstance(predictive, SummaryPredictive) and (energy is None or len(energy) > 1)
    several = predictions.members > 1 or summary  # a summary keeps what its members disagree in
    names = [name for name in CLASS_UNCERTAINTY if several or name != "epistemic"]
    found = {name: CLASS_UNCERTAINTY[name](predictive) for name in names}
    return found if energy is None else {**found, "energy": energy.mean(0)}


def member_scores(predictions: Predictions, score: str) -> Tensor | None:
    """(M, N) score of each member alone; None for the epistemic one, which needs several members."""
    if score == "energy":
        return predictions.energy
    function = {"max_probability": metrics.max_probability_score, "total": metrics.total_uncertainty}.get(score)
    return None if function is None else torch.stack([function(m) for m in predictions.predictive.log_probs])


def class_members(predictions: Predictions) -> dict[str, float]:
    """Metrics of the members, alone and together; empty for a single member."""
    if predictions.members == 1:
        return {}
    predictive, y, labels = predictions.predictive, predictions.targets, predictions.labels
    members = predictive.log_probs
    found = _member_nll(-torch.stack([metrics.nll_values(member, y) for member in members]))
    if y is not labels:  # of soft labels, Σ_c y_c log p̄_c is the mixture's
        found["members/diversity"] = found["members/nll"] + float(predictive.log_prob(y).mean())
    accuracy = torch.stack([metrics.accuracy(member.exp(), labels) for member in members])
    together = {"disagreement": metrics.disagreement(members)}
    together["effective_members"] = metrics.effective_members(members, labels)
    return found | _of_members({"accuracy": accuracy.mean(), "accuracy_best": accuracy.max(), **together})


def ood_metrics(score_in: Tensor, score_ood: Tensor, prevalence: float | None = None) -> dict[str, float]:
    """The six ranking metrics with OOD as the positive class; prevalence: share of OOD in aupr_adjusted, default ½."""
    found = {function.__name__: float(function(score_in, score_ood)) for function in OOD_METRICS}
    if prevalence is not None:
        found["aupr_adjusted"] = float(metrics.aupr_adjusted(score_in, score_ood, prevalence=prevalence))
    return found


CLASSIFICATION = MetricFunctions("classification", class_metrics, class_arrays, class_scores, class_members)


def multilabel_metrics(predictions: Predictions) -> dict[str, float]:
    """The metrics of the labels as classifications; nll of a row's labels together, exact_match, mean average_precision."""
    arrays, p = multilabel_arrays(predictions), predictions.predictive.mean  # (N, L)
    present = arrays["test/target"] == 1
    both = [each for each in zip(p.T, present.T, strict=True) if 0 < each[1].sum() < len(p)]
    ranked = [float(metrics.aupr(score[~there], score[there])) for score, there in both]
    rows = {name: float(arrays[f"test/{name}"].mean()) for name in ("nll", "exact_match")}
    return class_metrics(_per_label(predictions)) | rows | ({"average_precision": fmean(ranked)} if ranked else {})


def multilabel_arrays(predictions: Predictions) -> dict[str, Tensor]:
    """Values per example, target and prediction (N, L), the reliability bins and the risk–coverage curve of all labels."""
    found = class_arrays(_per_label(predictions))
    shape = predictions.targets.shape  # (N, L)
    correct, brier = (found[key].reshape(shape) for key in ("test/correct", "test/brier"))
    nll = -predictions.predictive.log_prob(predictions.targets).double()
    rows = {"test/correct": correct.mean(1), "test/exact_match": correct.amin(1), "test/brier": brier.mean(1)}
    return (columns := _columns(predictions)) | found | columns | rows | {"test/nll": nll}


def _per_label(predictions: Predictions) -> Predictions:
    """The labels as classifications into absent and present, (N, 2, L); targets between 0 and 1 are rounded."""
    rounded = (predictions.targets > 0.5).long()
    return replace(predictions, predictive=predictions.predictive.per_label, targets=rounded)


MULTILABEL = MetricFunctions(
    "multilabel",
    multilabel_metrics,
    multilabel_arrays,
    lambda given: {name: score.sum(1) for name, score in class_scores(_per_label(given)).items()},  # over labels
    lambda given: {} if given.members == 1 else _member_nll(given.predictive.member_log_prob(given.targets)),
)


def regression_metrics(predictions: Predictions) -> dict[str, float]:
    """rmse, nll of the mixture, gaussian_nll of its first two moments, crps, and coverage and width of 90 % intervals."""
    arrays = {key.removeprefix("test/"): values.double() for key, values in regression_arrays(predictions).items()}
    return {
        "rmse": float(arrays["squared_error"].mean().sqrt()),
        **{name: float(arrays[name].mean()) for name in ("nll", "gaussian_nll", "crps")},
        "coverage90": float(arrays["covered90"].mean()),
        "width90": float((arrays["upper90"] - arrays["lower90"]).mean()),
    }


def regression_arrays(predictions: Predictions) -> dict[str, Tensor]:
    """Values per example (means over outputs), the probability integral transform and the risk–coverage curve."""
    predictive, y, columns = predictions.predictive, predictions.targets, _columns(predictions)
    squared = _output_means((predictive.mean.double() - y.double()).square())
    curve = metrics.risk_coverage(-_output_means(predictive.total), squared)
    ends = columns["test/lower90"], columns["test/upper90"]
    return {
        **columns,
        "test/squared_error": squared,
        **{f"test/{name}": _output_means(values) for name, values in _values(predictive, y).items()},
        "test/covered90": _output_means(metrics.interval_coverage_values(*ends, y)),
        # P(Y ≤ y): a central interval of level l holds y where |2 P − 1| ≤ l, so one array gives every coverage.
        "test/cumulative": predictive.cdf(y),
        **{f"risk_coverage/{name}": value for name, value in curve._asdict().items()},
    }


def regression_members(predictions: Predictions) -> dict[str, float]:
    """Metrics of the members, alone and together; empty for a single member."""
    if predictions.members == 1:
        return {}
    predictive, y = predictions.predictive, predictions.targets
    means, variances = predictive.defining_tensors()
    alone = [-metrics.gaussian_nll_values(m, v, y) for m, v in zip(means, variances, strict=True)]
    together = {"rmse": torch.stack([metrics.rmse(m, y) for m in means]).mean()}
    together["effective_members"] = metrics.effective_members_regression(means, y)
    return _member_nll(torch.stack(alone)) | _of_members(together)


def _member_nll(log_likelihood: Tensor) -> dict[str, float]:
    """Count, mean and best NLL and diversity of members, from log pₘ(yₙ) (M, N)."""
    gain, best = metrics.ensemble_gain_of(log_likelihood), -log_likelihood.mean(1).max()
    found = {"count": len(log_likelihood), "nll": gain.member_nll, "nll_best": best}
    return _of_members({**found, "diversity": gain.diversity})


def _of_members(found: Mapping[str, Any]) -> dict[str, float]:
    return {f"members/{name}": float(value) for name, value in found.items()}


def _values(predictive: Any, y: Tensor) -> dict[str, Tensor]:
    """nll and gaussian_nll (N,) and crps (N, D) of every example, in float64."""
    exact: Any = predictive.to(torch.float64)
    members, recalibrated = exact.defining_tensors()[:2], isinstance(predictive, RecalibratedRegression)
    crps = _crps_of_cdf(predictive, y) if recalibrated else metrics.crps_mixture_values(members[0], members[1], y)
    gaussian = metrics.gaussian_nll_values(exact.mean, exact.total, y)
    return {"nll": -exact.log_prob(y.double()), "gaussian_nll": gaussian, "crps": crps}


def _crps_of_cdf(predictive: RecalibratedRegression, y: Tensor, points: int = 200) -> Tensor:
    """(N, D) ∫_{−∞}^y G² dt + ∫_y^∞ (1 − G)² dt of a cumulative distribution G, by Simpson's rule on both sides of y."""
    means, variances = predictive.defining_tensors()[:2]
    reach = 8 * variances.sqrt()
    found = torch.zeros_like(y, dtype=torch.float64)
    for end, below in (((means - reach).amin(0).minimum(y), True), ((means + reach).amax(0).maximum(y), False)):
        grid = torch.arange(points + 1, dtype=end.dtype, device=y.device).reshape(-1, *[1] * y.ndim)
        for steps in grid.chunk(1 + points // AT_ONCE):
            g = torch.special.ndtr(predictive.scores(torch.lerp(y.to(end), end, steps / points))).double()  # (n, N, D)
            weight = torch.where((steps == 0) | (steps == points), 1, 2 + 2 * (steps % 2)) / (3 * points)
            found += (end - y).abs() * (weight * (g if below else 1 - g) ** 2).sum(0)
    return found


def _output_means(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), -1).mean(1)


REGRESSION = MetricFunctions(
    "regression",
    regression_metrics,
    regression_arrays,
    lambda given: {name: function(given.predictive) for name, function in VALUE_UNCERTAINTY.items()},
    regression_members,
)
