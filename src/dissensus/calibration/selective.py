"""selective and ood_gate: thresholds on uncertainty with a guaranteed error rate or false-alarm rate."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.calibration.calibration_rows import CalibrationRows, calibration_rows, check_name
from dissensus.calibration.conformal_scores import CLASS_UNCERTAINTY, VALUE_UNCERTAINTY
from dissensus.calibration.gate import Gate, error_mask, uncertainty_function
from dissensus.calibration.quantiles import SAME, add_tolerance, least_rows, sort_with_mass, weighted_quantile
from dissensus.calibration.risk_tests import Threshold, binomial_bound, errorless_rows, least_risk, safe_threshold
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.utils.checks import fraction, number, one_of

log = logging.getLogger("dissensus")

GateScore = Literal["max_probability", "entropy", "mutual_information", "variance", "epistemic"]


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
        score: the score to threshold: "max_probability" (None), "entropy" or "mutual_information"; for a regression
            "variance" (None) or "epistemic".
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
        known = _score_name(rows.predictive, score)
        uncertainty = uncertainty_function(rows.predictive, known)(rows.predictive)
        found.append((uncertainty.cpu(), _row_errors(rows, tolerance).cpu()))
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
        known = _score_name(rows.predictive, score)
        found.append(uncertainty_function(rows.predictive, known)(rows.predictive).cpu())
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


def _score_name(predictive: Predictive, score: str | None) -> str:
    classes = isinstance(predictive, CategoricalPredictive)
    known = CLASS_UNCERTAINTY if classes else VALUE_UNCERTAINTY
    kind = "classification" if classes else "regression"
    return next(iter(known)) if score is None else one_of("score", score, known, hint=f"a {kind} has these")


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
