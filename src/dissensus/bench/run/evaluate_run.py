"""The Evaluation of a run, from the files of its splits and its training.

Each function `with_…` returns the evaluation with more numbers and arrays than `dissensus.evaluate` gives.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.bench.rows.dataset_rows import standardised_batches
from dissensus.bench.rows.named_sets import Geometry
from dissensus.bench.run import prediction_splits, training_watch
from dissensus.bench.run.run_folder import read_attacked, read_counts, read_predictions
from dissensus.bench.run.training_watch import ComparedRows
from dissensus.calibration.calibrate import best_temperature
from dissensus.core.calibrated import Correction
from dissensus.core.posterior import Posterior
from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.data.input_transforms import Standardiser
from dissensus.evaluation.evaluate import (
    checked_score,
    evaluate_predictions,
    metric_functions,
    precision_note,
    storage_cost,
)
from dissensus.evaluation.evaluation import Evaluation, PredictionKind
from dissensus.evaluation.guarantees import ANSWERS, guarantee_details, guarantee_metrics, guarantee_outcomes
from dissensus.evaluation.loader_predictions import Predictions
from dissensus.evaluation.robustness_curves import CorruptedCounts, implicit_changes
from dissensus.methods.embedded_ensembles import collapse_note
from dissensus.storage.atomic_files import is_number, read_json
from dissensus.utils.file_errors import damage_error


def evaluation_of_run(
    run: Any, splits: dict[str, Path], posterior: Posterior, compared: ComparedRows, calibrated: Posterior | None
) -> Evaluation:
    """The Evaluation of a trained `Run`.

    `splits`: name -> file of predictions; `compared`: rows at which members are compared; `calibrated`: with [calibration].
    """
    folder, config, kind, data = run.folder, run.config, run.kind, run.data
    both = (prediction_splits.CORRUPT, prediction_splits.CHOOSE)
    corrupted, chosen = (read_counts(splits.pop(each)) if each in splits else None for each in both)
    about: dict[str, Any] = {"corrupted": corrupted, "temperature": float(posterior.temperature)}
    about["storage"] = storage_cost(posterior)
    if kind == "segmentation":
        parts = {split: prediction_splits.read_measured(splits.pop(split)) for split in [*splits]}
        score = checked_score(config.evaluation.get("score"), kind, 2)
        evaluation = prediction_splits.evaluation_of_pixels(parts, score=score, **about)
    else:
        attacked = read_attacked(splits[prediction_splits.ATTACK]) if prediction_splits.ATTACK in splits else None
        evaluation = evaluation_of_rows(splits, config.evaluation, kind, attacked=attacked, **about)
    facts = read_json(folder / "training.json")
    if not is_number(facts.get("seconds")):
        raise damage_error(folder / "training.json", "without 'seconds'")
    notes = {"classes": "\n".join(data.classes)} | precision_note(config.precision)
    notes |= collapse_note(posterior, evaluation.metrics)
    evaluation = training_watch.with_metrics(replace(evaluation, notes=notes), {"cost/train_seconds": facts["seconds"]})
    if prediction_splits.GRID in splits:
        on_grid = read_predictions(splits[prediction_splits.GRID]).predictive
        evaluation = with_grid(evaluation, on_grid, prediction_splits.geometry_of(config, data), data.train.y)
    if prediction_splits.TRAIN in splits:
        said = read_predictions(splits[prediction_splits.TRAIN])
        evaluation = training_watch.with_memorisation(with_training_rows(evaluation, said), said, data.train)
    if prediction_splits.CALIBRATION in splits:
        test, held_out = (read_predictions(splits[each]) for each in ("test", prediction_splits.CALIBRATION))
        correction = None if calibrated is None else calibrated.current_correction()
        evaluation = with_calibration(evaluation, test, held_out, correction)
        if calibrated is not None and calibrated.promises:
            evaluation = with_guarantees(evaluation, test, calibrated, data.targets)
    if chosen is not None:
        evaluation = with_choice(evaluation, chosen)
    evaluation = training_watch.with_distances(evaluation, folder, posterior, compared)
    if "implicit" in config.evaluation:
        rows = data.test.sample(config.evaluation.get("implicit_rows", 10), seed=0)
        x, *_ = next(iter(standardised_batches(rows, data.standardiser, batch_size=len(rows.y))))
        changes = implicit_changes(posterior, x, data.standardiser, penalty=config.evaluation["implicit"])
        evaluation = training_watch.with_metrics(evaluation, *changes)
    return training_watch.with_curves(evaluation, folder, data.train)


def evaluation_of_rows(files: dict[str, Path], asked: dict[str, Any], kind: PredictionKind, **about: Any) -> Evaluation:
    """The Evaluation of a classification or a regression from the files of its splits; `asked`: the task's [evaluation]."""
    test = read_predictions(files["test"])
    ood, shift = (
        {s.removeprefix(group): read_predictions(path) for s, path in files.items() if s.startswith(group)}
        for group in ("ood-", "shift-")
    )
    score = checked_score(asked.get("score"), kind, test.members)
    return evaluate_predictions(test, ood=ood, shift=shift, score=score, prevalence=asked.get("prevalence"), **about)


