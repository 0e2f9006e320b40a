"""selective and ood_gate: gates that accept predictions by a threshold on their uncertainty, with a guaranteed error rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.calibration.conformal import (
    FORMER_SCORES,
    SAME,
    CalibrationRows,
    add_tolerance,
    calibration_rows,
    check_name,
    choose_score,
    least_rows,
    sort_with_mass,
    uncertainties,
    weighted_quantile,
)
from dissensus.core.batch import Inputs
from dissensus.core.calibrated import Guarantee
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.utils.checks import fraction, number

log = logging.getLogger("dissensus")

GateScore = Literal["max_probability", "total", "epistemic"]


def selective(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    risk: float = 0.01,
    confidence: float = 0.95,
    score: GateScore | None = None,
    tolerance: float | None = None,
    ordered: bool = True,
    name: str = "selective",
) -> Gate:
    """Fits a gate that accepts as many inputs as possible while at most a share `risk` of them is predicted wrong.

    P(error rate of accepted inputs ≤ risk) ≥ confidence, over draws of the calibration rows, for new rows from the same
    distribution. Uses exact binomial tests in a fixed sequence (Learn-then-Test), starting at the strictest threshold that
    can pass: ⌈ln(1 − confidence) / ln(1 − risk)⌉ accepted rows, 299 for 1 % at 95 %. If no threshold passes, the gate accepts
    nothing and a warning states the risk these rows support. The gate is stored with the posterior, under `promises[name]`.

    Args:
        loader: held-out batches (x, y) that were not used for training, tuning or calibration. Ignored labels and rows of
            weight 0 do not count; other weights are refused.
        risk: largest error rate among accepted inputs, between 0 and 1.
        confidence: probability that the promise holds, between 0 and 1.
        score: the score to threshold: "max_probability" (None), "total" or "epistemic"; a regression has the last two.
        tolerance: for a regression: an output off by more than this counts as an error.
        ordered: assumes that the error rate rises with the score, so that it crosses `risk` once. False assumes nothing,
            and accepts somewhat fewer inputs.
        name: key in `posterior.promises`.

    Raises:
        ValueError: fewer rows than any promise needs; the message says how many.
    """
    check_name(name)
    fraction("risk", risk, hint="pass for example 0.01")
    fraction("confidence", confidence, hint="pass for example 0.95")
    delta, least = 1 - confidence, errorless_rows(risk, 1 - confidence)
    found: list[tuple[Tensor, Tensor]] = []
    for rows in _equally_weighted_rows(posterior, loader):
        known, uncertainty = _named_score(rows.predictive, score)
        found.append((uncertainty, _row_errors(rows, tolerance).cpu()))
    if (n := sum(len(each) for each, _ in found)) < least:
        wanted = f"at least {least} rows for a risk of {risk:g} at confidence {confidence:g}"
        raise ValueError(f"expected {wanted}, got {n}; pass more rows, or a higher risk")
    scores, errors = (torch.cat(each) for each in zip(*found, strict=True))
    _warn_if_constant(scores, known)
    safe = safe_threshold(scores, errors, risk, delta, ordered=ordered)
    if not safe.accepted:
        _warn_of_no_threshold(scores, errors, risk, confidence, ordered)
    facts = {"risk": float(risk), "confidence": float(confidence), "ordered": bool(ordered), "tolerance": tolerance}
    below = safe._replace(threshold=(1 - SAME) * safe.threshold)  # a margin against rounding
    return _add_gate(posterior, name, known, below, {**facts, "rows": n})


def ood_gate(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    false_alarm: float = 0.05,
    score: GateScore | None = None,
    name: str = "ood_gate",
) -> Gate:
    """Fits a gate that refuses in-distribution inputs with probability at most `false_alarm`; labels are not used.

    The threshold is the ⌈(n + 1)(1 − false_alarm)⌉-th smallest score of n held-out in-distribution rows. Without ties the
    probability, over these rows and a new one, is exact up to 1/(n + 1). Nothing is guaranteed for foreign inputs. The gate
    is stored with the posterior, under `promises[name]`.

    Args:
        loader: held-out in-distribution batches (x, y), as in `selective`; y is not read.
        false_alarm: largest share of refused in-distribution inputs, between 0 and 1.
        score: the score to threshold, as in `selective`.
        name: key in `posterior.promises`.

    Raises:
        ValueError: fewer rows than 1/false_alarm − 1.
    """
    check_name(name)
    fraction("false_alarm", false_alarm, hint="pass for example 0.05")
    found, least = [], least_rows(1 - false_alarm)
    for rows in _equally_weighted_rows(posterior, loader, labelled=False):
        known, uncertainty = _named_score(rows.predictive, score)
        found.append(uncertainty)
    scores = torch.cat(found) if found else torch.empty(0)
    if len(scores) < least:
        wanted = f"at least {least} rows for a false-alarm rate of {false_alarm:g}"
        raise ValueError(f"expected {wanted}, got {len(scores)}; pass more rows or a higher rate")
    _warn_if_constant(scores, known)
    one = torch.ones(1, dtype=torch.float64)
    highest = weighted_quantile(*sort_with_mass(scores[:, None], torch.ones_like(scores)), 1 - false_alarm, one)[0, 0]
    # A gate accepts scores below its threshold: use the next number above the highest accepted score.
    above = torch.nextafter(add_tolerance(highest), torch.tensor(torch.inf, dtype=torch.float64))
    safe = Threshold(float(above), int((scores < above).sum()), 0)
    return _add_gate(posterior, name, known, safe, {"false_alarm": float(false_alarm), "rows": len(scores)})


def _equally_weighted_rows(
    posterior: Posterior, loader: Iterable[Any], *, labelled: bool = True
) -> Iterator[CalibrationRows]:
    first: Tensor | None = None
    for rows in calibration_rows(posterior, loader, labelled=labelled):
        first = rows.weight[:1] if first is None or not len(first) else first
        if (rows.weight != first).any():
            raise ValueError("expected rows of equal weight, got different weights; leave the weights out")
        yield rows


def _named_score(predictive: Predictive, score: str | None) -> tuple[str, Tensor]:
    """(name, (B,) values on the host) of the chosen score, or of the first that such a predictive has."""
    known = uncertainties(predictive)
    name = choose_score(score, known, predictive.kind)
    return name, known[name](predictive).cpu()


def _row_errors(rows: CalibrationRows, tolerance: float | None) -> Tensor:
    """(B,) boolean: True where the prediction is wrong."""
    if isinstance(rows.predictive, CategoricalPredictive):
        if tolerance is not None:
            raise ValueError("expected no tolerance for a classification, got one; leave it out")
    elif tolerance is None:
        hint = "pass tolerance=, the largest error that counts as right"
        raise ValueError(f"expected a tolerance for a regression, got none; {hint}")
    largest = tolerance if tolerance is None else number("tolerance", tolerance, least=0)
    return error_mask(rows.predictive, rows.y, largest)


def _warn_if_constant(scores: Tensor, known: str) -> None:
    if bool((scores == scores[0]).all()):
        text = "all %d rows have the same %s, so the gate accepts all or none; use another score"
        log.warning(text, len(scores), known)


def _warn_of_no_threshold(scores: Tensor, errors: Tensor, risk: float, confidence: float, ordered: bool) -> None:
    n, wrong = len(scores), int(errors.sum())
    bound = binomial_bound(wrong, n, 1 - confidence)
    least = least_risk(scores, errors, 1 - confidence, ordered=ordered)
    log.warning(
        "no threshold promises a risk of %g with confidence %g on these %d rows, so the gate accepts nothing: it needs %d "
        "accepted rows without an error, or more rows with some. Of all rows %d were wrong: with that "
        "confidence at most a share of %.3g is.%s",
        risk, confidence, n, errorless_rows(risk, 1 - confidence), wrong, bound,
        "" if least is None or least > bound else f" A risk of about {least:.2g} could be promised: try it on new rows.",
    )  # fmt: skip


def _add_gate(posterior: Posterior, name: str, score: str, safe: Threshold, facts: dict[str, Any]) -> Gate:
    shown = {"threshold": repr(safe.threshold), "accepted": safe.accepted, "errors": safe.errors}
    gate = Gate({**facts, "score": score, **shown}, {})
    posterior.add_guarantee(name, gate)
    return gate


class GateDecision(NamedTuple):
    """The result of a gate for B inputs."""

    accept: Tensor  # (B,) boolean
    score: Tensor  # (B,) float64, higher = more uncertain
    predictive: Predictive


class Gate(Guarantee):
    """Accepts inputs whose score is below `threshold`; made by `ds.selective` and `ds.ood_gate`, saved with the posterior.

    Public attributes: `threshold`, −∞ if no guarantee is possible, so that nothing is accepted; `score`; `facts`, with `risk`
    and `confidence`, or `false_alarm`, and counts on the calibration rows (`rows`, `accepted`, `errors`).
    """

    kind = "gate"

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(facts, tensors)
        self.threshold = float(facts["threshold"])  # JSON has no infinity: written as text
        self.score = FORMER_SCORES.get(facts["score"], str(facts["score"]))

    def forward(self, x: Inputs | Predictive) -> GateDecision:
        """`gate(x)`: `GateDecision` for a batch of inputs, or for the posterior's `Predictive` of one."""
        posterior = self.posterior  # raises if its predictions have changed
        return self.decide(x if isinstance(x, Predictive) else posterior.predict(x))

    def decide(self, predictive: Predictive) -> GateDecision:
        """The result for a predictive, without asking whether it is the posterior's present one."""
        score = uncertainties(predictive)[self.score](predictive)
        return GateDecision(score < self.threshold, score, predictive)

    def __repr__(self) -> str:
        return f"Gate({self.score} below {self.threshold:.4g}: {self.describe()})"

    def describe(self) -> str:
        """The guarantee in one sentence."""
        if "false_alarm" in self.facts:
            share = self.facts["false_alarm"]
            rows = f"the {self.facts['rows']} calibration rows"
            return f"inputs like {rows} are refused with probability at most {share:g}"
        if self.threshold == float("-inf"):
            return "nothing is accepted: no threshold guarantees this risk on these rows"
        risk, confidence = self.facts["risk"], self.facts["confidence"]
        return f"of accepted inputs at most {100 * risk:g} % are wrong, with confidence {confidence:g}"


