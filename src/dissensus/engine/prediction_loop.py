"""Prediction of one batch after the other, with one draw of functions for all: what the verbs of prediction have in common."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.calibrated import Lens
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.input_checks import check_loader
from dissensus.core.member_runner import Ways
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior, left_as_found
from dissensus.core.predictive import Predictive
from dissensus.core.summary import RunningSummary
from dissensus.engine.async_checks import LateChecks
from dissensus.engine.captured_prediction import CapturedFunction
from dissensus.engine.precision import PredictionPrecision, in_precision, prediction_precision, warn_of_standing

log = logging.getLogger("dissensus")

LITTLE = 2**26  # numbers
BEHIND = 16  # batches, where the user's code does not run between them


def predicted(
    posterior: Posterior,
    loader: Iterable[Any],
    lens: Lens,
    *,
    precision: PredictionPrecision,
    compiled: bool,
    keep_members: bool = False,
    one_at_a_time: bool = False,
    keeps_weights: bool = True,
) -> Iterator[tuple[Predictive, Tensor]]:
    """(predictive of all members, or their summary, targets) of one batch after the other, by all processes on a mesh.

    Members are seen through the lens; the caller looks at the mixture through it. `keeps_weights`: that the user's code,
    which may change weights, does not run between batches.
    """
    prediction_precision("precision", precision)
    check_loader(loader)
    warn_of_standing(posterior, precision)
    with left_as_found(posterior):
        device, drawn = posterior.device, posterior.draw()
    portion = posterior.portion(drawn)
    count = batches.length(loader)
    # On a mesh an error must come with its batch, so that all processes raise it.
    at_once = device.type != "cuda" or posterior.others is not None
    late = LateChecks(at_once=at_once, behind=BEHIND if keeps_weights else 1)

    @contextmanager
    def context() -> Iterator[None]:
        # Entered again for every part, so that between two parts the caller's modes and random state are in place.
        with left_as_found(posterior), in_precision(posterior, precision):
            yield

    @cache
    def describing(mine: DrawnFunctions) -> CapturedFunction:
        function: Callable[[batches.Inputs], tuple[Tensor, ...]] = mine.describe
        if compiled:
            function = Ways(_note_uncompiled, compiled=torch.compile(mine.describe, dynamic=False), plain=mine.describe)
        return CapturedFunction(
            function,
            mine,
            context,
            plain=not compiled,
            keeps=keeps_weights,
            half=precision == "bf16",
            count=count,
        )

    def described(x: batches.Inputs) -> tuple[Tensor, ...]:
        with batches.unchanged(x):
            return describing(portion.mine)(x)

    def seen(found: Predictive, first: int) -> Predictive:
        """Members through the lens, checked now or later."""
        maxima: list[Tensor] = []
        members = posterior.checked_members(found, lens, first=first, later=maxima)
        late.add(maxima[0], lambda values: posterior.check_diverged([values], first=first))
        return members

    def small(x: batches.Inputs) -> bool:
        """Whether all functions may run from one graph on a GPU: what they say of a batch takes little memory."""
        if device.type != "cuda" or one_at_a_time:
            return False
        return drawn.members * posterior.output_shape(x).numel() <= LITTLE

    def pieces(x: batches.Inputs) -> Iterator[Predictive]:
        """The functions that run here, all at once or one by one."""
        if compiled or drawn.particles.how == "vectorised" or small(x):
            yield seen(drawn.likelihood.predictive(*described(x)), portion.first)
            return
        found, first = portion.mine.predict_parts(x), portion.first
        while True:
            with context():
                piece = next(found, None)
            if piece is None:
                return
            yield seen(piece, first)
            first += len(piece.described()[0])

    stored = [each for each in drawn.modules() if one_at_a_time and isinstance(each, Particles)]
    ways = [particles.how for particles in stored]
    for particles in stored:
        particles.how = "loop"

    def checked(x: batches.Inputs) -> batches.Inputs:
        late.inputs(x)
        x = batches.to(x, device)
        with in_precision(posterior, precision):
            posterior.check_inputs(x)
        return x

    def kept(batch: batches.Batch) -> Predictive:
        x = checked(batch.x)
        return seen(drawn.likelihood.predictive(*portion.joined(lambda: described(x))), 0)

    def summed(batch: batches.Batch) -> Predictive:
        x = checked(batch.x)
        running, *others = portion.everyones(lambda: RunningSummary(pieces(x)))
        for other in others:
            running.merge(other)
        return running.summary()

    try:
        work = kept if keep_members else summed
        read = posterior.read(loader, anywhere=late.at_once)
        for batch, found in posterior.shared(work, read, portion, device):
            late.turn()
            yield found, cast(Tensor, batches.to(batch.y, device))
        late.finish()
    finally:
        for particles, how in zip(stored, ways, strict=True):
            particles.how = how


def _note_uncompiled(name: str, reason: str, *args: object) -> None:
    log.info("prediction runs uncompiled: this network cannot be compiled (%s)", reason)
