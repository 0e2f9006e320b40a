"""The measures of a report: each metric with its meaning, its unit, and the arrays it can be resampled from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, inf, isfinite, log10
from typing import Literal

from torch import Tensor

from dissensus import metrics
from dissensus.evaluation.evaluation import Evaluation
from dissensus.metrics import Interval
from dissensus.metrics.classification import confidence_ece


def region_keys(evaluation: Evaluation) -> list[str]:
    """The keys of an evaluation's regions, in order."""
    return [key for key in evaluation.metrics if key.startswith("region/")]


def region_words(key: str) -> tuple[str, str]:
    """(region, quantity) of a key in words: ("off the data", "total uncertainty")."""
    _, region, quantity = key.split("/")
    names = {"off_data": "off the data", "at_data": "at the data"}
    names |= {name: f"{name} the data" for name in ("between", "outside")}
    quantities = {"sd": "standard deviation", "total": "total uncertainty"}
    return names.get(region, region.replace("_", " ")), quantities.get(quantity, quantity)


def as_square(values: Tensor) -> Tensor:
    """(side, side) image of values (side²,) on a plane's grid; the first row is the bottom (matplotlib's origin="lower")."""
    side = round(len(values) ** 0.5)
    return values.reshape(side, side).T


def plane_limits(positions: Tensor) -> tuple[float, float, float, float]:
    """(left, right, bottom, top) limits of a plane's grid."""
    (left, bottom), (right, top) = positions.amin(0).tolist(), positions.amax(0).tolist()
    return left, right, bottom, top


Better = Literal["high", "low"]
ArrayNames = tuple[str, ...]


ATTACKED = {"fgsm": "attacked by FGSM", "pgd": "attacked by PGD", "transfer": "attacked through one member"}


def weighted_mean(weights: Sequence[Tensor], values: Tensor) -> Tensor:
    """(R,) mean of values."""
    return weights[0] @ values.double() / weights[0].sum(1)


def number_text(value: float, half: float | None = None, digits: int = 2, *, signed: bool = False) -> str:
    """A number as every table and sentence shows it: to the second digit of `half`, the half-width of its interval.

    At most `digits` + 2 decimals are shown. A number without an interval has `digits` of them, or as many as its first digit
    needs; from 1,000 on it has none.
    """
    if half and isfinite(half):
        digits = min(max(1 - floor(log10(half)), 0), digits + 2)
    elif abs(value) >= 1000:
        digits = 0
    elif 1e-8 < abs(value) < 0.5 * 10**-digits:
        digits = -floor(log10(abs(value)))
    value = round(value, digits) + 0.0  # no "−0.000"
    return f"{value:{'+' * (signed and value != 0)},.{digits}f}".replace("-", "−")


@dataclass(frozen=True)
class Measure:
    """One metric. `samples`: the arrays it is computed from, grouped by the examples they share; () if there are none."""

    key: str
    label: str
    group: str
    best: Better | float | None = None  # high, low, nearest to a number; None: neither better nor worse
    scale: float = 1.0  # 100 for percent
    digits: int = 2
    unit: str = ""
    samples: tuple[ArrayNames, ...] = ()
    # Takes a list with one table of weights per sample, then the arrays in order.
    statistic: Callable[..., Tensor] = weighted_mean

    @property
    def possible_range(self) -> tuple[float, float]:
        """The least and the largest possible value."""
        if self.scale == 100:
            return 0.0, 1.0
        return (-inf if self.key.endswith("nll") else 0.0), inf

    def text(self, value: float, half: float | None = None, *, signed: bool = False) -> str:
        """The value as shown, without its unit, by `number_text`; `half`: half-width of its interval."""
        return number_text(self.scale * value, half and self.scale * half, self.digits, signed=signed)

    def interval_text(self, interval: Interval, half: float, *, signed: bool = False) -> str:
        """Both ends with the decimals of the value; "± 0.00001" if they would look alike."""
        lower, upper = (self.text(end, half, signed=signed) for end in interval[1:])
        return f"± {self.text(half)}" if lower == upper else f"{lower}{' to ' if signed else '–'}{upper}"

    def goodness(self, value: float) -> float:
        """Higher = better."""
        if isinstance(self.best, float):
            return -abs(value - self.best)
        return -value if self.best == "low" else value

    def is_negligible(self, first: float, second: float) -> bool:
        """Whether the difference is too small to matter: under ten units of the last digit shown, and under 2 % of the value.

        For shares, under 2 % of the rarer outcome: 99.98 % right differs from 99.95 %.
        """
        least = min(abs(first), abs(second))
        if self.scale == 100:
            least = min(least, 1 - max(first, second))
        return abs(first - second) < min(10 ** (1 - self.digits) / self.scale, 0.02 * least) or first == second


