"""conformal: sets of classes and intervals with a promised coverage, from held-out rows, on any posterior."""

import logging
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.calibration.calibration_rows import CalibrationRows, calibration_rows, check_name
from dissensus.calibration.conformal_scores import (
    CLASS_SCORES,
    INTERVAL_SCORES,
    RANDOMISED,
    SETTINGS,
    class_scores,
    interval_score,
)
from dissensus.calibration.conformal_sets import Conformal, RowFunction
from dissensus.calibration.quantiles import least_rows, sort_with_mass
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.utils.checks import fraction, integer, number, one_of

log = logging.getLogger("dissensus")

ConformalScore = Literal["lac", "aps", "raps", "disagreement", "cqr", "residual"]


def conformal(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    level: float = 0.9,
    score: ConformalScore | None = None,
    by: Literal["class"] | RowFunction | None = None,
    weight: RowFunction | None = None,
    randomised: bool = False,
    penalty: float | None = None,
    free: int | None = None,
    seed: int = 0,
    name: str = "conformal",
) -> Conformal:
    """Fits sets of classes, or intervals, that contain the truth with probability `level`.

    The result is stored with the posterior, under `promises[name]`. Split conformal prediction: the threshold is the
    ⌈(n + 1) · level⌉-th smallest score of n held-out rows. The coverage, over new rows and calibration rows together, is at
    least the level, and without ties at most 1/(n + 1) more. It holds for new rows that are exchangeable with these: not
    under a shift (but see `weight`), and not if these rows were used for training, tuning or calibration.

    Args:
        loader: held-out batches (x, y) or (x, y, weight); ignored labels and rows of weight 0 do not count. Other weights are
            density ratios: see `weight`.
        level: required coverage 1 − α, between 0 and 1.
        score: for classes "lac" (None; the smallest sets), "aps", "raps" or "disagreement" (uses the members); for regression
            "cqr" (None) or "residual", separately for each output. docs/guides/guarantees.md compares them.
        by: None for one promise over all rows, "class" for one per class, or a function from inputs (B, ...) to group numbers
            (B,) for one per group. A class with too few rows is in every set; a group with too few has sets of all classes
            or infinite intervals.
        weight: for a known shift of the inputs: a function from inputs (B, ...) to density ratios (B,), new inputs over
            calibration rows, up to a factor. Sets grow, up to all classes, where calibration rows are rare.
        randomised: whether "aps" and "raps" include the class at the border at random. If False, the likeliest class is in
            every set, so the coverage exceeds the level where the accuracy does.
        penalty, free: parameters of "raps" (0.01 for every rank above 5) and "disagreement" (1 deviation). Choose them on
            other rows.
        seed: seed of the random numbers for the calibration rows of a randomised score.
        name: key in `posterior.promises`.

    Raises:
        ValueError: fewer rows than the level needs; the message says how many.
    """
    check_name(name)
    fraction("level", level, hint="pass for example 0.9")
    if not (by is None or callable(by)):
        one_of("by", by, ("class",), hint='pass "class" or a function of inputs')
    kept: list[tuple[Tensor, Tensor, Tensor]] = []  # scores (B, P), weights (B,), groups (B,)
    generator = torch.Generator().manual_seed(seed)
    facts: dict[str, Any] = {}
    for rows in calibration_rows(posterior, loader):
        facts = facts or _conformal_facts(rows.predictive, level, score, by, randomised, penalty, free)
        w = rows.weight
        if weight is not None:
            w = w * weight(rows.x).to(w.device, torch.float64)
        kept.append((_true_scores(rows, facts, generator).cpu(), w.cpu(), _group_numbers(rows, by).cpu()))
    found, w, groups = (torch.cat(each) for each in zip(*kept, strict=True)) if kept else [torch.empty(0)] * 3
    least = least_rows(level)
    if len(found) < least:
        wanted = f"at least {least} rows for a level of {level:g}"
        raise ValueError(f"expected {wanted}, got {len(found)}; pass more rows, or a lower level")
    number("every weight", float(w.amin()), least=0, hint="a density ratio is not negative")
    number("every weight", float(w.amax()), hint="a density ratio is finite")
    facts["weighted"] = weight is not None or bool((w != w[0]).any())
    w = w if facts["weighted"] else torch.ones_like(w)
    promise = Conformal(facts, _conformal_tensors(found, w, groups, facts, least))
    promise.weight_of, promise.group_of = weight, by if callable(by) else None
    posterior.add_guarantee(name, promise)
    return promise


