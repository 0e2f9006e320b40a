"""Prediction over whole loaders: members kept, summarised, or batch by batch; one draw for all of it."""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.errors import Diverged
from dissensus.core.inputs import check_loader
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior, left_as_found
from dissensus.core.predictive import Predictive
from dissensus.core.running import Ways
from dissensus.core.summary import RunningSummary, SummaryPredictive
from dissensus.engine.captured_function import CapturedFunction
from dissensus.engine.eager import autocast
from dissensus.engine.memory import readable
from dissensus.numerics.checks import one_of

log = logging.getLogger("dissensus")

PredictionPrecision = Literal["float32", "bf16"]


def predict(
    posterior: Posterior, loader: Iterable[Any], *, precision: PredictionPrecision = "float32", compiled: bool = False
) -> tuple[Predictive, Tensor]:
    """(predictive of all inputs with every member kept, targets) over a loader of (x, y).

    One draw of functions predicts all batches, in eval mode and without gradients. Memory grows with M times the number
    of inputs N: see `summarise` and `predict_batches` for less.

    Args:
        loader: batches (x, y) or (x, y, weight); weights are not read.
        precision: "bf16" runs the network in mixed precision.
        compiled: compiles the drawn functions first (torch.compile); falls back where a network cannot be compiled.

    Returns:
        A `Predictive` of N inputs and the targets (N, ...), both on the posterior's device, in the loader's order.

    Raises:
        Diverged: a member predicts NaN.
    """
    parts: list[Predictive] = []
    targets: list[Tensor] = []
    for predictive, y in predict_batches(posterior, loader, precision=precision, compiled=compiled):
        if not parts:
            _state_memory(predictive, loader, keep_members=True)
        parts.append(predictive)
        targets.append(y)
    return Predictive.cat(parts), torch.cat(targets)


def summarise(
    posterior: Posterior | str | os.PathLike[str],
    loader: Iterable[Any],
    *,
    precision: PredictionPrecision = "float32",
    compiled: bool = False,
    network: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> tuple[SummaryPredictive, Tensor]:
    """(summary of all inputs, targets): mean, aleatoric and epistemic, whose size does not depend on M.

    Members that run in a loop are added one at a time; vectorised ones a batch at a time.

    Args:
        posterior: a posterior, or a folder that `save` wrote: members are then read from disk and run one at a time,
            and the loader must give the same batches in the same order each time.
        loader: batches (x, y) or (x, y, weight); weights are not read.
        precision, compiled: as in `predict`; a folder is never compiled.
        network, likelihood, method: as in `load`; read only with a folder.

    Returns:
        A `SummaryPredictive` of N inputs and the targets (N, ...), in the loader's order.
    """
    if not isinstance(posterior, Posterior):
        from dissensus.storage.members import read_members  # with all methods, which `import dissensus` leaves out

        members = read_members(Path(posterior), network, likelihood=likelihood, method=method)
        return _summarise_stored(members, loader, precision)
    parts: list[SummaryPredictive] = []
    targets: list[Tensor] = []
    for pieces, y in _predicted_in_parts(posterior, loader, precision=precision, compiled=compiled):
        running = RunningSummary()
        for predictive in pieces:
            if not parts and not running.count:
                _state_memory(predictive, loader, keep_members=False)
            running.add(predictive)
        parts.append(running.summary())
        targets.append(y)
    return SummaryPredictive.cat(parts), torch.cat(targets)


def predict_batches(
    posterior: Posterior, loader: Iterable[Any], *, precision: PredictionPrecision = "float32", compiled: bool = False
) -> Iterator[tuple[Predictive, Tensor]]:
    """(predictive, targets) of one batch after the other: nothing is kept, so data may be larger than memory.

    Arguments as in `predict`. One draw for all batches; between two of them modes and random streams are as the caller
    left them.

    Yields:
        A `Predictive` of the batch's B inputs with every member, and its targets (B, ...).
    """
    for parts, y in _predicted_in_parts(posterior, loader, precision=precision, compiled=compiled, whole=True):
        (predictive,) = parts
        yield predictive, y


def _predicted_in_parts(
    posterior: Posterior, loader: Iterable[Any], *, precision: PredictionPrecision, compiled: bool, whole: bool = False
) -> Iterator[tuple[Iterator[Predictive], Tensor]]:
    """(predictives of a few members each, targets) of one batch after the other; one part where the whole is wanted."""
    one_of("precision", precision, ("float32", "bf16"))
    check_loader(loader)
    dtype = torch.bfloat16 if precision == "bf16" else None
    with left_as_found(posterior):
        device, drawn = posterior.device, posterior.draw()

    @contextmanager
    def context() -> Iterator[None]:
        # Entered anew for every piece: between two of them the caller has the world as it was.
        with left_as_found(posterior), autocast(device, dtype):
            yield

    function: Callable[[batches.Inputs], tuple[Tensor, ...]] = drawn.describe
    if compiled:
        function = Ways(_note_uncompiled, compiled=torch.compile(drawn.describe, dynamic=False), plain=drawn.describe)
    describe = CapturedFunction(function, drawn, context, lanes=not compiled)

    def at_once(x: batches.Inputs) -> Iterator[Predictive]:
        with batches.unchanged(x):
            described = describe(x)
        yield posterior.checked(drawn.likelihood.predictive(*described))

    def one_by_one(x: batches.Inputs) -> Iterator[Predictive]:
        pieces, seen = drawn.predict_parts(x), 0
        while True:
            with context():
                piece = next(pieces, None)
            if piece is None:
                return
            yield posterior.checked(piece, first=seen)
            seen += len(piece.described()[0])

    parts = at_once if whole or compiled or drawn.particles.how == "vectorised" else one_by_one
    for batch in batches.each(loader, anywhere=True):
        x, y, _ = batch.to(device)
        with autocast(device, dtype):
            posterior.check_inputs(x)
        yield parts(x), y


def _note_uncompiled(name: str, reason: str, *args: object) -> None:
    log.info("prediction runs uncompiled: this network cannot be compiled (%s)", reason)


def _summarise_stored(
    members: Iterable[Posterior], loader: Iterable[Any], precision: PredictionPrecision
) -> tuple[SummaryPredictive, Tensor]:
    running: list[RunningSummary] = []
    targets: list[Tensor] = []
    for number, member in enumerate(members):
        seen = 0
        try:
            for predictive, y in predict_batches(member, loader, precision=precision):
                if number == 0:
                    running.append(RunningSummary())
                    targets.append(y)
                if seen == len(targets) or not torch.equal(y, targets[seen]):
                    seen = -1
                    break
                running[seen].add(predictive)
                seen += 1
        except Diverged as error:  # with the number that the member has among all
            raise Diverged([number + i for i in error.members], error.step, error.what) from None
        if seen != len(targets):  # other batches, or none: a generator that the first member has used up
            raise ValueError(
                "expected the same batches for every member, got others; use a loader that does not shuffle and can be read "
                "again"
            )
    return SummaryPredictive.cat([each.summary() for each in running]), torch.cat(targets)


def _state_memory(predictive: Predictive, loader: Iterable[Any], *, keep_members: bool) -> None:
    """Logs how many bytes the result will have, with all members or only mean, aleatoric and epistemic."""
    described = predictive.described()
    members, inputs = described[0].shape[:2]
    outputs = sum(math.prod(tensor.shape[2:]) for tensor in described)
    if (count := batches.length(loader)) is not None:
        numbers = inputs * count * (members * outputs if keep_members else outputs + 2)
        size = readable(numbers * described[0].element_size())
        log.info("the prediction of about %d inputs will take %s", inputs * count, size)
