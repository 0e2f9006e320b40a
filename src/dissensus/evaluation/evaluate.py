"""evaluate: all metrics of a posterior from one draw, on test data and on foreign, shifted, corrupted and attacked inputs."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dissensus import metrics
from dissensus.calibration.conformal import choose_score
from dissensus.calibration.selective import Gate
from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.posterior import Posterior, expect_posterior, inference_context
from dissensus.data.input_transforms import Standardiser
from dissensus.engine.loader import Loader
from dissensus.engine.prediction_loop import FixedDraw, PredictionPrecision, draw_once
from dissensus.evaluation import robustness_curves, row_metrics, segmentation
from dissensus.evaluation.evaluation import Evaluation, PredictionKind
from dissensus.evaluation.guarantees import Promises, guarantee_details, guarantee_metrics
from dissensus.evaluation.loader_predictions import MetricFunctions, Predictions, predictions
from dissensus.evaluation.robustness_curves import AttackCurves, AttackedInputs, CorruptedCounts, Corruptions
from dissensus.methods.embedded_ensembles import collapse_note
from dissensus.utils.checks import suggest_keywords
from dissensus.utils.progress import LoaderProgress

log = logging.getLogger("dissensus")

Loaders = Mapping[str, Iterable[Any]]


@suggest_keywords
def evaluate(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    ood: Loaders | None = None,
    shift: Loaders | None = None,
    corrupt: str | Sequence[str] | Corruptions | None = None,
    attack: AttackCurves | None = None,
    score: str | None = None,
    classes: Sequence[str] | None = None,
    precision: PredictionPrecision = "float32",
    operations: bool = False,
    progress: bool | str = True,
) -> Evaluation:
    """Measures a posterior on test data: accuracy, likelihood, calibration, and on request OOD, shift, corruptions, attacks.

    All numbers come from one draw of functions. Conformal sets and gates of the posterior are measured too, as NAME/coverage,
    size, risk and accepted, also under corruption and on the other sets. If the posterior has `inputs`, all loaders give raw
    inputs; corruptions and attacks then act on pixels in [0, 1].

    Args:
        loader: test batches (x, y). Keep a fixed order to compare methods example by example. Of soft labels (B, C), nll and
            brier are those of the whole distribution, all else counts the likeliest class.
        ood: name -> foreign inputs: a loader of (x, y), whose targets are ignored, a loader of x, or a tensor x
            (segmentation: a loader of (x, mask), 1 at OOD pixels).
        shift: name -> loader of inputs from another distribution, with targets of the same task.
        corrupt: "all", "benchmark", a list of corruptions or `Corruptions(...)`, applied to the loader's images in a second
            pass over the loader. None applies none.
        attack: `AttackCurves(epsilons=[...])`: attacks on the loader's inputs, in one more pass. None runs none.
        score: the score that ranks OOD inputs: "max_probability" (None), "total", "epistemic" or "energy"; for a
            regression "total" (None) or "epistemic". Several labels have the first three, summed over labels.
        classes: class names, for a segmentation's iou/CLASS and for reports; None takes those of the posterior.
        precision: "bf16" runs the networks in mixed precision, but attacks; it warns of promises fitted in float32.
        operations: whether to count the floating-point operations per input, as `count_operations` does.
        progress: whether to show progress, or its title.

    Returns:
        An `Evaluation`: `.metrics` by flat name ("nll", "ood/NAME/auroc", …), `.table()` as text, `.examples()` by row.

    Raises:
        Diverged: a member predicts NaN.
    """
    classes = expect_posterior(posterior).classes if classes is None else classes
    spec = corrupt if corrupt is None or isinstance(corrupt, Corruptions) else Corruptions(corrupt)
    pixels = getattr(posterior.inputs, "standardiser", None)  # from pixels in [0, 1] to the network's inputs
    if pixels is not None:
        spec = spec and replace(spec, standardiser=spec.standardiser or pixels)
        attack = attack and replace(attack, standardiser=attack.standardiser or pixels)
    ood, shift = _named_sets("ood", ood), _named_sets("shift", shift)
    foreign = {name: Loader.complete_foreign(each, posterior) for name, each in ood.items()}
    moved = {name: Loader.complete(each, posterior) for name, each in shift.items()}
    data = Loader.complete(loader, posterior)
    parts = 1 + len(ood) + len(shift) + (spec is not None) + (attack is not None)
    with (
        draw_once(posterior, precision) as functions,
        LoaderProgress(parts, title=f"evaluating {posterior.name}", show=progress) as bar,
    ):
        kind, once, first = _kind_of_predictions(functions, data)
        test = bar.track_batches(once, "test", data.length)
        ood, shift = ({n: bar.track_batches(e, n, e.length) for n, e in sets.items()} for sets in (foreign, moved))
        corruptible, attackable = (bar.track_batches(data, n, data.length) for n in ("corruptions", "attacks"))
        score = checked_score(score, kind, functions.members)
        if attack is not None:
            check_attackable(kind)
        corrupted = None if spec is None else partial(robustness_curves.corrupted_counts, functions, corruptible, spec)
        if kind in ("segmentation", "tokens"):
            found = _evaluate_segmentation(functions, test, ood, shift, corrupted, score, classes, kind)
        else:
            attacker = robustness_curves.attacked_inputs
            attacked = None if attack is None else partial(attacker, functions, attackable, attack)
            shown = pixels if spec is None else spec.standardiser
            found = _evaluate_rows(functions, test, ood, shift, corrupted, attacked, score, classes, shown)
    if operations:
        counts = map(float, count_operations(posterior, first, raw=False))
        found.metrics.update(zip(("cost/network_operations", "cost/operations"), counts, strict=True))
    cautions = collapse_note(posterior, found.metrics)
    for caution in cautions.values():
        log.warning("%s", caution)
    return replace(found, notes=_notes(posterior, precision, classes) | cautions)


def _named_sets(keyword: str, sets: Loaders | None) -> Loaders:
    """Name -> loader, of a keyword of `evaluate`; raises if they are no dict, or a name cannot be part of a metric's name."""
    if sets is not None and not isinstance(sets, Mapping):
        got = type(sets).__name__
        raise TypeError(f"expected {keyword} as a dict of loaders, got {got}; pass {keyword}={{'name': loader}}")
    for name in sets or {}:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"expected names without '/' for OOD and shift sets, got {name!r}; rename it")
    return sets or {}


