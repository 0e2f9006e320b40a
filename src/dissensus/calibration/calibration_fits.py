"""Fits calibrations to given predictions: pure functions of a predictive, its targets and their weights."""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dissensus.calibration.class_calibrations import HistogramCalibration, IsotonicCalibration, VectorScaling
from dissensus.calibration.fit_temperature import WIDEST, best_temperature, minimise
from dissensus.calibration.value_calibrations import CumulativeCalibration, DeviationScaling, normal_scores
from dissensus.core.calibrated import Calibration, Correction
from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, Predictive
from dissensus.metrics.calibration import confidence_bin
from dissensus.numerics.isotonic import isotonic_knots, pad_knots
from dissensus.utils.checks import one_of

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
    regression = not isinstance(rows.predictive, CategoricalPredictive)
    known = OF_REGRESSIONS if regression else OF_CLASSES
    hint = f"this posterior is a {'regression' if regression else 'classification'}"
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
    members = (
        cast(ClassificationPredictive, rows.predictive).log_probs.double().clamp(min=-1e4)
    )  # no −∞ · 0 in gradients
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
    return Correction(1.0, make_calibration(VectorScaling, rows, tensors))


def fit_isotonic(rows: HeldOutRows) -> Correction:
    """For every class, isotonic regression of its labels on its mean probability."""
    mean, labels, weight = one_against_rest(rows)
    at, value = pad_knots([isotonic_knots(p, t, weight) for p, t in zip(mean, labels, strict=True)])
    return Correction(1.0, make_calibration(IsotonicCalibration, rows, {"at": at, "value": value}))


def fit_histogram(rows: HeldOutRows) -> Correction:
    """For every class, the share of its labels in each bin of its mean probability."""
    mean, labels, weight = one_against_rest(rows)
    index = confidence_bin(mean, BINS)  # (C, n)
    empty = torch.zeros(len(mean), BINS, dtype=torch.float64, device=mean.device)
    hits, counts = (empty.scatter_add(1, index, each) for each in (weight * labels, weight.expand_as(labels)))
    return Correction(1.0, make_calibration(HistogramCalibration, rows, {"value": hits / counts}))  # 0/0: NaN


def fit_scale(rows: HeldOutRows) -> Correction:
    """The factor of the predictive deviation that minimises the mixture's NLL, computed in float64 for a precise minimum."""
    wide = rows._replace(predictive=rows.predictive.to(torch.float64))

    def scaling_by(rows: HeldOutRows, log_factor: float) -> Correction:
        factor = torch.tensor(math.exp(log_factor), dtype=torch.float64)
        return Correction(1.0, make_calibration(DeviationScaling, rows, {"factor": factor}))

    return scaling_by(rows, minimise(lambda at: wide.nll(scaling_by(wide, at)), -math.log(WIDEST), math.log(WIDEST)))


def fit_cumulative(rows: HeldOutRows) -> Correction:
    """A rising, piecewise linear g that makes Φ(g(Φ⁻¹(F(y)))) uniform on these rows."""
    means, variances = (each.double() for each in rows.predictive.defining_tensors())
    z = normal_scores(means, variances, rows.y[None])[0]  # (N, *outputs)
    outputs = z.reshape(len(z), -1).T  # (D, N)
    pieces = max(1, min(PIECES, int((rows.weight > 0).sum()) // ROWS_EACH))
    knots = [_rising_knots(each, rows.weight, pieces) for each in outputs]  # each (2, K)
    at, value = torch.stack(knots, dim=2).reshape(2, -1, *z.shape[1:])
    return Correction(1.0, make_calibration(CumulativeCalibration, rows, {"at": at, "value": value}))


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
    """(2, pieces + 1) knots of g, from scores z (N,) to normal scores of their ranks, with equally many rows between knots.

    Ranks are mid-ranks (C − w/2) / Σ w with the cumulative weight C; ties share one. They are never 0 or 1.
    """
    points, where = torch.unique(z[weight > 0], return_inverse=True)
    mass = torch.zeros_like(points).index_add(0, where, weight[weight > 0])
    ranks = (mass.cumsum(0) - mass / 2) / mass.sum()
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
OF_CLASSES["histogram"] = fit_histogram
OF_REGRESSIONS: dict[str, Fit] = {"temperature": fit_temperature, "scale": fit_scale, "isotonic": fit_cumulative}