def _conformal_facts(
    predictive: Predictive,
    level: float,
    score: str | None,
    by: object,
    randomised: bool,
    penalty: float | None,
    free: int | None,
) -> dict[str, Any]:
    classes = isinstance(predictive, CategoricalPredictive)
    known, kind = (tuple(CLASS_SCORES), "classification") if classes else (INTERVAL_SCORES, "regression")
    score = one_of("score", known[0] if score is None else score, known, hint=f"a {kind} has these")
    if by == "class" and not classes:
        raise ValueError('expected a classification for by="class", got a regression; pass a function of inputs')
    if randomised:
        one_of("score", score, RANDOMISED, hint="only these can be randomised; pass randomised=False")
    settings = dict(SETTINGS.get(score, {}))
    for name, value in (("penalty", penalty), ("free", free)):
        if value is not None:
            one_of("a setting", name, settings, hint=f"{score} has these")
            settings[name] = float(number(name, value, least=0)) if name == "penalty" else integer(name, value, least=0)
    outputs = predictive.mean.shape[1:].numel()
    named = "class" if by == "class" else None if by is None else "group"
    facts = {"level": float(level), "score": score, "settings": settings, "randomised": bool(randomised)}
    return {**facts, "by": named, "outputs": outputs}


def _true_scores(rows: CalibrationRows, facts: dict[str, Any], generator: torch.Generator) -> Tensor:
    """(B, P) scores of the true labels or values."""
    predictive, y = rows.predictive, rows.y
    if not isinstance(predictive, CategoricalPredictive):
        return interval_score(predictive, y, facts["score"], facts["level"])
    return class_scores(predictive, facts, generator).gather(1, y.long()[:, None])


def _group_numbers(rows: CalibrationRows, by: object) -> Tensor:
    """(B,) group numbers."""
    if by is None:
        return torch.zeros(len(rows.y), dtype=torch.int64)
    if by == "class":
        return rows.y.long()
    found: Tensor = by(rows.x)  # type: ignore[operator]
    if found.shape != rows.weight.shape or found.is_floating_point():
        wanted, got = tuple(rows.weight.shape), f"{found.dtype} of shape {tuple(found.shape)}"
        raise ValueError(f"expected whole numbers {wanted} from by, one group per row, got {got}; return .long()")
    return found.long()


def _conformal_tensors(
    scores: Tensor, weight: Tensor, groups: Tensor, facts: dict[str, Any], least: int
) -> dict[str, Tensor]:
    """The tensors of `Conformal`: scores and cumulative weights, group after group."""
    known = torch.arange(facts["outputs"]) if facts["by"] == "class" else torch.unique(groups)
    parts = [sort_with_mass(scores[groups == group], weight[groups == group]) for group in known]
    sizes = torch.tensor([len(part) for part, _ in parts])
    if len(few := known[sizes < least]):
        needs = f"a level of {facts['level']:g} needs {least} rows of each {facts['by']}"
        if len(few) == len(known):
            raise ValueError(f"expected more rows: {needs}, got at most {int(sizes.max())}; or lower the level")
        effect = "is in every set" if facts["by"] == "class" else "has sets of all classes, or infinite intervals"
        named = ", ".join(map(str, few[:10].tolist())) + ("…" if len(few) > 10 else "")
        log.warning("%s; with fewer rows it %s, here %s", needs, effect, named)
    ordered, mass = (torch.cat(each) for each in zip(*parts, strict=True))
    return {"scores": ordered, "mass": mass, "sizes": sizes, "groups": known}