def _evaluate_rows(
    functions: FixedDraw,
    loader: Iterable[Any],
    ood: Loaders,
    shift: Loaders,
    corrupted: Callable[[], CorruptedCounts] | None,
    attacked: Callable[[], AttackedInputs] | None,
    score: str,
    classes: Sequence[str] | None,
    standardiser: Standardiser | None,
) -> Evaluation:
    """The Evaluation of a classification or regression. `standardiser`: of the images, which are shown without it."""
    posterior = functions.posterior
    test = predictions(functions, loader, picture=None if standardiser is None else standardiser.inverse)
    like, outputs = test.shapes, test.predictive.mean.shape[1:].numel()
    if classes is not None and len(classes) != outputs:
        raise ValueError(f"expected {outputs} class names, got {len(classes)}; pass one name per output")
    return evaluate_predictions(
        test,
        ood={n: predictions(functions, each, name=n, labelled=False, like=like) for n, each in ood.items()},
        shift={n: predictions(functions, each, name=n, like=like) for n, each in shift.items()},
        corrupted=None if corrupted is None else corrupted(),
        attacked=None if attacked is None else attacked(),
        score=score,
        storage=storage_cost(posterior),
        temperature=float(posterior.temperature),
        promises=dict(posterior.promises.items()),
    )


def _notes(posterior: Posterior, precision: PredictionPrecision, classes: Sequence[str] | None) -> dict[str, str]:
    calibration, unit = posterior.calibration, getattr(posterior.likelihood, "unit", None)
    about = {} if calibration is None else {"calibration": f"{calibration.kind}, {calibration.facts['rows']} rows"}
    about |= {"unit": unit} if unit else {}
    return about | precision_note(precision) | ({} if classes is None else {"classes": "\n".join(classes)})


def precision_note(precision: PredictionPrecision) -> dict[str, str]:
    """The note of an `Evaluation` on the precision of its predictions; empty in float32."""
    return {} if precision == "float32" else {"precision": precision}


