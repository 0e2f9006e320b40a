"""conformal: sets of classes and intervals with a promised coverage, from held-out rows, on any posterior.

Scores tell how badly a label or value fits a prediction, in float64, higher = worse. With any score the guarantee holds; a
better one gives smaller sets. Of classes:

- `lac`: −log p̄_k, with the same order as 1 − p̄_k (Sadinle, Lei & Wasserman 2019): the smallest sets on average;
- `aps`: the mass of the likelier classes plus u p̄_k (Romano, Sesia & Candès, NeurIPS 2020): larger sets for hard inputs.
  u is random if the score is randomised, else 0, so that the likeliest class is in every set;
- `raps`: the same plus penalty · max(0, rank_k − free) (Angelopoulos et al., ICLR 2021): fewer very large sets;
- `disagreement`: −log(p̄_k + penalty · σ_k), σ_k the standard deviation of p_k over members: a class is in the set if some
  members give it a high probability, so sets grow where members disagree. With one member it equals `lac`.

Of values of a regression, each output separately:

- `cqr`: max(l − y, y − h), l and h the mixture's quantiles around the level (Romano, Patterson & Candès, NeurIPS 2019);
- `residual`: |y − mean| / standard deviation of the predictive.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from dissensus import metrics
from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.calibrated import Guarantee
from dissensus.core.posterior import Posterior, expect_posterior, inference_context
from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, Predictive
from dissensus.engine.loader import Loader
from dissensus.engine.prediction_loop import predict_loader
from dissensus.numerics.randomness import RandomnessDetector
from dissensus.utils.checks import fraction, integer, number, one_of, suggest_keywords
from dissensus.utils.torch_private import buffers_of

log = logging.getLogger("dissensus")

ConformalScore = Literal["lac", "aps", "raps", "disagreement", "cqr", "residual"]


@suggest_keywords
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
    never_empty: bool = False,
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
        never_empty: whether an empty set gets the likeliest class instead. The coverage can only grow, and the mean size grows
            by the share of empty sets, `conformal/empty` in `evaluate`. But an empty set was a sign of a strange input.
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
        asked = {"penalty": penalty, "free": free}
        facts = facts or _conformal_facts(rows.predictive, level, score, by, randomised, asked)
        w = rows.weight
        if weight is not None:
            w = w * weight(rows.x).to(w.device, torch.float64)
        if isinstance(rows.predictive, CategoricalPredictive):
            found = class_scores(rows.predictive, facts, generator).gather(1, rows.y.long()[:, None])
        else:
            found = interval_score(rows.predictive, rows.y, facts["score"], facts["level"])
        kept.append((found.cpu(), w.cpu(), _group_numbers(rows, by).cpu()))
    found, w, groups = (torch.cat(each) for each in zip(*kept, strict=True)) if kept else [torch.empty(0)] * 3
    least = least_rows(level)
    if len(found) < least:
        wanted = f"at least {least} rows for a level of {level:g}"
        raise ValueError(f"expected {wanted}, got {len(found)}; pass more rows, or a lower level")
    number("every weight", float(w.amin()), least=0, hint="a density ratio is not negative")
    number("every weight", float(w.amax()), hint="a density ratio is finite")
    facts["weighted"] = weight is not None or bool((w != w[0]).any())
    facts["never_empty"] = bool(never_empty)
    if never_empty and facts["score"] not in CLASS_SCORES:
        raise ValueError("expected never_empty for sets of classes, got a regression; leave it out")
    w = w if facts["weighted"] else torch.ones_like(w)
    promise = Conformal(facts, _conformal_tensors(found, w, groups, facts, least))
    promise.weight_of, promise.group_of = weight, by if callable(by) else None
    posterior.add_guarantee(name, promise)
    return promise


def _conformal_facts(
    predictive: Predictive, level: float, score: str | None, by: object, randomised: bool, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a promise, as JSON values; `asked`: those of the score, None for its defaults."""
    classes = isinstance(predictive, CategoricalPredictive)
    known, kind = (tuple(CLASS_SCORES), "classification") if classes else (INTERVAL_SCORES, "regression")
    score = one_of("score", known[0] if score is None else score, known, hint=f"a {kind} has these")
    if by == "class" and not classes:
        raise ValueError('expected a classification for by="class", got a regression; pass a function of inputs')
    if randomised:
        one_of("score", score, RANDOMISED, hint="only these can be randomised; pass randomised=False")
    settings = dict(SETTINGS.get(score, {}))
    for name, value in asked.items():
        if value is not None:
            one_of("a setting", name, settings, hint=f"{score} has these")
            settings[name] = float(number(name, value, least=0)) if name == "penalty" else integer(name, value, least=0)
    outputs = predictive.mean.shape[1:].numel()
    named = "class" if by == "class" else None if by is None else "group"
    facts = {"level": float(level), "score": score, "settings": settings, "randomised": bool(randomised)}
    return {**facts, "by": named, "outputs": outputs}


