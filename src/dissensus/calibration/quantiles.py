"""The weighted order statistic of every conformal promise (Vovk et al. 2005; Tibshirani et al., NeurIPS 2019)."""

import math

import torch
from torch import Tensor

ROUNDING = 1e-12  # 0.55 · 20 is 11.000000000000002 in floating point: the 11th of 19 scores is right, not the 12th
# A network's outputs for one input differ by about 1e-6 between batches. If inputs repeat (all features are categories), many
# rows share the score at the threshold, and all of them must fall on the same side.
SAME = 1e-5


def least_rows(level: float) -> int:
    """The fewest rows that give a finite threshold: ⌈(n + 1) · level⌉ ≤ n, so n ≥ level / (1 − level)."""
    return math.ceil(level / (1 - level) * (1 - 1e-9))


def sort_with_mass(scores: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(sorted scores, cumulative weights), both (n, P), from scores (n, P) and weights (n,), for `quantile`."""
    ordered, order = scores.sort(0)
    return ordered, weight[order].cumsum(0)


def weighted_quantile(scores: Tensor, mass: Tensor, level: float, weight: Tensor) -> Tensor:
    """(B, P) thresholds for B new rows with these weights (B,); ∞ if there are too few calibration rows.

    The smallest score s with Σ_{s_i ≤ s} w_i ≥ level · (Σ w_i + w), where w_i are the calibration rows' weights and w that of
    the new row, whose own score counts as ∞. Without weights it is the ⌈(n + 1) · level⌉-th smallest.

    Args:
        scores, mass: the result of `cumulative`.
    """
    total = mass[-1:].sum(0) + weight[:, None]  # (B, P); without calibration rows, only the new row's
    wanted = (level * total * (1 - ROUNDING)).T.contiguous()  # (P, B)
    index = torch.searchsorted(mass.T.contiguous(), wanted).T  # (B, P) index of the first score with enough mass
    last = torch.full_like(scores[:1], math.inf) if len(scores) else scores.new_full((1, scores.shape[1]), math.inf)
    return torch.cat([scores, last]).gather(0, index)


def add_tolerance(threshold: Tensor) -> Tensor:
    """The threshold, raised by a rounding tolerance, so that equal scores fall on the same side."""
    return torch.maximum((1 + SAME) * threshold, (1 - SAME) * threshold)