def evaluate_predictions(
    test: Predictions,
    *,
    ood: Mapping[str, Predictions],
    shift: Mapping[str, Predictions],
    corrupted: CorruptedCounts | None,
    attacked: AttackedInputs | None = None,
    score: str,
    storage: Mapping[str, float],
    prevalence: float | None = None,
    temperature: float = 1.0,
    promises: Promises | None = None,
) -> Evaluation:
    """The Evaluation of given predictions; prevalence: share of foreign inputs in aupr_adjusted and ece_union."""
    part = metric_functions(test)
    classes = part is row_metrics.CLASSIFICATION
    found, scores = part.metrics(test), part.scores(test)
    arrays = part.arrays(test) | {f"test/score/{name}": value for name, value in scores.items()} | test.examples
    for name, each in ood.items():
        foreign = part.scores(each)
        ranking = row_metrics.ood_metrics(scores[score], foreign[score], prevalence)
        if classes:
            both = test.predictive.mean, test.labels, each.predictive.mean
            ranking["ece_union"] = float(metrics.union_ece(*both, prevalence=prevalence))
        found |= {f"ood/{name}/{key}": value for key, value in ranking.items()}
        arrays |= {f"ood/{name}/score/{key}": value for key, value in foreign.items()}
    for name, each in shift.items():
        found |= {f"shift/{name}/{key}": value for key, value in part.metrics(each).items()}
    if promises:
        true = test.labels if classes else test.targets
        details, kept = guarantee_details(promises, test.row_outcomes, true, test.predictive)
        found, arrays = found | guarantee_metrics(promises, test.row_outcomes) | details, arrays | kept
        gates = {name: promise for name, promise in promises.items() if isinstance(promise, Gate)}
        # Foreign inputs have no truth to cover.
        for group, sets, asked in (("ood", ood, gates), ("shift", shift, promises)):
            for name, each in sets.items():
                numbers = guarantee_metrics(asked, each.row_outcomes)
                found |= {f"{group}/{name}/{key}": value for key, value in numbers.items()}
    members = part.members(test) | test.network_metrics()
    if classes and test.members > 1:
        members |= _member_ood(test, ood, score)
    if attacked is not None:
        found, arrays = found | attacked.metrics(), arrays | attacked.arrays()
    clean = Evaluation(part.kind, found, arrays, score, tuple(ood), tuple(shift))
    return complete_evaluation(clean, corrupted, members, temperature, storage, test.milliseconds)


def metric_functions(test: Predictions) -> MetricFunctions:
    """The metric functions for this kind of predictions."""
    every = (row_metrics.CLASSIFICATION, row_metrics.MULTILABEL, row_metrics.REGRESSION)
    return next(each for each in every if each.kind == test.predictive.kind)


def complete_evaluation(
    found: Evaluation,
    corrupted: CorruptedCounts | None,
    members: Mapping[str, float],
    temperature: float,
    storage: Mapping[str, float],
    milliseconds: float,
) -> Evaluation:
    """Adds the parts common to all kinds of predictions: corrupted inputs, members, temperature and cost."""
    # A reader of the numbers must know the temperature.
    stated = {} if temperature == 1.0 else {"temperature": temperature}
    cost = {**storage, "cost/predict_ms": milliseconds}
    if corrupted is not None:
        numbers, arrays = found.metrics | corrupted.metrics(), found.arrays | corrupted.arrays()
        kinds: dict[str, Any] = {"corruptions": corrupted.types, "severities": corrupted.severities}
        found = replace(found, metrics=numbers, arrays=arrays, **kinds)
    return replace(found, metrics={**found.metrics, **members, **stated, **cost})


def checked_score(score: str | None, kind: PredictionKind, members: int) -> str:
    """The score that ranks OOD inputs; raises if it does not exist."""
    score = choose_score(score, row_metrics.OOD_SCORES[kind], kind)
    if score == "epistemic" and kind != "regression" and members == 1:
        raise ValueError("expected several members for an epistemic score, got one; rank by max_probability or total")
    return score


def check_attackable(kind: str) -> None:
    """Raises unless predictions have one class per input."""
    if kind != "classification":
        raise ValueError(f"expected a classification to attack, got a {kind}; pass attack=None")


def storage_cost(posterior: Posterior) -> dict[str, float]:
    """Number of parameters of all members together, frozen ones included, and megabytes of all that is stored."""
    stored = sum(each.numel() * each.element_size() for each in chain(posterior.parameters(), posterior.buffers()))
    count = sum(parameter.numel() for parameter in posterior.parameters())
    return {"cost/parameters": float(count), "cost/memory_mb": stored / 1e6}