def error_mask(predictive: Predictive, y: Tensor, tolerance: float | None) -> Tensor:
    """(B,) boolean: the class is wrong, or an output is off by more than the tolerance."""
    if isinstance(predictive, CategoricalPredictive):
        return predictive.log_mean.argmax(1) != y
    assert tolerance is not None  # required for a regression
    off = (predictive.mean - y).abs() > tolerance
    return off.reshape(len(off), -1).any(1)


STEP = 1.25


class Threshold(NamedTuple):
    """A threshold and the calibration rows' counts below it."""

    threshold: float  # −∞ if none keeps the risk
    accepted: int
    errors: int


def errorless_rows(risk: float, delta: float) -> int:
    """m, the fewest accepted rows, all predicted right, that can promise a risk: (1 − risk)^m ≤ δ."""
    return math.ceil(math.log(delta) / math.log1p(-risk) * (1 - 1e-12))


def binomial_tail(errors: Tensor, rows: Tensor, risk: float) -> Tensor:
    """P(Bin(rows, risk) ≤ errors), the p-value of "the true risk is above `risk`"; 1 without rows."""
    from scipy.special import bdtr  # loaded only when a promise is fitted

    return torch.from_numpy(bdtr(errors.double().numpy(), rows.numpy(), risk)).reshape(errors.shape)


