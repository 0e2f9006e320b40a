"""The best temperature for given predictions, and the minimum of a function of one number."""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dissensus.core.likelihood import expand_weight
from dissensus.core.predictive import Predictive

log = logging.getLogger("dissensus")

WIDEST = 50.0  # temperatures from 1/50 to 50 are tried
NUMBERS = 2**22  # of predictions held in float64 at once
SUSPICIOUS = 0.5  # a lower one makes members more than twice as confident, which held-out data hardly ever need


def best_temperature(predictive: Predictive, y: Tensor, weight: Tensor | None = None) -> float:
    """The temperature that minimises the negative log-likelihood of targets y, computed in float64 for a precise minimum.

    `weight`: example weights, (N,) or of the shape of the log-probabilities.
    """
    rows = max(1, NUMBERS // max(1, predictive.defining_tensors()[0][:, :1].numel()))  # converted at once
    parts = [slice(start, start + rows) for start in range(0, len(predictive), rows)]

    def losses(at: float) -> Tensor:
        tempered = (predictive[part].to(torch.float64).apply_temperature(math.exp(at)) for part in parts)
        return -torch.cat([each.log_prob(y[part]) for each, part in zip(tempered, parts, strict=True)])

    like = losses(0.0)
    each = None if weight is None else expand_weight(weight.to(like.device), like)

    def mean(values: Tensor) -> float:
        # An infinite loss of weight 0 does not count.
        return float(values.mean() if each is None else (each * values.where(each > 0, 0.0)).sum() / each.sum())

    best = minimise(lambda at: mean(losses(at)), -math.log(WIDEST), math.log(WIDEST))
    if best >= math.log(SUSPICIOUS):
        return math.exp(best)
    # Uncertain members (Laplace by rows) become a vote when sharpened further and further. The vote's NLL hardly changes on
    # these rows, and is unbounded on rows whose label gets no vote. So implausible sharpening must improve the NLL clearly: of
    # the temperatures within one standard error of the smallest NLL, the highest is taken (Breiman et al. 1984), if they span
    # a factor of two.
    least = losses(best)
    variance = mean((least - mean(least)).square()) / float(least.numel() if each is None else each.sum())
    limit = mean(least) + math.sqrt(variance)
    highest = minimise(lambda at: abs(mean(losses(at)) - limit), best, math.log(SUSPICIOUS))  # the NLL rises on the way
    if highest - best < math.log(2):
        return math.exp(best)
    hint = "Pass more held-out examples to choose (members that are far too uncertain favour ever lower ones)"
    text = "temperatures from %.3g to %.3g are equally good within one standard error; the highest is used. %s"
    log.warning(text, math.exp(best), math.exp(highest), hint)
    return math.exp(highest)


def minimise(function: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-5) -> float:
    """The minimiser of a function of one number: a coarse grid, then golden sections around its best point."""
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
