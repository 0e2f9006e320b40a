"""Scores: how badly a label or value fits a prediction, and how uncertain a prediction is. Float64, higher = worse.

With any score the conformal guarantee holds; a better one gives smaller sets. Classes:

- `lac`: −log p̄_k, with the same order as 1 − p̄_k (Sadinle, Lei & Wasserman 2019): the smallest sets on average;
- `aps`: the mass of the likelier classes plus u p̄_k (Romano, Sesia & Candès, NeurIPS 2020): larger sets for hard inputs.
  u is random if the score is randomised, else 0, so that the likeliest class is in every set;
- `raps`: the same plus penalty · max(0, rank_k − free) (Angelopoulos et al., ICLR 2021): fewer very large sets;
- `disagreement`: −log(p̄_k + penalty · σ_k), σ_k the standard deviation of p_k over members: a class is in the set if some
  members give it a high probability, so sets grow where members disagree. With one member it equals `lac`.

Values of a regression, each output separately:

- `cqr`: max(l − y, y − h), l and h the mixture's quantiles around the level (Romano, Patterson & Candès, NeurIPS 2019);
- `residual`: |y − mean| / standard deviation of the predictive.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from dissensus import metrics
from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, Predictive


def lac(predictive: CategoricalPredictive, u: Tensor, settings: Mapping[str, Any]) -> Tensor:
    log_mean = predictive.log_mean
    # If the largest probability rounds to 1, its distance from 1 comes from the others, so that confident rows do not tie.
    return (-log_mean.double()).scatter(1, log_mean.argmax(1, keepdim=True), max_probability(predictive)[:, None])


def aps(predictive: CategoricalPredictive, u: Tensor, settings: Mapping[str, Any]) -> Tensor:
    ordered, order = predictive.log_mean.double().exp().sort(dim=1, descending=True, stable=True)
    mass = ordered.cumsum(1) - ordered + u[:, None] * ordered
    if settings:  # raps
        rank = torch.arange(1, mass.shape[1] + 1, device=mass.device)
        mass = mass + settings["penalty"] * (rank - settings["free"]).clamp(min=0)
    return torch.empty_like(mass).scatter(1, order, mass)


def disagreement(predictive: CategoricalPredictive, u: Tensor, settings: Mapping[str, Any]) -> Tensor:
    members = predictive.log_probs.double().exp()  # (M, B, K)
    likely: Tensor = members.mean(0) + settings["penalty"] * members.std(0, correction=0)
    return -likely.log()


# name -> function of (predictive, u (B,) in [0, 1], settings) that returns (B, K)
ClassScore = Callable[[CategoricalPredictive, Tensor, Mapping[str, Any]], Tensor]
CLASS_SCORES: dict[str, ClassScore] = {"lac": lac, "aps": aps, "raps": aps, "disagreement": disagreement}
# default settings
SETTINGS: dict[str, dict[str, float]] = {"raps": {"penalty": 0.01, "free": 5}, "disagreement": {"penalty": 1.0}}
RANDOMISED = ("aps", "raps")  # scores that use u
INTERVAL_SCORES = ("cqr", "residual")


def class_scores(predictive: CategoricalPredictive, facts: Mapping[str, Any], generator: Generator | None) -> Tensor:
    """(B, K) scores of all classes, computed in the same way for calibration rows and new ones."""
    u = torch.zeros(predictive.log_mean.shape[0], dtype=torch.float64)
    if facts["randomised"]:
        device = "cpu" if generator is None else generator.device
        u = torch.rand(len(predictive), dtype=torch.float64, generator=generator, device=device)
    return CLASS_SCORES[facts["score"]](predictive, u.to(predictive.log_mean.device), facts["settings"])


def interval_ends(predictive: Predictive, score: str, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """(lower, upper, unit), each (B, P): the interval at threshold q is [lower − q · unit, upper + q · unit]."""
    mean = _flat(predictive.mean)
    if score == "residual":
        return mean, mean, _flat(predictive.total).sqrt()
    lower, upper = (_flat(end) for end in predictive.interval(level))
    return lower, upper, torch.ones_like(mean)


def interval_score(predictive: Predictive, y: Tensor, score: str, level: float) -> Tensor:
    """(B, P) the smallest threshold at which the interval contains y."""
    lower, upper, unit = interval_ends(predictive, score, level)
    return torch.maximum(lower - _flat(y), _flat(y) - upper) / unit


def _flat(values: Tensor) -> Tensor:
    return values.double().reshape(values.shape[0], -1)


def max_probability(predictive: Predictive) -> Tensor:
    return metrics.max_probability_score(_categorical(predictive).log_mean)


def entropy(predictive: Predictive) -> Tensor:
    return metrics.entropy_score(_categorical(predictive).log_mean)


def mutual_information(predictive: Predictive) -> Tensor:
    if isinstance(predictive, ClassificationPredictive):
        return metrics.mutual_information_score(predictive.log_probs)
    return _categorical(predictive).epistemic.double()  # works for summaries, too


def variance(predictive: Predictive) -> Tensor:
    return _flat(predictive.total).sum(1)


def epistemic(predictive: Predictive) -> Tensor:
    return _flat(predictive.epistemic).sum(1)


Uncertainty = Callable[[Predictive], Tensor]
# name -> function that returns the uncertainty (B,) of a predictive, by which `evaluate` ranks inputs
_KNOWN = (max_probability, entropy, mutual_information)
CLASS_UNCERTAINTY: dict[str, Uncertainty] = {each.__name__: each for each in _KNOWN}
VALUE_UNCERTAINTY: dict[str, Uncertainty] = {"variance": variance, "epistemic": epistemic}


def _categorical(predictive: Predictive) -> CategoricalPredictive:
    assert isinstance(predictive, CategoricalPredictive)
    return predictive