def count_operations(posterior: Posterior, x: Inputs, *, raw: bool = True) -> tuple[int, int]:
    """(of one drawn network, of all together) floating-point operations of a prediction for the first of inputs x.

    Counts matrix products, convolutions and attention on the CPU; a multiplication with its addition is two. Layers that
    networks share run once. `raw`: whether x is as `posterior.predict` takes it, else as the network does.
    """
    x = expect_posterior(posterior).transform_inputs(x) if raw else x
    x = batches.map_tensors(x, lambda tensor: tensor[:1].cpu())
    posterior, counts = copy.deepcopy(posterior).cpu(), []  # programs and graphs of a GPU hide what they compute
    with inference_context(posterior):
        drawn = posterior.draw()
        for run in (partial(batches.call_network, drawn.member(0).eval()), drawn.describe):
            run(x)  # some layers run twice at first, to see shapes
            with FlopCounterMode(display=False) as counter:
                run(x)
            counts.append(counter.get_total_flops())
    return counts[0], counts[1]


def _member_ood(test: Predictions, ood: Mapping[str, Predictions], score: str) -> dict[str, float]:
    """members/ood/SET/auroc: mean AUROC of single members."""
    inside = row_metrics.member_scores(test, score)
    found = {}
    for name, each in ood.items():
        outside = row_metrics.member_scores(each, score)
        if inside is not None and outside is not None:
            alone = [row_metrics.ood_metrics(i, o)["auroc"] for i, o in zip(inside, outside, strict=True)]
            found[f"members/ood/{name}/auroc"] = fmean(alone)
    return found


def _kind_of_predictions(functions: FixedDraw, loader: Iterable[Any]) -> tuple[PredictionKind, Iterable[Any], Inputs]:
    """The kind of predictions, judged by the first batch, an iterator over all batches, and the first one's inputs."""
    left = iter(loader)  # the others are checked by those who read them
    first = next(functions.posterior.read(left, anywhere=True), None)
    if first is None:
        raise ValueError("expected at least one batch from the loader, got none; pass a loader with data")
    outputs = torch.zeros(1, *functions.posterior.output_shape(first.x)[1:], device=functions.device)
    described = functions.drawn.particles.map_members(lambda member: member.likelihood.describe(outputs))
    predictive = functions.drawn.likelihood.predictive(*described)
    pixels = predictive.kind == "classification" and predictive.mean.ndim > 2
    kind: Any = "segmentation" if pixels else predictive.kind
    if kind not in row_metrics.OOD_SCORES:
        got, advice = type(predictive).__name__, "return one of them from the likelihood's predictive()"
        raise TypeError(f"expected a ClassificationPredictive or RegressionPredictive, got {got}; {advice}")
    return kind, chain([first], left), first.x


def _evaluate_segmentation(
    functions: FixedDraw,
    loader: Iterable[Any],
    ood: Loaders,
    shift: Loaders,
    corrupted: Callable[[], CorruptedCounts] | None,
    score: str,
    classes: Sequence[str] | None,
    kind: PredictionKind,
) -> Evaluation:
    if kind == "tokens" and (ood or corrupted is not None):
        hint = "rank texts by predictive.sequence(mask).total"
        raise ValueError(f"expected no ood= or corrupt= for tokens, got some; {hint}")
    sums, shapes, images = segmentation.pixel_sums(functions, loader)
    found, arrays = sums.metrics(classes), sums.arrays()
    for name, each in ood.items():
        rankings, foreign = segmentation.pixel_ood(functions, each, score, name=name, like=shapes)
        found[f"ood/{name}/ece_union"] = float(sums.bins.merge(foreign).ece())
        numbers, of_images = segmentation.ranking_numbers(rankings, score, f"ood/{name}")
        found, arrays = found | numbers, arrays | of_images
    for name, each in shift.items():
        moved, _, _ = segmentation.pixel_sums(functions, each, name=name, like=shapes)
        found |= {f"shift/{name}/{key}": value for key, value in moved.metrics(classes).items()}
    if kind == "tokens":
        likelihoods = {key.removesuffix("nll"): value for key, value in found.items() if key.endswith("nll")}
        found |= {f"{key}perplexity": math.exp(min(value, 709.0)) for key, value in likelihoods.items()}
    clean = Evaluation(kind, found, arrays, score, tuple(ood), tuple(shift))
    damaged, members = None if corrupted is None else corrupted(), sums.member_metrics()
    temperature, storage = float(functions.posterior.temperature), storage_cost(functions.posterior)
    return complete_evaluation(clean, damaged, members, temperature, storage, 1000 * sums.seconds / images)
