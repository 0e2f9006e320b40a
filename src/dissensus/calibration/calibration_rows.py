"""Calibration rows: held-out rows that promises are fitted on, predicted batch by batch with the functions used later."""

from collections import deque
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.input_checks import check_loader
from dissensus.core.posterior import Posterior, expect_posterior, inference_context
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.core.processes import complete_loader
from dissensus.data.batches import as_loader
from dissensus.numerics.randomness import RandomnessDetector
from dissensus.predict import predict_batches


class CalibrationRows(NamedTuple):
    """The rows of one batch that count: without ignored labels and rows of weight 0."""

    predictive: Predictive
    x: Inputs
    y: Tensor  # (B,) classes or (B, ...) values
    weight: Tensor  # (B,) float64


def calibration_rows(
    posterior: Posterior, loader: Iterable[Any], *, labelled: bool = True
) -> Iterator[CalibrationRows]:
    """Yields the CalibrationRows of each batch; `labelled`: whether y is read."""
    loader = complete_loader(expect_posterior(posterior), as_loader(loader, raw=posterior.inputs is not None))
    check_loader(loader)
    with inference_context(posterior), RandomnessDetector() as watch:
        posterior.draw()
    if watch.has_drawn:
        got = f"{type(posterior).__name__}, which draws new ones for each prediction"
        raise ValueError(f"expected fixed functions, got {got}; call ds.refresh(posterior, training_loader) first")
    waiting: deque[Batch] = deque()

    def check_batches() -> Iterator[Batch]:
        for batch in posterior.read(loader, anywhere=True):
            if labelled:
                posterior.check_batch(batch)
            waiting.append(batch)
            yield batch

    for predictive, y in predict_batches(posterior, check_batches()):
        batch = waiting.popleft()
        if isinstance(predictive, CategoricalPredictive):
            check_exchangeable(predictive, y if labelled else None)
        weight = torch.ones(len(y)) if batch.weight is None else batch.weight
        if weight.shape != (len(y),):
            raise ValueError(f"expected weights of shape ({len(y)},), got {tuple(weight.shape)}; reshape them")
        weight = weight.to(y.device, torch.float64)
        counted = posterior.likelihood.target_mask(y) if labelled else None
        keep = weight > 0 if counted is None else (weight > 0) & counted
        x = batches.map_tensors(batches.move_to_device(batch.x, y.device), itemgetter(keep))
        yield CalibrationRows(predictive[keep], x, y[keep], weight[keep])


def check_exchangeable(predictive: CategoricalPredictive, y: Tensor | None) -> None:
    """Raises unless each row has one label: promises count rows, and rows must be exchangeable."""
    if predictive.log_mean.ndim > 2:
        hint = "pixels or steps of one input are not exchangeable: use one label per input"
        raise ValueError(f"expected one label per row, got outputs {tuple(predictive.log_mean.shape)}; {hint}")
    if y is not None and y.is_floating_point():
        raise ValueError("expected class indices, got soft labels; pass y.argmax(1)")


def check_name(name: str) -> None:
    """Raises unless the name can be a key in `posterior.promises`, a ModuleDict."""
    if not name or "." in name or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"expected a name without dots that is no attribute of a module, got {name!r}; pass another")