TEMPERED = ("nll", "confidence", "correct", "squared_error")  # arrays test/… needed for intervals
TRAINED = ("accuracy", "nll", "rmse", "members/accuracy", "members/nll")
SHOWN = 10  # members drawn as single lines
POINTS = 2000  # most training rows drawn


def with_calibration(
    evaluation: Evaluation, test: Predictions, held: Predictions, lens: Correction | None = None
) -> Evaluation:
    """Adds calibration/nll of the held-out test rows and calibrated/NAME of the other test rows.

    `calibration/nll` is at the posterior's temperature. `calibration/nll_scaled` is calibrated: by the lens, which was fitted
    on held-out rows, or, if there is none or it changes nothing, at their best temperature, `calibrated/temperature`.
    """
    part = metric_functions(test)
    own = evaluation.metrics.get("temperature", 1.0)  # in both predictives; the best temperature is relative to it
    if lens is None or lens == Correction(1.0, None):
        lens = Correction(best_temperature(held.predictive.apply_temperature(1 / own), held.targets), None)
    seen, seen_held = (replace(p, predictive=_recalibrate(p.predictive, lens, own)) for p in (test, held))
    found = {f"calibrated/{key}": value for key, value in part.metrics(seen).items()}
    if lens.calibration is None:
        found["calibrated/temperature"] = lens.temperature
    for name, rows in (("nll", held), ("nll_scaled", seen_held)):
        found[f"calibration/{name}"] = -float(rows.predictive.log_prob(rows.targets).double().mean())
    arrays = {key.removeprefix("test/"): value for key, value in part.arrays(seen).items()}
    kept = {name: value for name, value in arrays.items() if name in TEMPERED or name.startswith("reliability/")}
    return training_watch.with_metrics(evaluation, found, {f"calibrated/{name}": value for name, value in kept.items()})


def with_guarantees(
    evaluation: Evaluation, test: Predictions, posterior: Posterior, targets: Standardiser | None
) -> Evaluation:
    """Adds conformal/… and selective/… of a posterior's promises; targets: the standardiser of the learned targets."""
    own, rows = evaluation.metrics.get("temperature", 1.0), test
    if targets is not None:  # thresholds are in units of the standardised targets
        means, variances = test.predictive.defining_tensors()
        learned = RegressionPredictive((means - targets.mean) / targets.std, variances / targets.std**2)
        rows = replace(test, predictive=learned, targets=targets(test.targets))
    seen = _recalibrate(rows.predictive, posterior.current_correction(), own)
    promises = dict(posterior.promises.items())
    found = guarantee_outcomes(promises, seen, torch.Generator().manual_seed(0), y=rows.targets)
    found = {key: value for key, value in found.items() if not key.endswith(ANSWERS)}
    if targets is not None:
        # A mean over several outputs has no common unit.
        scale = float(targets.std) if targets.std.numel() == 1 else math.nan
        found = {key: scale * value if key.endswith("/size") else value for key, value in found.items()}
    details, arrays = guarantee_details(promises, found, rows.targets, seen)
    return training_watch.with_metrics(evaluation, guarantee_metrics(promises, found) | details, arrays)


def _recalibrate(predictive: Predictive, lens: Correction, own: float) -> Predictive:
    """A mixture recorded at its posterior's temperature, seen through another lens."""
    plain = predictive if own == 1.0 else predictive.apply_temperature(1 / own)
    return lens.correct_mixture(lens.correct_members(plain))


