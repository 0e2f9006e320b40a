"""The precision of predictions: float32, or mixed precision in bf16."""

import logging
from contextlib import AbstractContextManager
from typing import Literal

import torch

from dissensus.core.posterior import Posterior
from dissensus.engine.eager_step import autocast
from dissensus.utils.checks import one_of

log = logging.getLogger("dissensus")

PredictionPrecision = Literal["float32", "bf16"]


def prediction_precision(name: str, value: PredictionPrecision) -> PredictionPrecision:
    """The value, "float32" or "bf16"."""
    half = "16" in str(value) or "half" in str(value)
    hint = 'half precision is "bf16", because float16 overflows above 65504' if half else ""
    return one_of(name, value, ("float32", "bf16"), hint=hint)


def precision_context(posterior: Posterior, precision: PredictionPrecision) -> AbstractContextManager[object]:
    """The context in which the posterior's networks run; likelihoods compute in float32 in any case."""
    return autocast(posterior.device, torch.bfloat16 if precision == "bf16" else None)


def warn_of_precision(posterior: Posterior, precision: PredictionPrecision) -> None:
    """Warns if predictions in bf16 get corrections and guarantees that were fitted to predictions in float32."""
    fitted = [*posterior.promises, *(["a calibration"] if posterior.calibration is not None else [])]
    fitted += ["a temperature"] if float(posterior.temperature) != 1.0 else []
    if precision == "bf16" and fitted:
        what = "fitted to predictions in float32, applied to predictions in bf16, for which nothing is guaranteed"
        log.warning("%s: %s; predict in float32 where a guarantee must hold", ", ".join(fitted), what)