def measures(evaluation: Evaluation) -> list[Measure]:
    """The measures of an evaluation, in the order of a report."""
    own = _regression_measures(evaluation) if evaluation.kind == "regression" else _class_measures(evaluation)
    found = own + [m for name in evaluation.ood for m in _ood_measures(evaluation, name)]
    for name in evaluation.shift:
        shifted = {"group": f"shifted: {name}", "samples": (), "statistic": weighted_mean}
        found += [replace(m, key=f"shift/{name}/{m.key}", **shifted) for m in own]  # type: ignore[arg-type]
    found += _changed_measures("corrupt", "corrupted inputs") if evaluation.corruptions else []
    for name, group in ATTACKED.items():
        found += _changed_measures(f"attack/{name}", group)
    found += FOOLED_AND_NOISY
    found += _calibrated_measures(evaluation, own) if "calibrated/nll" in evaluation.metrics else []
    found += _guarantee_measures(evaluation) + AGAINST
    for key in region_keys(evaluation):
        region, quantity = region_words(key)
        unit = "nats" if quantity == "total uncertainty" else ""
        found.append(Measure(key, f"{quantity[0].upper()}{quantity[1:]} {region}", "regions", None, 1, 4, unit))
    return [m for m in found + COST if m.key in evaluation.metrics]


WRONG, IMPLICIT, REFERENCE = "training rows with wrong labels", "implicit corruptions", "against the reference"
FOOLED_AND_NOISY = [
    Measure("fool/confidence", "Confidence", "fooling inputs", "low", 100, 2, "%"),
    Measure("noise/memorised", "Answered as labelled", WRONG, "low", 100, 2, "%", (("noise/memorised",),)),
    Measure("noise/recovered", "Answered truly", WRONG, "high", 100, 2, "%", (("noise/recovered",),)),
    Measure("implicit/distance", "Change of a pixel", IMPLICIT, None, 100, 2, "%", (("implicit/distance",),)),
    Measure("implicit/explained", "Explained by it", IMPLICIT, None, 100, 1, "%", (("implicit/explained",),)),
]
AGAINST = [
    Measure("against/agreement", "Agreement", REFERENCE, "high", 100, 2, "%", (("against/agreement",),)),
    Measure("against/total_variation", "Total variation", REFERENCE, "low", 1, 4, "", (("against/total_variation",),)),
    Measure("against/halves/agreement", "Agreement of its halves", "the reference", None, 100, 2, "%"),
    Measure("against/halves/total_variation", "Total variation of its halves", "the reference", None, 1, 4),
    Measure("against/rhat", "Largest split-R̂", "the reference", None, 1, 3),
    Measure("against/effective_samples", "Least effective samples", "the reference", None, 1, 0),
]
COST = [
    Measure("temperature", "Temperature", "", None, 1, 3),
    Measure("members/count", "Functions averaged", "cost", None, 1, 0),
    Measure("cost/parameters", "Parameters", "cost", None, 1, 0),
    Measure("cost/memory_mb", "Memory", "cost", None, 1, 1, "MB"),
    Measure("cost/train_seconds", "Training", "cost", None, 1, 1, "s"),
    Measure("cost/predict_ms", "Prediction", "cost", None, 1, 3, "ms per input"),
]


def _ood_measures(evaluation: Evaluation, name: str) -> list[Measure]:
    """Measures of how well foreign inputs are told apart from test inputs."""
    told, scores = f"told apart from {name}", (f"test/score/{evaluation.score}", f"ood/{name}/score/{evaluation.score}")
    pair = ((scores[0],), (scores[1],)) if scores[1] in evaluation.arrays else ()
    fpr95, fpr95_in = _ranking_statistic(metrics.fpr95), _ranking_statistic(metrics.fpr95_in)
    found = [
        Measure(f"ood/{name}/auroc", "AUROC", told, "high", 100, 2, "%", pair, _ranking_statistic(metrics.auroc)),
        Measure(f"ood/{name}/aupr", "AUPR", told, "high", 100, 2, "%", pair, _ranking_statistic(metrics.aupr)),
        Measure(f"ood/{name}/aupr_adjusted", "AUPR, adjusted", told, "high", 100, 2, "%"),
        Measure(f"ood/{name}/fpr95", "FPR at 95 % TPR", told, "low", 100, 1, "%", pair, fpr95),
        Measure(f"ood/{name}/fpr95_in", "FPR, test inputs positive", told, "low", 100, 1, "%", pair, fpr95_in),
        Measure(f"ood/{name}/ece_union", "ECE, foreign inputs included", told, "low", 100, 2, "%"),
    ]
    if evaluation.kind == "segmentation":  # means over images
        found.insert(-1, Measure(f"ood/{name}/fpr95_nearest", "FPR at nearest 95 % TPR", told, "low", 100, 1, "%"))
        return [replace(m, samples=((m.key,),), statistic=weighted_mean) for m in found]
    return found


