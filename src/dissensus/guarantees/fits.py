"""Fits of calibrations to predictions at hand: pure functions of a predictive, its targets and their weights."""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, Predictive
from dissensus.core.recalibrated import normal_scores
from dissensus.core.standing import Calibration, Lens
from dissensus.guarantees.temperature import WIDEST, best_temperature, minimise
from dissensus.metrics.calibration import confidence_bin
from dissensus.numerics.checks import one_of
from dissensus.numerics.isotonic import isotonic_knots, padded
from dissensus.standing.classes import HistogramCalibration, IsotonicCalibration, VectorScaling
from dissensus.standing.values import CumulativeCalibration, DeviationScaling

BINS = 15  # of "histogram", as of the calibration error
PIECES, ROWS_EACH = (
    20,
    20,
)  # of g, by which "isotonic" recalibrates a regression: at most so many, of at least so many rows


class Rows(NamedTuple):
    """Held-out rows: what the networks say, uncalibrated, the targets, and how often each counts."""

    predictive: Predictive
    y: Tensor  # where nothing counts, any class
    weight: Tensor  # of the shape of the log-probabilities, (N, ...), float64

    def mean(self, values: Tensor) -> Tensor:
        """() The weighted mean of values (N, ...); where nothing counts, an infinite one does not either."""
        return (self.weight * values.where(self.weight > 0, 0.0)).sum() / self.weight.sum()

    def nll(self, lens: Lens) -> float:
        """The mean negative log-likelihood of the mixture as it is seen through the lens."""
        return -float(self.mean(lens.mixture(lens.members(self.predictive)).log_prob(self.y)))


def best_lens(rows: Rows, method: str) -> Lens:
    """The temperature and calibration that the method fits to these rows. Errors name the methods there are."""
    regression = not isinstance(rows.predictive, CategoricalPredictive)
    known = OF_REGRESSIONS if regression else OF_CLASSES
    hint = f"those are for a {'regression' if regression else 'classification'}, which this posterior is"
    fit = known[one_of("method", method, known, hint=hint if method in {**OF_CLASSES, **OF_REGRESSIONS} else "")]
    return fit(rows)


def temperature(rows: Rows) -> Lens:
    """Members' logits divided by one number, or their noise's deviation multiplied by it."""
    return Lens(best_temperature(rows.predictive, rows.y, rows.weight), None)


def vector(rows: Rows) -> Lens:
    """Scale and bias of members' logits for every class, by the mixture's NLL.

    Logarithms of scales have a standard normal prior around that of the best temperature, biases one around 0: with thousands
    of rows it hardly counts, and a class without rows is not ruled out. At the temperature the prior costs nothing, so the
    mixture's NLL on these rows is at most that of the temperature.
    """
    members = cast(ClassificationPredictive, rows.predictive).members.double().clamp(min=-1e4)  # no −∞ · 0 in gradients
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
    if not found.isfinite().all() or float(objective().detach()) > before:  # no way down from the temperature
        found = torch.zeros_like(found)
    tensors = {"scale": (start + found[0]).exp(), "bias": found[1] - found[1].mean()}
    return Lens(1.0, made(VectorScaling, rows, tensors))


def isotonic(rows: Rows) -> Lens:
    """For every class the rising function of its mean probability that is nearest to its labels."""
    mean, labels, weight = one_against_rest(rows)
    at, value = padded([isotonic_knots(p, t, weight) for p, t in zip(mean, labels, strict=True)])
    return Lens(1.0, made(IsotonicCalibration, rows, {"at": at, "value": value}))


def histogram(rows: Rows) -> Lens:
    """For every class the share of its labels in bins of its mean probability."""
    mean, labels, weight = one_against_rest(rows)
    index = confidence_bin(mean, BINS)  # (C, n)
    empty = torch.zeros(len(mean), BINS, dtype=torch.float64, device=mean.device)
    hits, counts = (empty.scatter_add(1, index, each) for each in (weight * labels, weight.expand_as(labels)))
    return Lens(1.0, made(HistogramCalibration, rows, {"value": hits / counts}))  # 0/0: NaN


