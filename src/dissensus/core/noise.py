"""A learned noise that no step has moved yet: where it starts, and what to say where it predicts all the same."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dissensus.core.batch import Batch
from dissensus.core.likelihood import spread
from dissensus.core.particles import Particles
from dissensus.core.regression import HeteroscedasticRegression, Regression

FAR = 5.0  # times a start of 1: errors of standardised targets are smaller


def untrained(particles: Particles) -> Tensor | None:
    """The logarithm of a learned noise, () or (M,), that is still what it was built with; None where there is none."""
    noise = {**particles.shared_parameters(), **particles.own_parameters()}.get("likelihood.log_noise")
    if noise is None or not noise.requires_grad or not isinstance(particles.likelihood, Regression):
        return None
    start = math.log(particles.likelihood.initial or 1.0)
    return noise if bool(((noise.detach() - start).abs() < 1e-6).all()) else None


def started(particles: Particles, outputs: Callable[[], Tensor], batch: Batch) -> str | None:
    """Starts the noise at the error of the outputs where that is far above 1: from 1, intervals are too narrow for long."""
    noise, likelihood = untrained(particles), particles.likelihood
    heads = isinstance(likelihood, HeteroscedasticRegression)  # whose variances, the network's own, cannot be started
    if not heads and (noise is None or likelihood.initial is not None):
        return None
    mean, variance = likelihood.describe(outputs()) if heads else (outputs(), 1.0)
    y = batch.y if heads else likelihood.standardised(batch.y)  # as the outputs are
    squares = (y - mean).double().square() / variance
    w = torch.ones_like(squares) if batch.weight is None else spread(batch.weight, squares)
    error = float(((w * squares).sum() / w.sum()).sqrt())
    if not FAR < error < math.inf:
        return None
    if noise is not None:
        noise.data.fill_(math.log(error))
    what = "intervals start too narrow" if heads else "the learned noise starts there instead of at 1"
    return (
        f"targets are {error:.3g}{' standard deviations' if heads else ''} off the outputs in the first batch: {what}; "
        'standardise the targets, fit(..., targets="standardised"), or training will take long'
    )


def doubt(particles: Particles) -> str | None:
    """A warning where the noise was never trained."""
    return None if (noise := untrained(particles)) is None else (
        f"the learned noise was never trained and is still {float(noise.detach().flatten()[0].exp()):g}; train it, or pass "
        "Regression(noise=...) or likelihood=posterior.likelihood of the posterior that the network was trained in"
    )  # fmt: skip
