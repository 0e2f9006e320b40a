"""Temperature scaling: one number, fitted on held-out data, that softens or sharpens every member."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.inputs import check_loader
from dissensus.core.likelihood import spread
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import ClassificationPredictive, Predictive
from dissensus.predict import predict

log = logging.getLogger("dissensus")

WIDEST = 50.0  # temperatures from 1/50 to 50 are looked at
SUSPICIOUS = 0.5  # below it members would be more than twice as sure: held-out data hardly ever ask for that


def temperature_scale(posterior: Posterior, loader: Iterable[Any]) -> float:
    """The temperature that minimises the mixture's negative log-likelihood on the loader; stored with the posterior.

    Classification divides every member's logits by it (Guo et al., ICML 2017), regression multiplies the noise's standard
    deviation by it. Use held-out data, not the training or the test set. Weights of examples count as in training.
    """
    check_loader(loader)
    temperature = _found(_untempered(posterior), loader)
    posterior.temperature.fill_(temperature)
    return temperature


def _untempered(posterior: Posterior) -> Posterior:
    """The posterior with all it holds but a temperature of 1: other threads may predict meanwhile with the one it has."""
    view = copy.copy(posterior)
    view._buffers = {**posterior._buffers, "temperature": torch.ones_like(posterior.temperature)}
    return view


def _found(posterior: Posterior, loader: Iterable[Any]) -> float:
    """The best temperature of a posterior whose own is 1; what looks wrong about it is said."""
    weights: list[Tensor | None] = []
    predictive, y = predict(posterior, _checked(posterior, loader, weights))
    counted = posterior.likelihood.counted(y)
    if counted is not None:
        y = torch.where(counted, y, 0)
    weight = _joined(weights, y)
    if weight is not None and not weight.any():
        raise ValueError("expected an example with a weight above 0, got none; pass a loader with data that count")
    temperature = best_temperature(predictive, y, counted, weight)
    if not 1.01 / WIDEST < temperature < 0.99 * WIDEST:
        log.warning(
            "the temperature %.3g is at the edge of what is looked at: is the posterior trained at all?", temperature
        )
    _warn(temperature, _all_right(predictive, y, counted, weight))
    return temperature


def best_temperature(
    predictive: Predictive, y: Tensor, counted: Tensor | None = None, weight: Tensor | None = None
) -> float:
    """The temperature of the smallest negative log-likelihood of targets y; `counted`: those that count, None: all.

    `weight`: how often each example counts, (N,) or of the shape of the log-probabilities.
    """

    def nll(log_temperature: float) -> float:
        log_prob = predictive.tempered(math.exp(log_temperature)).log_prob(y)
        if weight is not None:
            each = spread(weight.to(log_prob.device), log_prob)
            each = each if counted is None else each * counted
            # Where no weight is, −∞ does not count either.
            return -float((each * log_prob.where(each > 0, 0.0)).sum() / each.sum())
        return -float(log_prob.mean() if counted is None else log_prob[counted].mean())

    return math.exp(minimise(nll, -math.log(WIDEST), math.log(WIDEST)))


def _all_right(predictive: Predictive, y: Tensor, counted: Tensor | None, weight: Tensor | None = None) -> bool:
    """Whether every label that counts is the most probable one; False for a regression."""
    if not isinstance(predictive, ClassificationPredictive):
        return False
    labels = y.argmax(1) if y.is_floating_point() else y
    right = predictive.mean.argmax(1) == labels.to(predictive.mean.device)
    if weight is not None:
        right = right | (spread(weight.to(right.device), right.float()) == 0)
    return bool((right if counted is None else right[counted.to(right.device)]).all())


def _warn(temperature: float, all_right: bool) -> None:
    if all_right:
        log.warning(
            "every example of the loader is predicted right, so that no temperature is too low for it (found %.3g); has the "
            "network been trained on these data? fit the temperature on held-out ones, and more of them",
            temperature,
        )
    elif temperature < SUSPICIOUS:
        log.warning(
            "the temperature %.3g makes predictions more than twice as sure; has the network been trained on these data? fit "
            "it on held-out ones (for a regression: is its noise set too high?)",
            temperature,
        )


def _checked(posterior: Posterior, loader: Iterable[Any], weights: list[Tensor | None]) -> Iterator[Any]:
    """The loader's batches, each checked first: targets must belong to the outputs. Their weights are put into the list."""
    for batch in loader:
        x, y, weight = batches.unpack(batch)
        batches.check_weight(weight)
        posterior.check_batch(batches.to(x, posterior.device), y)
        weights.append(weight)
        yield batch


def _joined(weights: list[Tensor | None], y: Tensor) -> Tensor | None:
    """The weights of all batches in one; None where there are none."""
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        raise ValueError("expected weights in every batch or in none, got some without; give those the weight 1")
    return torch.cat(given).to(y.device)


def minimise(function: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-5) -> float:
    """Where a function of one number is smallest: a coarse grid, then golden sections around its best point."""
    grid = [low + (high - low) * i / 24 for i in range(25)]
    best = min(range(25), key=lambda i: function(grid[i]))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, 24)]
    ratio = (math.sqrt(5) - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = function(c), function(d)
    while b - a > tolerance:
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = function(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = function(d)
    return (a + b) / 2
