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
from dissensus.core.predictive import Predictive
from dissensus.data.batches import as_loader
from dissensus.predict import predict

log = logging.getLogger("dissensus")

WIDEST = 50.0  # temperatures from 1/50 to 50 are looked at
SUSPICIOUS = 0.5  # below it members would be more than twice as sure: held-out data hardly ever ask for that


def temperature_scale(posterior: Posterior, loader: Iterable[Any]) -> float:
    """The temperature that minimises the mixture's negative log-likelihood on the loader; stored with the posterior.

    Classification divides every member's logits by it (Guo et al., ICML 2017), regression multiplies the noise's
    standard deviation by it. `predict` and `predictor` apply it; `posterior(x)` and `member` do not. Further training
    resets it to 1.

    Args:
        loader: held-out batches (x, y) or (x, y, weight), neither training nor test data; weights count as in training.

    Returns:
        The temperature, between 1/50 and 50; above 1 softens predictions, below 1 sharpens them.
    """
    loader = as_loader(loader, raw=posterior.inputs is not None)
    check_loader(loader)
    view = copy.copy(posterior)  # at temperature 1: other threads may predict meanwhile with the one it has
    view._buffers = {**posterior._buffers, "temperature": torch.ones_like(posterior.temperature)}
    weights: list[Tensor | None] = []
    predictive, y = predict(view, _checked_batches(view, loader, weights))
    weight, counted = _joined_weights(weights, y), posterior.likelihood.counted(y)
    if counted is not None:  # a label that does not count is an example without weight
        y, counts = torch.where(counted, y, 0), counted.double()
        weight = counts if weight is None else counts * spread(weight, counts)
    if weight is not None and not weight.any():
        raise ValueError("expected an example that counts, got none; pass labels not ignored and weights above 0")
    temperature = best_temperature(predictive, y, weight)
    if temperature < 0.99 * SUSPICIOUS:
        log.warning(
            "the temperature %.3g makes predictions more than twice as sure; has the network been trained on these data? fit "
            "it on held-out ones, and on more of them if all are predicted right: no temperature is too low for those. If "
            "these were held out, members are too unsure (for a regression: is its noise set too high?)",
            temperature,
        )
    elif temperature > 0.99 * WIDEST:
        log.warning("the temperature %.3g is the highest looked at: is the posterior trained at all?", temperature)
    posterior.temperature.fill_(temperature)
    return temperature


def best_temperature(predictive: Predictive, y: Tensor, weight: Tensor | None = None) -> float:
    """The temperature with the smallest negative log-likelihood of targets y.

    `weight`: how often each example counts, (N,) or of the shape of the log-probabilities.
    """

    def losses(log_temperature: float) -> Tensor:
        return -predictive.tempered(math.exp(log_temperature)).log_prob(y)

    like = losses(0.0)
    each = None if weight is None else spread(weight.to(like.device), like)

    def mean(values: Tensor) -> float:
        # Where no weight is, an infinite loss does not count either.
        return float(values.mean() if each is None else (each * values.where(each > 0, 0.0)).sum() / each.sum())

    best = minimise(lambda at: mean(losses(at)), -math.log(WIDEST), math.log(WIDEST))
    if best >= math.log(SUSPICIOUS):
        return math.exp(best)
    # Sharpened without end, unsure members (Laplace by rows) become a vote: its NLL hardly changes on these rows, and has no
    # bound on rows whose label gets no vote. So more sharpening than is plausible must pay: of the temperatures within one
    # standard error of the smallest NLL the plainest is taken (Breiman et al. 1984), where they span a factor of two.
    least = losses(best)
    variance = mean((least - mean(least)).square()) / float(least.numel() if each is None else each.sum())
    limit = mean(least) + math.sqrt(variance)
    highest = minimise(lambda at: abs(mean(losses(at)) - limit), best, math.log(SUSPICIOUS))  # the NLL rises on the way
    if highest - best < math.log(2):
        return math.exp(best)
    log.warning(
        "temperatures from %.3g to %.3g are equally good within one standard error, and the highest is taken; pass more "
        "held-out examples to tell them apart (members as unsure as those of Laplace by rows can be sharpened without end)",
        math.exp(best),
        math.exp(highest),
    )
    return math.exp(highest)


def _checked_batches(posterior: Posterior, loader: Iterable[Any], weights: list[Tensor | None]) -> Iterator[Any]:
    """The loader's batches, each checked first: targets must belong to the outputs. Their weights are put into the list."""
    for batch in posterior.read(loader, anywhere=True):
        posterior.check_batch(batch)
        weights.append(batch.weight)
        yield batch


def _joined_weights(weights: list[Tensor | None], y: Tensor) -> Tensor | None:
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
