"""calibrate: fits a correction of predictions to held-out rows and applies it to later predictions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from dissensus.calibration import calibrations
from dissensus.core.calibrated import Calibration, Correction
from dissensus.core.likelihood import expand_weight
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, Predictive
from dissensus.engine.loader import Loader
from dissensus.engine.prediction_loop import predict_loader
from dissensus.likelihoods.tokens import Tokens, token_rows
from dissensus.metrics.classification import confidence_bin, confidence_ece
from dissensus.numerics.isotonic import isotonic_knots, pad_knots
from dissensus.utils.checks import one_of, suggest_keywords
from dissensus.utils.torch_private import copy_with

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


@suggest_keywords
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
    """
    if isinstance(expect_posterior(posterior).likelihood, Tokens):
        one_of("method", method, ("temperature",), hint="tokens have this one")
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
    data = Loader.complete(loader, expect_posterior(posterior))
    # a copy: other threads may use the calibrated posterior meanwhile
    unscaled = {"temperature": torch.ones_like(posterior.temperature)}
    view = copy_with(posterior, unscaled, {"calibration": None, "promises": torch.nn.ModuleDict()})
    found = [token_rows(part, *batch[1:]) for batch, part in predict_loader(view, data, labelled=True)]
    parts, targets, weights = ([*map(itemgetter(i), found)] for i in range(3))
    predictive, y = Predictive.cat(parts), torch.cat(targets)
    counted = posterior.likelihood.target_mask(y)
    y = y if counted is None else torch.where(counted, y, 0)
    given = [weight for weight in weights if weight is not None]
    if 0 < len(given) < len(weights):
        raise ValueError("expected weights in every batch or in none, got some without; pass weight 1 for the others")
    every = torch.cat(given).to(y.device) if given else None
    weight = expand_weight(every, predictive.log_prob(y), counted).double()
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
    scaled = isinstance(lens.calibration, calibrations.DeviationScaling)
    widest = float(lens.calibration.factor) if scaled else lens.temperature  # type: ignore[union-attr, arg-type]
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


BINS = 15  # of "histogram"; the calibration error uses as many
# Pieces of g in a regression's "isotonic": the most, and the fewest rows of each.
PIECES, ROWS_EACH = 20, 20


class HeldOutRows(NamedTuple):
    """Held-out rows: uncalibrated predictions, targets and example weights."""

    predictive: Predictive
    y: Tensor  # any class where the weight is 0
    weight: Tensor  # of the shape of the log-probabilities, (N, ...), float64

    def mean(self, values: Tensor) -> Tensor:
        """() Weighted mean of values (N, ...); values of weight 0 may be infinite."""
        return (self.weight * values.where(self.weight > 0, 0.0)).sum() / self.weight.sum()

    def nll(self, lens: Correction) -> float:
        """The mean negative log-likelihood of the mixture under this temperature and calibration."""
        return -float(self.mean(lens.correct_mixture(lens.correct_members(self.predictive)).log_prob(self.y)))


def fit_correction(rows: HeldOutRows, method: str) -> Correction:
    """The temperature and calibration that a method fits to these rows. Errors list the methods."""
    known = {"classification": OF_CLASSES, "multilabel": OF_LABELS}.get(rows.predictive.kind, OF_REGRESSIONS)
    hint = f"this posterior is a {rows.predictive.kind}"
    fit = known[one_of("method", method, known, hint=hint if method in {**OF_CLASSES, **OF_REGRESSIONS} else "")]
    return fit(rows)


def fit_temperature(rows: HeldOutRows) -> Correction:
    """Divides members' logits by one number, or multiplies their noise's deviation by it."""
    return Correction(best_temperature(rows.predictive, rows.y, rows.weight), None)


