"""Learned noise before the first step: its starting value, and a warning if untrained noise is used for predictions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dissensus.core.batch import Batch
from dissensus.core.likelihood import spread
from dissensus.core.particles import Particles
from dissensus.core.regression import HeteroscedasticRegression, Regression

FAR = 5.0  # errors above this start the noise elsewhere than at 1: errors of standardised targets are smaller


def untrained(particles: Particles) -> Tensor | None:
    """Logarithm of a learned noise, () or (M,), if it still has its initial value; else None."""
    noise = {**particles.shared_parameters(), **particles.own_parameters()}.get("likelihood.log_noise")
    if noise is None or not noise.requires_grad or not isinstance(particles.likelihood, Regression):
        return None
    start = math.log(particles.likelihood.initial or 1.0)
    return noise if bool(((noise.detach() - start).abs() < 1e-6).all()) else None


def started(particles: Particles, outputs: Callable[[], Tensor], batch: Batch) -> str | None:
    """Starts the noise at the error of the outputs if that is far above 1, where a start at 1 would take long to correct."""
    noise, likelihood = untrained(particles), particles.likelihood
    heads = isinstance(likelihood, HeteroscedasticRegression)  # its variances are network outputs and cannot be set
    if not heads and (noise is None or likelihood.initial is not None):
        return None
    mean, variance = likelihood.describe(outputs()) if heads else (outputs(), 1.0)
    y = batch.y if heads else likelihood.standardised(batch.y)  # in the units of the outputs
    squares = (y - mean).double().square() / variance
    w = torch.ones_like(squares) if batch.weight is None else spread(batch.weight, squares)
    error = float(((w * squares).sum() / w.sum()).sqrt())
    if not FAR < error < math.inf:
        return None
    if noise is not None:
        noise.data.fill_(math.log(error))
    what = "intervals start too narrow" if heads else "the learned noise starts there instead of at 1"
    return (
        f"outputs differ from targets by {error:.3g}{' standard deviations' if heads else ''} in the first batch: {what}; "
        'standardise the targets, fit(..., targets="standardised"), or training will take long'
    )


def doubt(particles: Particles) -> str | None:
    """A warning if the noise was never trained, else None."""
    return None if (noise := untrained(particles)) is None else (
        f"the learned noise was never trained and is still {float(noise.detach().flatten()[0].exp()):g}; train it, pass "
        "Regression(noise=...), or pass the likelihood of the posterior in which the network was trained"
    )  # fmt: skip
