"""Prediction of one batch after the other, with one draw of functions for all: what the verbs of prediction have in common."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.calibrated import Correction
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.input_checks import check_loader
from dissensus.core.member_runner import FallbackChain
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior, check_diverged, checked_members, inference_context
from dissensus.core.predictive import Predictive
from dissensus.core.processes import connected_mesh, map_batches, partition_functions
from dissensus.core.summary import RunningSummary
from dissensus.engine.async_checks import LateChecks
from dissensus.engine.captured_prediction import CapturedFunction
from dissensus.engine.precision import PredictionPrecision, precision_context, prediction_precision, warn_of_precision

log = logging.getLogger("dissensus")

LITTLE = 2**26  # numbers
BEHIND = 16  # batches, where the user's code does not run between them


def predict_loader(
    posterior: Posterior,
    loader: Iterable[Any],
    lens: Correction,
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
    warn_of_precision(posterior, precision)
    with inference_context(posterior):
        device, drawn = posterior.device, posterior.draw()
    portion = partition_functions(posterior, drawn)
    count = batches.count_batches(loader)
    # On a mesh an error must come with its batch, so that all processes raise it.
    at_once = device.type != "cuda" or connected_mesh(posterior) is not None
    late = LateChecks(at_once=at_once, behind=BEHIND if keeps_weights else 1)

    @contextmanager
    def context() -> Iterator[None]:
        # Entered again for every part, so that between two parts the caller's modes and random state are in place.
        with inference_context(posterior), precision_context(posterior, precision):
            yield

    @cache
    def capture_describe(mine: DrawnFunctions) -> CapturedFunction:
        function: Callable[[batches.Inputs], tuple[Tensor, ...]] = mine.describe
        if compiled:
            fast = torch.compile(mine.describe, dynamic=False)
            function = FallbackChain(_note_uncompiled, compiled=fast, plain=mine.describe)
        return CapturedFunction(
            function, mine, context, plain=not compiled, keeps=keeps_weights, half=precision == "bf16", count=count
        )

    def describe_local(x: batches.Inputs) -> tuple[Tensor, ...]:
        with batches.UnchangedInputs(x):
            return capture_describe(portion.local_functions)(x)

    def correct_and_check(found: Predictive, first: int) -> Predictive:
        """Members through the lens, checked now or later."""
        maxima: list[Tensor] = []
        members = checked_members(posterior, found, lens, first=first, later=maxima)
        late.add(maxima[0], lambda values: check_diverged(posterior, values, first=first))
        return members

    def fits_one_graph(x: batches.Inputs) -> bool:
        """Whether all functions may run from one graph on a GPU: what they say of a batch takes little memory."""
        if device.type != "cuda" or one_at_a_time:
            return False
        return drawn.members * posterior.output_shape(x).numel() <= LITTLE

    def predict_pieces(x: batches.Inputs) -> Iterator[Predictive]:
        """The functions that run here, all at once or one by one."""
        if compiled or drawn.particles.how == "vectorised" or fits_one_graph(x):
            yield correct_and_check(drawn.likelihood.predictive(*describe_local(x)), portion.first_local_index)
            return
        found, first = portion.local_functions.predict_parts(x), portion.first_local_index
        while True:
            with context():
                piece = next(found, None)
            if piece is None:
                return
            yield correct_and_check(piece, first)
            first += len(piece.defining_tensors()[0])

    stored = [each for each in drawn.modules() if one_at_a_time and isinstance(each, Particles)]
    ways = [particles.how for particles in stored]
    for particles in stored:
        particles.how = "loop"

    def check_and_move(x: batches.Inputs) -> batches.Inputs:
        late.add_input_check(x)
        x = batches.move_to_device(x, device)
        with precision_context(posterior, precision):
            posterior.check_inputs(x)
        return x

    def predict_members(batch: batches.Batch) -> Predictive:
        x = check_and_move(batch.x)
        return correct_and_check(drawn.likelihood.predictive(*portion.gather_tensors(lambda: describe_local(x))), 0)

    def predict_summary(batch: batches.Batch) -> Predictive:
        x = check_and_move(batch.x)
        running, *others = portion.gather_results(lambda: RunningSummary(predict_pieces(x)))
        for other in others:
            running.merge(other)
        return running.summary()

    try:
        work = predict_members if keep_members else predict_summary
        read = posterior.read(loader, anywhere=late.at_once)
        for batch, found in map_batches(posterior, work, read, portion, device):
            late.end_batch()
            yield found, cast(Tensor, batches.move_to_device(batch.y, device))
        late.finish()
    finally:
        for particles, how in zip(stored, ways, strict=True):
            particles.how = how


def _note_uncompiled(name: str, reason: str, *args: object) -> None:
    log.info("prediction runs uncompiled: this network cannot be compiled (%s)", reason)