def scale(rows: Rows) -> Lens:
    """The factor of the predictive deviation with the smallest NLL of the mixture."""

    def seen(log_factor: float) -> Lens:
        factor = torch.tensor(math.exp(log_factor), device=rows.y.device)
        return Lens(1.0, made(DeviationScaling, rows, {"factor": factor}))

    return seen(minimise(lambda at: rows.nll(seen(at)), -math.log(WIDEST), math.log(WIDEST)))


def cumulative(rows: Rows) -> Lens:
    """g, by which Φ(g(Φ⁻¹(F(y)))) is uniform on these rows: through scores of some of them, with those of their ranks."""
    means, variances = (each.double() for each in rows.predictive.described())
    z = normal_scores(means, variances, rows.y[None])[0]  # (N, *outputs)
    outputs = z.reshape(len(z), -1).T  # (D, N)
    pieces = max(1, min(PIECES, int((rows.weight > 0).sum()) // ROWS_EACH))
    knots = [_rising(each, rows.weight, pieces) for each in outputs]  # each (2, K)
    at, value = torch.stack(knots, dim=2).reshape(2, -1, *z.shape[1:])
    return Lens(1.0, made(CumulativeCalibration, rows, {"at": at, "value": value}))


def made(kind: type[Calibration], rows: Rows, tensors: dict[str, Tensor]) -> Calibration:
    """The calibration, its tensors in the precision and on the device of the predictions."""
    like = rows.predictive.described()[0]
    facts = {"rows": int((rows.weight > 0).sum()), "weight": float(rows.weight.sum())}
    return kind(facts, {name: tensor.to(like) for name, tensor in tensors.items()})


def one_against_rest(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """((C, n) mean probability of every class, (C, n) its labels, 1 or 0 or soft, (n,) weights), over rows that count."""
    mean = rows.predictive.mean  # (N, C, ...)
    soft = rows.y.is_floating_point()
    labels = rows.y if soft else torch.zeros_like(mean).scatter(1, rows.y.long().unsqueeze(1), 1.0)
    weight = rows.weight.flatten()
    p, t = (each.movedim(1, 0).flatten(1)[:, weight > 0] for each in (mean, labels.double()))
    return p, t, weight[weight > 0]


def _rising(z: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """(2, pieces + 1) knots of g, from scores z (N,) to those of their ranks, about as many rows between any two.

    Ranks are those in the middle, (C − w/2) / Σ w, of ties together: none is 0 or 1.
    """
    points, where = torch.unique(z[weight > 0], return_inverse=True)
    mass = torch.zeros_like(points).index_add(0, where, weight[weight > 0])
    ranks = (mass.cumsum(0) - mass / 2) / mass.sum()
    wanted = torch.linspace(0, 1, pieces + 1, dtype=torch.float64, device=z.device)
    chosen = sorted(set((ranks[:, None] - wanted).abs().argmin(0).tolist()))  # the first and the last row among them
    found = [(float(points[i]), float(torch.special.ndtri(ranks[i]))) for i in chosen]
    if len(found) == 1:  # all the same: moved, not stretched
        found.append((found[0][0] + 1, found[0][1] + 1))
    while len(found) < pieces + 1:  # as many for every output: half of a piece is the same line
        widest = max(range(len(found) - 1), key=lambda i: found[i + 1][0] - found[i][0])
        (x0, y0), (x1, y1) = found[widest : widest + 2]
        found.insert(widest + 1, ((x0 + x1) / 2, (y0 + y1) / 2))
    return torch.tensor(found, dtype=torch.float64, device=z.device).T


OF_CLASSES: dict[str, Callable[[Rows], Lens]] = {
    "temperature": temperature,
    "vector": vector,
    "isotonic": isotonic,
    "histogram": histogram,
}
OF_REGRESSIONS: dict[str, Callable[[Rows], Lens]] = {
    "temperature": temperature,
    "scale": scale,
    "isotonic": cumulative,
}
