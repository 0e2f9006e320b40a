"""Calibration rows: held-out rows that promises are fitted on, predicted batch by batch by the functions that will be used."""

from collections import deque
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.inputs import check_loader
from dissensus.core.posterior import Posterior, expect_posterior, left_as_found
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.data.batches import as_loader
from dissensus.numerics.randomness import Watch
from dissensus.predict import predict_batches


class CalibrationRows(NamedTuple):
    """Rows of one batch that count: labels that are ignored and rows of weight 0 are left out."""

    predictive: Predictive
    x: Inputs
    y: Tensor  # (B,) classes or (B, ...) values
    weight: Tensor  # (B,) float64


def calibration_rows(
    posterior: Posterior, loader: Iterable[Any], *, labelled: bool = True
) -> Iterator[CalibrationRows]:
    """CalibrationRows of one batch after the other; `labelled`: whether y is read."""
    loader = expect_posterior(posterior).whole(as_loader(loader, raw=posterior.inputs is not None))
    check_loader(loader)
    with left_as_found(posterior), Watch() as watch:
        posterior.draw()
    if watch.drew:
        raise ValueError(
            f"expected functions that stay the same, got {type(posterior).__name__}, which draws new ones for each prediction: "
            "a promise holds for the functions it was fitted on; call ds.refresh(posterior, training_loader) first"
        )
    waiting: deque[Batch] = deque()

    def checked() -> Iterator[Batch]:
        for batch in posterior.read(loader, anywhere=True):
            if labelled:
                posterior.check_batch(batch)
            waiting.append(batch)
            yield batch

    for predictive, y in predict_batches(posterior, checked()):
        batch = waiting.popleft()
        if isinstance(predictive, CategoricalPredictive):
            check_exchangeable(predictive, y if labelled else None)
        weight = torch.ones(len(y)) if batch.weight is None else batch.weight
        if weight.shape != (len(y),):
            raise ValueError(f"expected one weight per row, ({len(y)},), got {tuple(weight.shape)}; pass such weights")
        weight = weight.to(y.device, torch.float64)
        counted = posterior.likelihood.counted(y) if labelled else None
        keep = weight > 0 if counted is None else (weight > 0) & counted
        x = batches.apply(batches.to(batch.x, y.device), itemgetter(keep))
        yield CalibrationRows(predictive[keep], x, y[keep], weight[keep])


def check_exchangeable(predictive: CategoricalPredictive, y: Tensor | None) -> None:
    """Raises where a row is not one label: a promise counts rows, and rows must be alike but for chance."""
    if predictive.log_mean.ndim > 2:
        raise ValueError(
            f"expected one label per row, got outputs {tuple(predictive.log_mean.shape)}: pixels or steps of one input are "
            "not exchangeable, so nothing can be promised of them by counting; calibrate one number per input instead"
        )
    if y is not None and y.is_floating_point():
        raise ValueError("expected class indices, got soft labels: a set holds a label or does not; pass y.argmax(1)")
