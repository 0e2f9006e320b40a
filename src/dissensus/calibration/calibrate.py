"""calibrate: fits a correction of predictions to held-out rows and applies it to later predictions."""

import copy
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.calibration.calibration_fits import HeldOutRows, fit_correction
from dissensus.calibration.fit_temperature import SUSPICIOUS, WIDEST
from dissensus.calibration.value_calibrations import DeviationScaling
from dissensus.core.calibrated import Correction
from dissensus.core.input_checks import check_loader
from dissensus.core.likelihood import expand_weight
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.predictive import CategoricalPredictive
from dissensus.core.processes import complete_loader
from dissensus.data.batches import as_loader
from dissensus.metrics.calibration import confidence_ece
from dissensus.predict import predict

log = logging.getLogger("dissensus")

CalibrationMethod = Literal["temperature", "vector", "isotonic", "histogram", "scale"]
UNPLAUSIBLE = 100  # this many rows without a mistake are suspicious: the network was probably trained on them


class Calibrated(NamedTuple):
    """The result of `calibrate`: metrics before and after, on the calibration rows. New rows will improve less."""

    method: str
    rows: int  # labels that count; pixels for a segmentation
    temperature: float  # 1 if the method has none
    nll: float
    nll_before: float
    ece: float | None  # None without class indices
    ece_before: float | None


def calibrate(posterior: Posterior, loader: Iterable[Any], method: CalibrationMethod = "temperature") -> Calibrated:
    """Fits a calibration to held-out rows and stores it with the posterior; all later predictions are calibrated.

    It replaces an earlier calibration and drops promises fitted on that one (`conformal`, `selective`). Training drops the
    calibration. `predict`, `evaluate` and `predictor` apply it; `posterior(x)` and `member` do not. `save` stores it.

    Args:
        loader: held-out batches (x, y) or (x, y, weight), neither training nor test data; weights count as in training.
        method: for classification, "temperature" divides members' logits by one number, "vector" scales and shifts them per
            class, "isotonic" and "histogram" correct the mean probabilities per class; predictions are then summaries
            without members. For regression, "temperature" multiplies the noise's deviation, "scale" the predictive
            deviation, and "isotonic" corrects the cumulative distribution, which also gives a summary. The guide compares
            them.

    Returns:
        `Calibrated`: NLL and calibration error of these rows before and after.
    """
    rows = predict_held_out(posterior, loader)
    lens = fit_correction(rows, method)
    _warn_if_unfit(rows, lens, method)
    before = Correction(1.0, None)
    calibrated = Calibrated(
        method,
        int((rows.weight > 0).sum()),
        lens.temperature,
        *(rows.nll(at) for at in (lens, before)),
        *(calibration_error(rows, at) for at in (lens, before)),
    )
    posterior.recalibrate(*lens)
    return calibrated


def temperature_scale(posterior: Posterior, loader: Iterable[Any]) -> float:
    """Finds the temperature that minimises the mixture's negative log-likelihood, and stores it with the posterior.

    Short for `calibrate(posterior, loader, "temperature")`. Classification divides every member's logits by the temperature
    (Guo et al., ICML 2017); regression multiplies the noise's standard deviation by it. `predict` and `predictor` apply it;
    `posterior(x)` and `member` do not. Further training resets it to 1.

    Args:
        loader: held-out batches (x, y) or (x, y, weight), neither training nor test data; weights count as in training.

    Returns:
        The temperature, between 1/50 and 50; above 1 softens predictions, below 1 sharpens them.
    """
    return calibrate(posterior, loader, "temperature").temperature


def predict_held_out(posterior: Posterior, loader: Iterable[Any]) -> HeldOutRows:
    """Uncalibrated predictions for the loader's rows."""
    loader = complete_loader(expect_posterior(posterior), as_loader(loader, raw=posterior.inputs is not None))
    check_loader(loader)
    view = copy.copy(posterior)  # a copy: other threads may use the calibrated posterior meanwhile
    view._buffers = {**posterior._buffers, "temperature": torch.ones_like(posterior.temperature)}
    view._modules = {**posterior._modules, "calibration": None, "promises": torch.nn.ModuleDict()}
    weights: list[Tensor | None] = []
    predictive, y = predict(view, _check_batches(view, loader, weights))
    counted = posterior.likelihood.target_mask(y)
    y = y if counted is None else torch.where(counted, y, 0)
    like = predictive.log_prob(y)
    given = _concatenate_weights(weights, y)
    weight = torch.ones_like(like, dtype=torch.float64) if given is None else expand_weight(given, like).double()
    if counted is not None:  # an ignored label is an example of weight 0
        weight = weight * counted
    if not weight.any():
        raise ValueError("expected an example that counts, got none; pass labels that are not ignored, or weights")
    return HeldOutRows(predictive, y, weight)


def calibration_error(rows: HeldOutRows, lens: Correction) -> float | None:
    """The weighted expected calibration error; None for soft labels and regressions."""
    seen = lens.correct_mixture(lens.correct_members(rows.predictive))
    if not isinstance(seen, CategoricalPredictive) or rows.y.is_floating_point():
        return None
    confidence, prediction = seen.mean.max(1)
    kept = rows.weight > 0
    return float(confidence_ece(confidence[kept], (prediction == rows.y)[kept], weights=rows.weight[kept]))


def _warn_if_unfit(rows: HeldOutRows, lens: Correction, method: str) -> None:
    """Warns if these rows look unfit for calibration."""
    if method == "temperature" and lens.temperature < 0.99 * SUSPICIOUS:
        log.warning(
            "the temperature %.3g makes predictions more than twice as confident; was the network trained on these data? Pass "
            "held-out rows, and more of them if all are predicted right: these make any low temperature look good. If the "
            "rows were held out, members are not confident enough (for a regression: is its noise set too high?)",
            lens.temperature,
        )
    widest = float(lens.calibration.factor) if isinstance(lens.calibration, DeviationScaling) else lens.temperature
    if widest > 0.99 * WIDEST:
        log.warning("the %s %.3g is the highest one tried: is the posterior trained?", method, widest)
    predictive = rows.predictive
    if method == "temperature" or not isinstance(predictive, CategoricalPredictive) or rows.y.is_floating_point():
        return
    kept, classes = rows.weight > 0, predictive.mean.shape[1]
    if missing := (torch.bincount(rows.y[kept].long(), minlength=classes) == 0).nonzero()[:, 0].tolist():
        log.warning(
            "class %s has no calibration row%s: %s makes it very unlikely; pass rows of every class, or use a temperature",
            ", ".join(map(str, missing[:10])), "" if len(missing) == 1 else f" ({len(missing)} classes in all)", method,
        )  # fmt: skip
    if int(kept.sum()) >= UNPLAUSIBLE and bool((predictive.mean.argmax(1) == rows.y)[kept].all()):
        hint = "was the network trained on them? Pass held-out rows: a calibration needs some mistakes"
        log.warning("all %d calibration rows are predicted right; %s", int(kept.sum()), hint)


def _check_batches(posterior: Posterior, loader: Iterable[Any], weights: list[Tensor | None]) -> Iterator[Any]:
    """Yields the loader's batches after checking that targets fit the outputs; appends their weights to the list."""
    for batch in posterior.read(loader, anywhere=True):
        posterior.check_batch(batch)
        weights.append(batch.weight)
        yield batch


def _concatenate_weights(weights: list[Tensor | None], y: Tensor) -> Tensor | None:
    """The weights of all batches in one tensor; None if there are none."""
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        raise ValueError("expected weights in every batch or in none, got some without; pass weight 1 for the others")
    return torch.cat(given).to(y.device)