def binomial_bound(errors: int, rows: int, delta: float) -> float:
    """Upper confidence bound of the risk at confidence 1 − δ (Clopper & Pearson 1934)."""
    from scipy.special import bdtri

    return 1.0 if errors >= rows else float(bdtri(errors, rows, delta))


def safe_threshold(score: Tensor, error: Tensor, risk: float, delta: float, *, ordered: bool = True) -> Threshold:
    """The loosest threshold whose risk is at most `risk` with confidence 1 − δ, from scores (n,) and boolean errors (n,).

    By exact tests in a fixed sequence (Learn-then-Test, Angelopoulos et al. 2021). Rows are sorted by uncertainty. Threshold j
    accepts scores below the (j + 1)-th smallest score, that is j rows; the last threshold accepts everything. Given that
    score, the j rows below it are a sample of the inputs below it. Their errors are binomial, so P(Bin(j, risk) ≤ errors) is a
    p-value of "the true risk is above `risk`", although the threshold came from the rows. Labels only decide where a sequence
    ends. There are two ways to share δ among the tests:

    - `ordered` assumes that errors become more frequent with the score, so that the risk crosses the promised one once, at t.
      A sequence starts at m = ⌈ln δ / ln(1 − risk)⌉ accepted rows, the fewest that can pass, and continues while tests pass.
      One early error would end it. With more rows, J sequences therefore start at m, 2 m, 4 m, …, (m computed for δ/J), with
      δ/J each; a sequence that reaches the next start adds its share to it (the fallback procedure of Wiens 2003). Beyond t,
      the first tested threshold accepts all rows below t, whose errors are binomial at the promised risk, and the others are
      starts. Hence P(any of them passes) ≤ δ.
    - not `ordered` works for any score. The tested numbers of rows grow by a factor 1.25 and share δ equally (Bonferroni);
      the loosest threshold that passes is taken.
    """
    values, counts = torch.unique(score.double(), return_counts=True)  # sorted
    thresholds = torch.cat([values[1:], values.new_full((1,), math.inf)])
    accepted = counts.cumsum(0)  # rows below each threshold; equal scores are accepted together
    wrong = torch.zeros(len(score) + 1, dtype=torch.int64)
    wrong[1:] = error[score.argsort(stable=True)].long().cumsum(0)
    p_values = binomial_tail(wrong[accepted], accepted, risk).tolist()
    levels, last, carried = [0.0] * len(p_values), -1, 0.0
    if ordered:
        share, starts = ordered_starts(len(score), risk, delta)
        # the strictest that accepts this many
        for start in torch.searchsorted(accepted, torch.tensor(starts)).tolist():
            levels[start] += share
    else:
        share, starts = spread_starts(len(score), risk, delta)
        for start in (torch.searchsorted(accepted, torch.tensor(starts), right=True) - 1).tolist():
            levels[start] = share if start >= 0 else levels[start]  # the loosest threshold that accepts no more
    for i, (p, level) in enumerate(zip(p_values, levels, strict=True)):
        if p <= carried + level:
            last, carried = i, carried + level if ordered else 0.0
        else:
            carried = 0.0
    if last < 0:
        return Threshold(-math.inf, 0, 0)
    return Threshold(float(thresholds[last]), int(accepted[last]), int(wrong[accepted[last]]))


def ordered_starts(rows: int, risk: float, delta: float) -> tuple[float, list[int]]:
    """(share of δ, numbers of accepted rows) of the sequences' starts."""
    count = 1
    while errorless_rows(risk, delta / (count + 1)) * 2**count <= rows:
        count += 1
    first = errorless_rows(risk, delta / count)
    return delta / count, [first * 2**i for i in range(count) if first * 2**i <= rows]


def spread_starts(rows: int, risk: float, delta: float) -> tuple[float, list[int]]:
    """The same for single tests: as many as can pass while they share δ; one of them accepts all rows."""
    numbers = [rows]
    while (smaller := int(numbers[0] / STEP)) >= errorless_rows(risk, delta / (len(numbers) + 1)):
        numbers.insert(0, smaller)
    return delta / len(numbers), numbers


def least_risk(score: Tensor, error: Tensor, delta: float, *, ordered: bool = True) -> float | None:
    """Approximately the least risk (in steps of 5 %) that a threshold could promise on these rows; None if there is none."""
    for risk in (1e-4 * 1.05**step for step in range(188)):
        if safe_threshold(score, error, risk, delta, ordered=ordered).accepted:
            return risk
    return None