def _group_numbers(rows: CalibrationRows, by: object) -> Tensor:
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


RowFunction = Callable[[Any], Tensor]  # inputs (B, ...) -> one number per row, (B,)


class Conformal(Guarantee):
    """Sets (`.set`) or intervals (`.interval`) with guaranteed coverage; made by `ds.conformal`, saved with the posterior.

    P(truth in the set) ≥ level over the randomness of a new row and the calibration rows, if these are exchangeable. For one
    given calibration, the coverage of new rows is a draw from about Beta(k, n + 1 − k), k = ⌈(n + 1) · level⌉.

    Public attributes: `level`, `score`, `rows` (number of calibration rows), `facts` (all settings).
    """

    kind = "conformal"
    scores: Tensor  # (n, P) of the calibration rows, group after group, sorted within each
    mass: Tensor  # (n, P) cumulative weights of the rows within their group
    sizes: Tensor  # (G,) rows in each group
    groups: Tensor  # (G,) the groups' numbers

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(facts, tensors)
        self.level = float(facts["level"])
        self.score = str(facts["score"])
        self.rows = len(self.scores)
        self.group_of: RowFunction | None = None  # files hold no functions: after loading, group numbers are passed
        self.weight_of: RowFunction | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # It moves with its posterior to another device, but keeps its precision, so that thresholds do not change.
        for name, tensor in buffers_of(self).items():
            buffers_of(self)[name] = None if tensor is None else tensor.to(fn(tensor).device)
        return self

    def set(
        self,
        x: Inputs | Predictive,
        *,
        weight: Tensor | None = None,
        group: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(B, K) boolean: the classes in each set. A set may be empty, if no class fits the input well enough.

        Args:
            x: one batch of inputs, or the posterior's `Predictive` for one.
            weight: (B,) ratio of the densities of shifted inputs and calibration inputs at x; required if the calibration
                rows had weights.
            group: (B,) integers, if groups were calibrated; required after loading, and with a `Predictive`.
            generator: generator for a randomised score; None is torch's global one.
        """
        if self.score not in CLASS_SCORES:
            raise TypeError(f"expected a classification for sets, got the score {self.score!r}; call .interval(x)")
        predictive, thresholds = self._resolve_inputs(x, weight, group)
        return self.set_below(predictive, thresholds, generator)

    def set_below(self, predictive: Predictive, thresholds: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(B, K) boolean: the classes whose score is at most its threshold (B or 1, 1 or K), for any predictive."""
        outputs = (self.facts["outputs"],)
        if not isinstance(predictive, CategoricalPredictive) or predictive.log_mean.shape[1:] != outputs:
            wanted = f"{self.facts['outputs']} classes per row"
            raise ValueError(f"expected {wanted}, got {predictive!r}; use its own posterior")
        found = class_scores(predictive, self.facts, generator) <= add_tolerance(thresholds)
        if not self.facts.get("never_empty"):  # files of earlier versions say nothing
            return found
        likeliest = torch.zeros_like(found).scatter(1, predictive.log_mean.argmax(1, keepdim=True), True)
        return found | (likeliest & ~found.any(1, keepdim=True))

    def interval(
        self, x: Inputs | Predictive, *, weight: Tensor | None = None, group: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(lower, upper), each of the mean's shape: an interval for each output separately; arguments as in `set`.

        The ends are ∓∞ if there are too few calibration rows for finite ones, and equal if the interval is empty.
        """
        if self.score in CLASS_SCORES:
            raise TypeError(f"expected a regression for intervals, got the score {self.score!r}; call .set(x)")
        return self.interval_below(*self._resolve_inputs(x, weight, group))

    def interval_below(self, predictive: Predictive, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """(lower, upper) of the values whose score is at most its threshold (B or 1, P), for any predictive."""
        lower, upper, unit = interval_ends(predictive, self.score, self.level)  # (B, P)
        if lower.shape[1] != self.facts["outputs"]:
            wanted = f"{self.facts['outputs']} outputs per row"
            raise ValueError(f"expected {wanted}, got {predictive!r}; use its own posterior")
        lower, upper = lower - thresholds * unit, upper + thresholds * unit
        rounding = 16 * torch.finfo(predictive.mean.dtype).eps * torch.maximum(lower.abs(), upper.abs())
        # For equal inputs in another batch whose target is at an end.
        lower, upper = lower - rounding, upper + rounding
        mean, middle, empty = predictive.mean, 0.5 * (lower + upper), lower > upper
        lower, upper = (torch.where(empty, middle, end).reshape(mean.shape).to(mean.dtype) for end in (lower, upper))
        return lower, upper

    def decide(
        self, predictive: Predictive, x: Inputs, weight: Tensor | None, group: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Set or interval for the predictive of x, without asking whether it is the posterior's present one."""
        bounded = self.set_below if self.score in CLASS_SCORES else self.interval_below
        return bounded(predictive, self._row_thresholds(predictive, x, weight, group))

    def _resolve_inputs(
        self, x: Inputs | Predictive, weight: Tensor | None, group: Tensor | None
    ) -> tuple[Predictive, Tensor]:
        """(predictive, (B or 1, P or K) thresholds)."""
        posterior = self.posterior  # raises if its predictions have changed
        predictive = x if isinstance(x, Predictive) else posterior.predict(x)
        return predictive, self._row_thresholds(predictive, None if isinstance(x, Predictive) else x, weight, group)

    def _row_thresholds(self, predictive: Predictive, x: Any, weight: Tensor | None, group: Tensor | None) -> Tensor:
        """(B or 1, P or K) thresholds of a predictive's rows; x: their inputs, if known."""
        rows, weighted = len(predictive), self.facts["weighted"]
        w = self._row_values("weight", weight, self.weight_of, x, rows) if weighted else torch.ones(1)
        g = self._row_values("group", group, self.group_of, x, rows) if self.facts["by"] == "group" else None
        return self.thresholds(w.double(), g).to(predictive.defining_tensors()[0].device)

    def _row_values(self, name: str, given: Tensor | None, function: RowFunction | None, x: Any, rows: int) -> Tensor:
        found = given
        if found is None and function is not None and x is not None:
            found = function(self.posterior.transform_inputs(x))  # as in calibration
        if found is None or found.shape != (rows,) or (name == "weight" and bool((found < 0).any())):
            got = "none" if found is None else f"{found.dtype} {tuple(found.shape)}, the least {float(found.min()):g}"
            least = ", at least 0" if name == "weight" else ""
            hint = f"calibration had one: pass {name}=, a tensor of shape ({rows},)"
            raise ValueError(f"expected a {name} for each of {rows} rows{least}, got {got}; {hint}")
        return found

    def thresholds(self, weight: Tensor, group: Tensor | None = None) -> Tensor:
        """(B, P), or (B, K) per class: the largest score in the set, for rows with these weights (B,) and groups (B,)."""
        weight = weight if self.facts["weighted"] else torch.ones(1, dtype=torch.float64)
        sizes, weight = self.sizes.tolist(), weight.to(self.scores.device)
        parts = zip(torch.split(self.scores, sizes), torch.split(self.mass, sizes), strict=True)
        each = torch.stack([weighted_quantile(*part, self.level, weight) for part in parts])  # (G, B, P)
        if self.facts["by"] == "class":
            return each[..., 0].T
        if group is None:
            return each[0]
        same = group.to(each.device)[:, None] == self.groups  # (B, G)
        unseen = torch.full_like(each[:1], torch.inf)
        index = torch.where(same.any(1), same.int().argmax(1), len(each))
        rows = torch.arange(len(index), device=each.device)
        return torch.cat([each, unseen]).expand(-1, len(index), -1)[index, rows]

    def __repr__(self) -> str:
        return f"Conformal({self.describe()})"

    def describe(self) -> str:
        """The guarantee in one sentence."""
        by = "" if self.facts["by"] is None else f", for every {self.facts['by']} separately"
        what = "sets" if self.score in CLASS_SCORES else "intervals"
        return f"{what} contain the truth with probability at least {self.level:g}{by} ({self.rows} calibration rows)"


def measure_coverage(
    conformal: Conformal, predictive: Predictive, y: Tensor, generator: torch.Generator, **rows: Tensor | None
) -> dict[str, Tensor]:
    """ "covered" (N,), the share of outputs inside, "size" (N,), classes or mean width, and "set", or "lower" and "upper".

    For predictions of rows with targets y; `rows`: weight and group, if used.
    """
    if conformal.score in CLASS_SCORES:
        found = conformal.set(predictive, generator=generator, **rows)
        hit = found.gather(1, y.to(found.device)[:, None])[:, 0]
        return {"covered": hit.double(), "size": found.sum(1).double(), "set": found}
    lower, upper = (end.double() for end in conformal.interval(predictive, **rows))
    inside = (lower <= y.to(lower.device)) & (y.to(lower.device) <= upper)
    share, width = (each.double().reshape(len(y), -1).mean(1) for each in (inside, upper - lower))
    return {"covered": share, "size": width, "lower": lower, "upper": upper}


def lac(predictive: CategoricalPredictive, u: Tensor, settings: Mapping[str, Any]) -> Tensor:
    log_mean = predictive.log_mean
    # If the largest probability rounds to 1, its distance from 1 comes from the others, so that confident rows do not tie.
    likeliest = metrics.max_probability_score(log_mean)[:, None]
    return (-log_mean.double()).scatter(1, log_mean.argmax(1, keepdim=True), likeliest)


def aps(predictive: CategoricalPredictive, u: Tensor, settings: Mapping[str, Any]) -> Tensor:
    ordered, order = predictive.log_mean.double().exp().sort(dim=1, descending=True, stable=True)
    mass = ordered.cumsum(1) - ordered + u[:, None] * ordered
    if settings:  # raps
        rank = torch.arange(1, mass.shape[1] + 1, device=mass.device)
        mass = mass + settings["penalty"] * (rank - settings["free"]).clamp(min=0)
    return torch.empty_like(mass).scatter(1, order, mass)


def disagreement(predictive: CategoricalPredictive, u: Tensor, settings: Mapping[str, Any]) -> Tensor:
    members = predictive.log_probs.double().exp()  # (M, B, K)
    likely: Tensor = members.mean(0) + settings["penalty"] * members.std(0, correction=0)
    return -likely.log()


# name -> function of (predictive, u (B,) in [0, 1], settings) that returns (B, K)
ClassScore = Callable[[CategoricalPredictive, Tensor, Mapping[str, Any]], Tensor]
CLASS_SCORES: dict[str, ClassScore] = {"lac": lac, "aps": aps, "raps": aps, "disagreement": disagreement}
# default settings
SETTINGS: dict[str, dict[str, float]] = {"raps": {"penalty": 0.01, "free": 5}, "disagreement": {"penalty": 1.0}}
RANDOMISED = ("aps", "raps")  # scores that use u
INTERVAL_SCORES = ("cqr", "residual")


def class_scores(
    predictive: CategoricalPredictive, facts: Mapping[str, Any], generator: torch.Generator | None
) -> Tensor:
    """(B, K) scores of all classes, computed in the same way for calibration rows and new ones."""
    u = torch.zeros(predictive.log_mean.shape[0], dtype=torch.float64)
    if facts["randomised"]:
        device = "cpu" if generator is None else generator.device
        u = torch.rand(len(predictive), dtype=torch.float64, generator=generator, device=device)
    return CLASS_SCORES[facts["score"]](predictive, u.to(predictive.log_mean.device), facts["settings"])


def interval_ends(predictive: Predictive, score: str, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """(lower, upper, unit), each (B, P): the interval at threshold q is [lower − q · unit, upper + q · unit]."""
    mean = _flat(predictive.mean)
    if score == "residual":
        return mean, mean, _flat(predictive.total).sqrt()
    lower, upper = (_flat(end) for end in predictive.interval(level))
    return lower, upper, torch.ones_like(mean)


def interval_score(predictive: Predictive, y: Tensor, score: str, level: float) -> Tensor:
    """(B, P) the smallest threshold at which the interval contains y."""
    lower, upper, unit = interval_ends(predictive, score, level)
    return torch.maximum(lower - _flat(y), _flat(y) - upper) / unit


def _flat(values: Tensor) -> Tensor:
    return values.double().reshape(values.shape[0], -1)


def epistemic_uncertainty(predictive: Any) -> Tensor:
    if isinstance(predictive, ClassificationPredictive):
        return metrics.epistemic_uncertainty(predictive.log_probs)
    return cast(Tensor, predictive.epistemic.double())  # a summary keeps it


# name -> function that returns the uncertainty (B,) of a predictive, or (B, H, W) of its pixels; `evaluate` ranks by it
Uncertainties = dict[str, Callable[[Any], Tensor]]
CLASS_UNCERTAINTY: Uncertainties = {
    "max_probability": lambda predictive: metrics.max_probability_score(predictive.log_mean),
    "total": lambda predictive: metrics.total_uncertainty(predictive.log_mean),
    "epistemic": epistemic_uncertainty,
}
VALUE_UNCERTAINTY: Uncertainties = {
    "total": lambda predictive: _flat(predictive.total).sum(1),
    "epistemic": lambda predictive: _flat(predictive.epistemic).sum(1),
}

FORMER_SCORES = {"entropy": "total", "mutual_information": "epistemic", "variance": "total"}


def choose_score(score: str | None, known: Iterable[str], kind: str) -> str:
    """The score, one of those that predictions of this kind have; None is the first."""
    former = FORMER_SCORES.get(str(score))
    hint = f"pass {former!r}" if former else f"a {kind} has these"
    return next(iter(known)) if score is None else one_of("score", score, known, hint=hint)


def uncertainties(predictive: Predictive) -> Uncertainties:
    """The uncertainties that such a predictive has."""
    return CLASS_UNCERTAINTY if isinstance(predictive, CategoricalPredictive) else VALUE_UNCERTAINTY


# Weighted order statistics (Vovk et al. 2005; Tibshirani et al., NeurIPS 2019).
ROUNDING = 1e-12  # 0.55 · 20 is 11.000000000000002 in floating point: the 11th of 19 scores is right, not the 12th
# A network's outputs for one input differ by about 1e-6 between batches. If inputs repeat (all features are categories), many
# rows share the score at the threshold, and all of them must fall on the same side.
SAME = 1e-5


def least_rows(level: float) -> int:
    """The fewest rows that give a finite threshold: ⌈(n + 1) · level⌉ ≤ n, so n ≥ level / (1 − level)."""
    return math.ceil(level / (1 - level) * (1 - 1e-9))


def sort_with_mass(scores: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(sorted scores, cumulative weights), both (n, P), from scores (n, P) and weights (n,), for `weighted_quantile`."""
    ordered, order = scores.sort(0)
    return ordered, weight[order].cumsum(0)


def weighted_quantile(scores: Tensor, mass: Tensor, level: float, weight: Tensor) -> Tensor:
    """(B, P) thresholds for B new rows with these weights (B,), from `sort_with_mass`; ∞ if calibration rows are too few.

    The smallest score s with Σ_{s_i ≤ s} w_i ≥ level · (Σ w_i + w), where w_i are the calibration rows' weights and w that of
    the new row, whose own score counts as ∞. Without weights it is the ⌈(n + 1) · level⌉-th smallest.
    """
    total = mass[-1:].sum(0) + weight[:, None]  # (B, P); without calibration rows, only the new row's
    wanted = (level * total * (1 - ROUNDING)).T.contiguous()  # (P, B)
    index = torch.searchsorted(mass.T.contiguous(), wanted).T  # (B, P) index of the first score with enough mass
    last = torch.full_like(scores[:1], math.inf) if len(scores) else scores.new_full((1, scores.shape[1]), math.inf)
    return torch.cat([scores, last]).gather(0, index)


def add_tolerance(threshold: Tensor) -> Tensor:
    """The threshold, raised by a rounding tolerance, so that equal scores fall on the same side."""
    return torch.maximum((1 + SAME) * threshold, (1 - SAME) * threshold)


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
    data = Loader.complete(loader, expect_posterior(posterior))
    with inference_context(posterior), RandomnessDetector() as watch:
        posterior.draw()
    if watch.has_drawn:
        got = f"{type(posterior).__name__}, which draws new ones for each prediction"
        raise ValueError(f"expected fixed functions, got {got}; call ds.refresh(posterior, training_loader) first")
    for batch, predictive in predict_loader(posterior, data, labelled=labelled, keeps_weights=False):
        y = batch.y
        if predictive.kind == "multilabel":
            raise ValueError("expected one class or real targets per row, got several labels; use ds.Classification()")
        if isinstance(predictive, CategoricalPredictive):
            # Promises count rows, and rows must be exchangeable.
            if predictive.log_mean.ndim > 2:
                hint = "pixels or steps of one input are not exchangeable: use one label per input"
                raise ValueError(f"expected one label per row, got outputs {tuple(predictive.log_mean.shape)}; {hint}")
            if labelled and y.is_floating_point():
                raise ValueError("expected class indices, got soft labels; pass y.argmax(1)")
        weight = torch.ones(len(y)) if batch.weight is None else batch.weight
        if weight.shape != (len(y),):
            raise ValueError(f"expected weights of shape ({len(y)},), got {tuple(weight.shape)}; reshape them")
        weight = weight.to(y.device, torch.float64)
        counted = posterior.likelihood.target_mask(y) if labelled else None
        keep = weight > 0 if counted is None else (weight > 0) & counted
        x = batches.map_tensors(batches.move_to_device(batch.x, y.device), itemgetter(keep))
        yield CalibrationRows(predictive[keep], x, y[keep], weight[keep])


def check_name(name: str) -> None:
    """Raises unless the name can be a key in `posterior.promises`, a ModuleDict."""
    if not name or "." in name or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"expected a name without dots that is no attribute of a module, got {name!r}; pass another")
