"""CV+ (Barber, Candès, Ramdas & Tibshirani, Annals of Statistics 2021): intervals and sets calibrated on all training rows.

Networks trained without fold k give the scores of its rows, s_i = |y_i − m_k(x_i)| / σ_k(x_i), and predict new rows. A new
row's interval ends at the weighted quantiles of m_k(x) ∓ s_i σ_k(x) over all rows i of all folds k. The set of a classification
(Romano, Sesia & Candès 2020) has the classes whose scores exceed fewer than level · (n + 1) of the rows' scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dissensus.calibration.conformal import ROUNDING, add_tolerance, lac, sort_with_mass, weighted_quantile
from dissensus.core.predictive import CategoricalPredictive, Predictive

NUMBERS = 2**22  # ends held at once


class FoldPrediction(NamedTuple):
    """New rows as predicted without one fold, beside the scores of the fold's rows."""

    predictive: Predictive  # of N new rows
    scores: Tensor  # (n, D) float64
    weight: Tensor  # (n, D) the weight of the row of each score; a new row has weight 1


def cross_interval(folds: Sequence[FoldPrediction], level: float) -> tuple[Tensor, Tensor]:
    """(lower, upper), each (N, D), for each output separately; the ends are in order, because scores are not negative."""
    weight, one = torch.cat([fold.weight for fold in folds])[:, None], torch.ones(1, dtype=torch.float64)
    rows, outputs = folds[0].predictive.mean.shape
    size = max(1, NUMBERS // weight.numel())
    moments = [(fold.predictive.mean, fold.predictive.total.sqrt(), fold.scores[:, None]) for fold in folds]

    def quantile(sign: int, part: slice) -> Tensor:
        ends = torch.cat([sign * mean[part] + scores * deviation[part] for mean, deviation, scores in moments])
        ordered, order = ends.flatten(1).sort(0)  # (n, B · D)
        mass = weight.expand_as(ends).flatten(1).gather(0, order).cumsum(0)
        return sign * weighted_quantile(ordered, mass, level, one).reshape(-1, outputs)

    parts = [slice(start, start + size) for start in range(0, rows, size)]
    lower, upper = (torch.cat([quantile(sign, part) for part in parts]) for sign in (-1, 1))
    return lower, upper


def cross_set(folds: Sequence[FoldPrediction], level: float) -> Tensor:
    """(N, C) boolean: the classes in each set."""
    below: Tensor | float = 0.0
    total = 1.0
    for fold in folds:
        predictive = cast(CategoricalPredictive, fold.predictive)
        ordered, mass = (each[:, 0].contiguous() for each in sort_with_mass(fold.scores, fold.weight[:, 0]))
        worse = torch.searchsorted(add_tolerance(ordered), lac(predictive, torch.zeros(len(predictive)), {}))
        below = below + torch.cat([mass.new_zeros(1), mass])[worse]
        total += float(mass[-1])
    return cast(Tensor, below < level * total * (1 - ROUNDING))