def fit_vector(rows: HeldOutRows) -> Correction:
    """Scale and bias of members' logits for every class, found by minimising the mixture's NLL.

    Log-scales have a standard normal prior centred at the best temperature, biases one centred at 0. With thousands of rows
    the prior hardly matters, and a class without rows stays possible. The prior's penalty is zero at the temperature, so the
    mixture's NLL on these rows is at most that of temperature scaling.
    """
    # no −∞ · 0 in gradients
    members = cast(ClassificationPredictive, rows.predictive).log_probs.double().clamp(min=-1e4)
    start = -math.log(best_temperature(rows.predictive, rows.y, rows.weight))
    shape = (-1, *[1] * (members.ndim - 3))
    moved = torch.zeros(2, members.shape[2], dtype=torch.float64, device=members.device, requires_grad=True)

    def objective() -> Tensor:
        scale, bias = (start + moved[0]).exp().reshape(shape), moved[1].reshape(shape)
        seen = ClassificationPredictive((scale * members + bias).log_softmax(2))
        return -rows.mean(seen.log_prob(rows.y)) + 0.5 * moved.square().sum() / rows.weight.sum()

    with torch.enable_grad():
        before = float(objective().detach())
        optimizer = torch.optim.LBFGS(
            [moved], max_iter=300, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = objective()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = moved.detach()
    if not found.isfinite().all() or float(objective().detach()) > before:  # no improvement over the temperature
        found = torch.zeros_like(found)
    tensors = {"scale": (start + found[0]).exp(), "bias": found[1] - found[1].mean()}
    return Correction(1.0, make_calibration(calibrations.VectorScaling, rows, tensors))


def fit_isotonic(rows: HeldOutRows) -> Correction:
    """For every class, isotonic regression of its labels on its mean probability."""
    mean, labels, weight = one_against_rest(rows)
    at, value = pad_knots([isotonic_knots(p, t, weight) for p, t in zip(mean, labels, strict=True)])
    return Correction(1.0, make_calibration(calibrations.IsotonicCalibration, rows, {"at": at, "value": value}))


def fit_histogram(rows: HeldOutRows) -> Correction:
    """For every class, the share of its labels in each bin of its mean probability."""
    mean, labels, weight = one_against_rest(rows)
    index = confidence_bin(mean, BINS)  # (C, n)
    empty = torch.zeros(len(mean), BINS, dtype=torch.float64, device=mean.device)
    hits, counts = (empty.scatter_add(1, index, each) for each in (weight * labels, weight.expand_as(labels)))
    value = {"value": hits / counts}  # 0/0: NaN
    return Correction(1.0, make_calibration(calibrations.HistogramCalibration, rows, value))


def fit_scale(rows: HeldOutRows) -> Correction:
    """The factor of the predictive deviation that minimises the mixture's NLL, computed in float64 for a precise minimum."""
    wide = rows._replace(predictive=rows.predictive.to(torch.float64))

    def scaling_by(rows: HeldOutRows, log_factor: float) -> Correction:
        factor = torch.tensor(math.exp(log_factor), dtype=torch.float64)
        return Correction(1.0, make_calibration(calibrations.DeviationScaling, rows, {"factor": factor}))

    return scaling_by(rows, minimise(lambda at: wide.nll(scaling_by(wide, at)), -math.log(WIDEST), math.log(WIDEST)))


def fit_cumulative(rows: HeldOutRows) -> Correction:
    """A rising, piecewise linear g that makes Φ(g(Φ⁻¹(F(y)))) uniform on these rows."""
    means, variances = (each.double() for each in rows.predictive.defining_tensors())
    z = calibrations.normal_scores(means, variances, rows.y[None])[0]  # (N, *outputs)
    outputs = z.reshape(len(z), -1).T  # (D, N)
    pieces = max(1, min(PIECES, int((rows.weight > 0).sum()) // ROWS_EACH))
    knots = [_rising_knots(each, rows.weight, pieces) for each in outputs]  # each (2, K)
    at, value = torch.stack(knots, dim=2).reshape(2, -1, *z.shape[1:])
    return Correction(1.0, make_calibration(calibrations.CumulativeCalibration, rows, {"at": at, "value": value}))


def make_calibration(kind: type[Calibration], rows: HeldOutRows, tensors: dict[str, Tensor]) -> Calibration:
    """Builds the calibration, with tensors in the precision and on the device of the predictions."""
    like = rows.predictive.defining_tensors()[0]
    facts = {"rows": int((rows.weight > 0).sum()), "weight": float(rows.weight.sum())}
    return kind(facts, {name: tensor.to(like) for name, tensor in tensors.items()})


def one_against_rest(rows: HeldOutRows) -> tuple[Tensor, Tensor, Tensor]:
    """(mean probabilities (C, n), labels (C, n) as 1, 0 or soft, weights (n,)) of the rows that count."""
    mean = rows.predictive.mean  # (N, C, ...)
    soft = rows.y.is_floating_point()
    labels = rows.y if soft else torch.zeros_like(mean).scatter(1, rows.y.long().unsqueeze(1), 1.0)
    weight = rows.weight.flatten()
    p, t = (each.movedim(1, 0).flatten(1)[:, weight > 0] for each in (mean, labels.double()))
    return p, t, weight[weight > 0]


def _rising_knots(z: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """(2, pieces + 1) knots of g, from scores z (N,) to normal scores of their ranks, with equally many rows between knots."""
    points, where = torch.unique(z[weight > 0], return_inverse=True)
    mass = torch.zeros_like(points).index_add(0, where, weight[weight > 0])
    ranks = (mass.cumsum(0) - mass / 2) / mass.sum()  # mid-ranks, never 0 or 1; ties share one
    wanted = torch.linspace(0, 1, pieces + 1, dtype=torch.float64, device=z.device)
    chosen = sorted(set((ranks[:, None] - wanted).abs().argmin(0).tolist()))  # includes the first and the last row
    found = [(float(points[i]), float(torch.special.ndtri(ranks[i]))) for i in chosen]
    if len(found) == 1:  # all scores are equal: a shift without a scale
        found.append((found[0][0] + 1, found[0][1] + 1))
    while len(found) < pieces + 1:  # equally many for every output: splitting a piece keeps the line
        widest = max(range(len(found) - 1), key=lambda i: found[i + 1][0] - found[i][0])
        (x0, y0), (x1, y1) = found[widest : widest + 2]
        found.insert(widest + 1, ((x0 + x1) / 2, (y0 + y1) / 2))
    return torch.tensor(found, dtype=torch.float64, device=z.device).T


Fit = Callable[[HeldOutRows], Correction]
OF_CLASSES: dict[str, Fit] = {"temperature": fit_temperature, "vector": fit_vector, "isotonic": fit_isotonic}
OF_CLASSES |= {"histogram": fit_histogram}
OF_LABELS: dict[str, Fit] = {"temperature": fit_temperature}
OF_REGRESSIONS: dict[str, Fit] = {"temperature": fit_temperature, "scale": fit_scale, "isotonic": fit_cumulative}


WIDEST = 50.0  # temperatures from 1/50 to 50 are tried
NUMBERS = 2**22  # of predictions held in float64 at once
SUSPICIOUS = 0.5  # a lower one makes members more than twice as confident, which held-out data hardly ever need


def best_temperature(predictive: Predictive, y: Tensor, weight: Tensor | None = None, *, warn: bool = True) -> float:
    """The temperature that minimises the negative log-likelihood of targets y, computed in float64 for a precise minimum.

    `weight`: example weights, (N,) or of the shape of the log-probabilities. `warn`: whether to log an ambiguous choice.
    """
    rows = max(1, NUMBERS // max(1, predictive.defining_tensors()[0][:, :1].numel()))  # converted at once
    parts = [slice(start, start + rows) for start in range(0, len(predictive), rows)]

    def losses(at: float) -> Tensor:
        tempered = (predictive[part].to(torch.float64).apply_temperature(math.exp(at)) for part in parts)
        return -torch.cat([each.log_prob(y[part]) for each, part in zip(tempered, parts, strict=True)])

    like = losses(0.0)
    each = None if weight is None else expand_weight(weight.to(like.device), like)

    def mean(values: Tensor) -> float:
        # An infinite loss of weight 0 does not count.
        return float(values.mean() if each is None else (each * values.where(each > 0, 0.0)).sum() / each.sum())

    best = minimise(lambda at: mean(losses(at)), -math.log(WIDEST), math.log(WIDEST))
    if best >= math.log(SUSPICIOUS):
        return math.exp(best)
    # Uncertain members (Laplace by rows) become a vote when sharpened further and further. The vote's NLL hardly changes on
    # these rows, and is unbounded on rows whose label gets no vote. So implausible sharpening must improve the NLL clearly: of
    # the temperatures within one standard error of the smallest NLL, the highest is taken (Breiman et al. 1984), if they span
    # a factor of two.
    least = losses(best)
    variance = mean((least - mean(least)).square()) / float(least.numel() if each is None else each.sum())
    limit = mean(least) + math.sqrt(variance)
    highest = minimise(lambda at: abs(mean(losses(at)) - limit), best, math.log(SUSPICIOUS))  # the NLL rises on the way
    if highest - best < math.log(2):
        return math.exp(best)
    hint = "Pass more held-out examples to choose (members that are far too uncertain favour ever lower ones)"
    text = "temperatures from %.3g to %.3g are equally good within one standard error; the highest is used. %s"
    log.log(logging.WARNING if warn else logging.DEBUG, text, math.exp(best), math.exp(highest), hint)
    return math.exp(highest)


def minimise(function: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-5) -> float:
    """The minimiser of a function of one number: a coarse grid, then golden sections around its best point."""
    grid = [low + (high - low) * i / 24 for i in range(25)]
    best = min(range(25), key=lambda i: function(grid[i]))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, 24)]
    ratio = (math.sqrt(5) - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = function(c), function(d)
    while b - a > tolerance:
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = function(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = function(d)
    return (a + b) / 2
