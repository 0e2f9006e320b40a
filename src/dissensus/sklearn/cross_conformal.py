"""CV+ (Barber, Candès, Ramdas & Tibshirani, Annals of Statistics 2021): intervals and sets calibrated on all training rows.

Networks trained without fold k give its rows' scores s_i = |y_i − m_k(x_i)| / σ_k(x_i). The interval of a new row x ends at the
quantiles of m_k(x) ∓ s_i σ_k(x) over the rows i of all folds k. A set (Romano, Sesia & Candès 2020) has the classes with
scores above those of fewer than level · (n + 1) rows. With one fold of reserved rows this is split conformal prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dissensus.calibration.conformal import ROUNDING, add_tolerance, lac, weighted_quantile
from dissensus.core.predictive import CategoricalPredictive, Predictive

NUMBERS = 2**22  # ends held at once


class FoldPrediction(NamedTuple):
    """New rows as predicted without one fold, beside the scores of the fold's rows."""

    predictive: Predictive  # of N new rows
    scores: Tensor  # (n, D) sorted within each output
    weight: Tensor  # (n, D) of the rows with these scores; a new row has weight 1


def cross_interval(folds: Sequence[FoldPrediction], level: float) -> tuple[Tensor, Tensor]:
    """(lower, upper), each (N, D), for each output separately."""
    weight = torch.cat([fold.weight for fold in folds])[:, None]
    moments = [(fold.predictive.mean, fold.predictive.total.sqrt(), fold.scores[:, None]) for fold in folds]
    parts = torch.split(torch.arange(len(moments[0][0])), max(1, NUMBERS // weight.numel()))
    if len(folds) == 1:  # all rows have the same order of scores
        mean, deviation, scores = moments[0]
        threshold = weighted_quantile(scores[:, 0], weight[:, 0].cumsum(0), level, weight.new_ones(1))
        return mean - threshold * deviation, mean + threshold * deviation

    def quantile(sign: int, part: Tensor) -> Tensor:
        ends = torch.cat([sign * mean[part] + scores * deviation[part] for mean, deviation, scores in moments])
        ordered, order = ends.flatten(1).sort(0)  # (n, B · D)
        mass = weight.expand_as(ends).flatten(1).gather(0, order).cumsum(0)
        return sign * weighted_quantile(ordered, mass, level, weight.new_ones(1)).reshape(ends.shape[1:])

    return torch.cat([quantile(-1, part) for part in parts]), torch.cat([quantile(1, part) for part in parts])


def cross_set(folds: Sequence[FoldPrediction], level: float) -> Tensor:
    """(N, C) boolean: the classes in each set."""
    total = 1 + sum(float(fold.weight.sum()) for fold in folds)
    below = torch.zeros_like(folds[0].predictive.mean)
    for predictive, scores, weight in folds:
        found = lac(cast(CategoricalPredictive, predictive), below[:, 0], {})
        index = torch.searchsorted(add_tolerance(scores[:, 0]), found)  # rows with lower scores
        below += torch.cat([weight.new_zeros(1), weight[:, 0].cumsum(0)])[index]
    return below < level * total * (1 - ROUNDING)
