"""Standardised regression targets: the network is trained on them, and predictions are converted back."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dissensus.core.posterior import Posterior
from dissensus.core.regression import RealTargets

log = logging.getLogger("dissensus")


def standardise_targets(posterior: Posterior, loader: Iterable[Any]) -> None:
    """Measures mean and standard deviation of each target in one pass and sets them in the likelihood, unless it has them.

    The network's outputs are then standardised; losses, predictions and intervals are in the units of the targets.
    """
    particles = posterior.particles
    likelihoods = [template.likelihood for template in particles.templates]
    if not all(isinstance(each, RealTargets) for each in likelihoods):
        raise TypeError(
            f"expected a regression for standardised targets, got {type(particles.likelihood).__name__}; leave targets out"
        )
    if particles.likelihood.targets is not None:
        return
    if int(posterior.steps):
        raise ValueError(
            "expected an untrained posterior, got one that was trained on targets that are not standardised; build a new one, "
            "or leave targets out"
        )
    if iter(loader) is loader:
        raise ValueError("expected a loader that can be read twice, got a generator; pass a list of its batches")
    measured = _mean_and_std(batch.y for batch in posterior.read(loader))
    for each in likelihoods:
        each.standardise(measured)


def _mean_and_std(parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """{"mean", "std"} of columns, each (D,), with divisor N; a column that never varies has std 1."""
    count, mean, scatter = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for y in parts:
        rows = (y if y.ndim > 1 else y[:, None]).detach().double().cpu().flatten(0, -2)  # (n, D)
        if not len(rows):
            continue
        # Chan, Golub & LeVeque 1979: no loss of digits for large means.
        total, shift = count + len(rows), rows.mean(0) - mean
        scatter = scatter + (rows - rows.mean(0)).square().sum(0) + shift**2 * (count * len(rows) / total)
        mean, count = mean + shift * (len(rows) / total), total
    if not count:
        raise ValueError("expected targets to standardise, got an empty loader; pass the training data")
    std = (scatter / count).sqrt()
    return {"mean": mean, "std": torch.where(std > 1e-12 * (1 + mean.abs()), std, 1.0)}