def _changed_measures(prefix: str, group: str) -> list[Measure]:
    """Measures of corrupted or attacked inputs."""
    return [
        Measure(f"{prefix}/accuracy", "Accuracy", group, "high", 100, 2, "%", ((f"{prefix}/example_accuracy",),)),
        Measure(f"{prefix}/nll", "NLL", group, "low", 1, 4, "nats", ((f"{prefix}/example_nll",),)),
        Measure(f"{prefix}/ece", "ECE", group, "low", 100, 2, "%"),
    ]


def member_measures(evaluation: Evaluation) -> list[Measure]:
    """The measures of a mixture's members."""
    percent = evaluation.kind != "regression"
    found = [
        Measure("members/count", "Members", "", None, 1, 0),
        Measure("nll", "NLL of the mixture", "", None, 1, 4, "nats"),
        Measure("members/nll_best", "NLL of the best member, chosen on test rows", "", None, 1, 4, "nats"),
        Measure("members/nll", "NLL of a member, mean", "", None, 1, 4, "nats"),
        Measure("members/diversity", "Diversity", "", None, 1, 4, "nats"),
        Measure("accuracy", "Accuracy of the mixture", "", None, 100, 2, "%"),
        Measure("members/accuracy_best", "Accuracy of the best member, chosen on test rows", "", None, 100, 2, "%"),
        Measure("members/accuracy", "Accuracy of a member, mean", "", None, 100, 2, "%"),
    ]
    for name in evaluation.ood:
        found += [
            Measure(f"ood/{name}/auroc", f"AUROC against {name}, mixture", "", None, 100, 2, "%"),
            Measure(f"members/ood/{name}/auroc", f"AUROC against {name}, a member, mean", "", None, 100, 2, "%"),
        ]
    found += [
        Measure("members/disagreement", "Disagreement of two members", "", None, 100, 2, "%"),
        Measure("members/effective_members", "Effective members", "", None, 1, 2),
    ]
    return [m for m in found if m.key in evaluation.metrics and (percent or m.scale == 1)]


def distance_measures() -> list[Measure]:
    """The measures of distances between members."""
    return [
        Measure("distances/weight", "Distance of weights", "", None, 1, 3),
        Measure("distances/function", "Distance of outputs", "", None, 1, 4, "rms"),
        Measure("distances/gradient", "Angle of input gradients", "", None, 1, 3, "rad"),
        Measure("distances/effective", "Effective members", "", None, 1, 2),
    ]


def _class_measures(evaluation: Evaluation) -> list[Measure]:
    test = "test"
    whole = evaluation.kind == "classification"  # pixels are not stored: only means have intervals
    confidence: tuple[ArrayNames, ...] = (("test/confidence", "test/correct"),) if whole else ()
    ranked: tuple[ArrayNames, ...] = (("test/score/max_probability", "test/correct"),) if whole else ()
    brier: tuple[ArrayNames, ...] = (("test/brier",),) if whole else ()
    counts: ArrayNames = ("test/target",) if not whole and "test/target" in evaluation.arrays else ()
    mean = _mean_of_pixels if counts else weighted_mean
    overlap = ("test/intersection", "test/union")
    overlaps: tuple[ArrayNames, ...] = (overlap,) if overlap[0] in evaluation.arrays else ()
    named = [key.removeprefix("iou/") for key in evaluation.metrics if key.startswith("iou/")]
    return [
        Measure("accuracy", "Accuracy", test, "high", 100, 2, "%", (("test/correct", *counts),), mean),
        Measure("nll", "NLL", test, "low", 1, 4, "nats", (("test/nll", *counts),), mean),
        Measure("brier", "Brier score", test, "low", 1, 4, "", brier),
        Measure(
            "ece", "ECE", test, "low", 100, 2, "%", confidence, lambda w, *each: confidence_ece(*each, weights=w[0])
        ),
        Measure("aurc", "AURC", test, "low", 100, 3, "%", ranked, _aurc),
        Measure("miou", "mIoU", test, "high", 100, 2, "%", overlaps, _miou),
        *(Measure(f"iou/{name}", name, "IoU by class", "high", 100, 1, "%") for name in named),
    ]


def _mean_of_pixels(weights: Sequence[Tensor], values: Tensor, counts: Tensor) -> Tensor:
    """(R,) mean over pixels of images' means (N,); counts: of every class (N, C)."""
    pixels = counts.double().sum(1)
    return weights[0] @ (pixels * values.double()) / (weights[0] @ pixels)


def _miou(weights: Sequence[Tensor], intersection: Tensor, union: Tensor) -> Tensor:
    """(R,) mIoU of images (N, C) counted with these weights."""
    return (weights[0] @ intersection.double() / (weights[0] @ union.double())).nanmean(1)