def with_choice(evaluation: Evaluation, counts: CorruptedCounts) -> Evaluation:
    """Adds the criteria for choosing settings: validation/NAME of clean, validation/corrupt/NAME of corrupted rows."""
    names = ("accuracy", "nll", "ece")
    clean = dict(zip((f"validation/{name}" for name in names), counts.clean.tolist(), strict=True))
    damaged = {f"validation/{key}": value for key, value in counts.metrics().items()}
    kept = {key: value for key, value in damaged.items() if key.removeprefix("validation/corrupt/") in names}
    return training_watch.with_metrics(evaluation, clean | kept)


def with_training_rows(evaluation: Evaluation, said: Predictions) -> Evaluation:
    """Adds train/NAME of the training rows: accuracy or RMSE, NLL, and those of members."""
    part = metric_functions(said)
    found = part.metrics(said) | part.members(said)
    return training_watch.with_metrics(evaluation, {f"train/{key}": found[key] for key in TRAINED if key in found})


def with_reference(evaluation: Evaluation, test: Predictions, reference: Predictions) -> Evaluation:
    """Adds against/agreement (of classes) and against/total_variation between this predictive and the reference's."""
    distances = _distances(test.predictive, reference.predictive)
    found = {f"against/{name}": float(each.mean()) for name, each in distances.items()}
    arrays = {f"against/{name}": each.float() for name, each in distances.items()}
    return training_watch.with_metrics(evaluation, found, arrays)


def with_reference_halves(evaluation: Evaluation, reference: Predictions) -> Evaluation:
    """Adds against/halves/NAME, the distances between the two halves of the reference's functions, and its convergence.

    With an even number of chains each half has half of the chains: two references would be as far apart.
    """
    described, kind = reference.predictive.defining_tensors(), type(reference.predictive)
    chains = described[0].reshape(reference.networks, -1, *described[0].shape[1:])  # (M, S, N, C)
    first, second = (kind(*half) for half in zip(*(each.chunk(2) for each in described), strict=True))
    found = {f"against/halves/{name}": float(each.mean()) for name, each in _distances(first, second).items()}
    found["against/rhat"] = float(metrics.split_rhat(chains).max())
    found["against/effective_samples"] = float(metrics.effective_sample_size(chains).min())
    return training_watch.with_metrics(evaluation, found)


def _distances(mine: Predictive, theirs: Predictive) -> dict[str, Tensor]:
    """Name -> (N,) float64."""
    if isinstance(mine, ClassificationPredictive):
        agrees = mine.mean.argmax(1) == theirs.mean.argmax(1)
        return {"agreement": agrees.double(), "total_variation": metrics.total_variation_values(mine.mean, theirs.mean)}
    distances = metrics.mixture_total_variation_values(*mine.defining_tensors(), *theirs.defining_tensors())  # (N, D)
    return {"total_variation": distances.mean(1)}


def with_grid(evaluation: Evaluation, predictive: Predictive, geometry: Geometry, targets: Tensor) -> Evaluation:
    """Adds region/NAME/sd or region/NAME/total, and arrays grid/…; targets: of the training rows.

    Means over the region. sd: standard deviation of members' means, √epistemic; total: in nats.
    """
    if len(predictive) != len(geometry.positions) or predictive.mean.ndim != 2:
        raise ValueError(f"expected predictions at all grid points, got {predictive}; evaluate with --again")
    seen, known = geometry.training_positions[:POINTS], targets[:POINTS]
    arrays = {"positions": geometry.positions, "seen": seen, "targets": known}
    if isinstance(predictive, ClassificationPredictive):
        quantity, values = "total", predictive.total  # (n,)
        arrays["total"] = values
    else:
        quantity, values = "sd", predictive.epistemic[:, 0].sqrt()  # (n,)
        arrays |= {"mean": predictive.mean[:, 0], "sd": values, "members": predictive.member_means[:SHOWN, :, 0]}
    means = {name: float(values[where].double().mean()) for name, where in geometry.regions.items()}
    found = {f"region/{name}/{quantity}": mean for name, mean in means.items()}
    single = {f"grid/{name}": each.float() if each.is_floating_point() else each for name, each in arrays.items()}
    return training_watch.with_metrics(evaluation, found, single)