def _calibrated_measures(evaluation: Evaluation, own: Sequence[Measure]) -> list[Measure]:
    """Measures after calibration on held-out test rows, by temperature or another method."""
    group = "at its best temperature" if "calibrated/temperature" in evaluation.metrics else "calibrated"
    needed = {"accuracy": ["correct"], "nll": ["nll"], "ece": ["confidence", "correct"], "rmse": ["squared_error"]}
    samples = {key: tuple(f"calibrated/{name}" for name in names) for key, names in needed.items()}
    known = {f"calibrated/{each.key}": each for each in own if each.key in samples}
    found = [replace(each, key=key, group=group, samples=(samples[each.key],)) for key, each in known.items()]
    return [*found, Measure("calibrated/temperature", "Temperature", group, None, 1, 3)]


def _guarantee_measures(evaluation: Evaluation) -> list[Measure]:
    """Coverage and size of conformal sets, acceptance and risk of gates, each beside the promised value."""
    found = []
    for key, promised in [(key, value) for key, value in evaluation.metrics.items() if key.count("/") == 1]:
        name, quantity = key.split("/")
        if quantity == "level":
            group = f"{name}: {100 * promised:g} % coverage promised"
            size = "Classes in a set" if evaluation.kind == "classification" else "Width"
            hit: tuple[ArrayNames, ...] = ((f"test/{name}/covered",),)
            found += [
                Measure(f"{name}/coverage", "Coverage", group, promised, 100, 2, "%", hit),
                # No size is the best one: sets that are empty, or cover less than promised, are small.
                Measure(f"{name}/size", size, group, None, 1, 3, "", ((f"test/{name}/size",),)),
                Measure(f"{name}/worst_class/coverage", "Coverage of the worst class", group, "high", 100, 2, "%"),
                Measure(f"{name}/hard/coverage", "Coverage of the hardest third", group, "high", 100, 2, "%"),
                Measure(f"corrupt/{name}/coverage", "Coverage of corrupted inputs", group, promised, 100, 2, "%"),
                Measure(f"corrupt/{name}/size", f"{size}, corrupted inputs", group, None, 1, 3),
            ]
        elif quantity == "promised":
            alarm = f"{name}/refused" in evaluation.metrics
            group = f"{name}: at most {100 * promised:g} % {'refused' if alarm else 'errors'} promised"
            accepted, pair = (f"test/{name}/accepted",), (f"test/{name}/accepted", f"test/{name}/error")
            found += [
                Measure(f"{name}/refused", "Refused", group, None, 100, 2, "%"),
                Measure(f"{name}/accepted", "Answered", group, "high", 100, 2, "%", (accepted,)),
                Measure(f"{name}/risk", "Errors among answered", group, None, 100, 2, "%", (pair,), _risk),
                Measure(f"corrupt/{name}/accepted", "Answered, corrupted inputs", group, None, 100, 2, "%"),
                Measure(f"corrupt/{name}/risk", "Errors among answered, corrupted inputs", group, "low", 100, 2, "%"),
            ]
    return found


def _risk(weights: Sequence[Tensor], accepted: Tensor, error: Tensor) -> Tensor:
    """(R,) share of errors among accepted examples; 0 if a resample has none."""
    return (weights[0] @ (accepted * error)) / (weights[0] @ accepted).clamp(min=1)


def _regression_measures(evaluation: Evaluation) -> list[Measure]:
    test, unit = "test", evaluation.notes.get("unit", "")
    return [
        Measure("rmse", "RMSE", test, "low", 1, 4, unit, (("test/squared_error",),), root_mean),
        Measure("nll", "NLL", test, "low", 1, 4, "nats", (("test/nll",),)),
        Measure("gaussian_nll", "NLL of one Gaussian", test, "low", 1, 4, "nats", (("test/gaussian_nll",),)),
        Measure("crps", "CRPS", test, "low", 1, 4, unit, (("test/crps",),)),
        Measure("coverage90", "Coverage of 90 % intervals", test, 0.9, 100, 1, "%", (("test/covered90",),)),
        Measure("width90", "Width of 90 % intervals", test, None, 1, 3, unit),
    ]


def root_mean(weights: Sequence[Tensor], squared: Tensor) -> Tensor:
    """(R,) root of the mean of squared errors."""
    return weighted_mean(weights, squared).sqrt()


def _aurc(weights: Sequence[Tensor], score: Tensor, correct: Tensor) -> Tensor:
    """(R,) area under the risk–coverage curve; a low score is a high confidence, the loss is an error."""
    return metrics.aurc(-score, 1 - correct.double(), weights=weights[0])


def _ranking_statistic(metric: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of weights and scores that gives (R,) values of a metric of (score_in, score_ood)."""
    return lambda weights, score_in, score_ood: metric(score_in, score_ood, weights=(weights[0], weights[1]))
