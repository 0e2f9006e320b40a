"""The Evaluation of a run, from the files of its splits and its training."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dissensus.bench.rows.dataset_rows import SetKind
from dissensus.bench.rows.task_loaders import standardised_batches
from dissensus.bench.rows.task_rows import TaskData
from dissensus.bench.run import extra_measures
from dissensus.bench.run.learning_curves import with_curves, with_memorisation
from dissensus.bench.run.pixel_splits import evaluation_of_pixels, read_measured
from dissensus.bench.run.prediction_splits import ATTACK, CALIBRATION, CHOOSE, CORRUPT, GRID, TRAIN, geometry_of
from dissensus.bench.run.records import read_attacked, read_counts, read_predictions
from dissensus.bench.run.training_watch import ComparedRows, with_distances
from dissensus.bench.task.config import RunConfig
from dissensus.core.posterior import Posterior
from dissensus.evaluation.evaluate import checked_score, evaluate_predictions, parameter_count, precision_note
from dissensus.evaluation.evaluation import Evaluation, PredictionKind
from dissensus.evaluation.robustness_curves import implicit_changes
from dissensus.methods.parts.embedded_posterior import collapse_note
from dissensus.methods.embedded_ensembles import collapse_note
from dissensus.storage.run_files import is_number, read_json
from dissensus.methods.parts.embedded_posterior import collapse_note
from dissensus.storage.atomic_files import is_number, read_json
from dissensus.utils.file_errors import damage_error


def evaluation_of_run(
    folder: Path,
    splits: dict[str, Path],
    config: RunConfig,
    kind: SetKind,
    data: TaskData,
    posterior: Posterior,
    compared: ComparedRows,
    calibrated: Posterior | None,
) -> Evaluation:
    """The Evaluation of a trained run in a folder.

    `splits`: name -> file of predictions; `compared`: rows at which members are compared; `calibrated`: the posterior with
    the task's [calibration].
    """
    about: dict[str, Any] = {"corrupted": read_counts(splits[CORRUPT]) if CORRUPT in splits else None}
    about |= {"parameters": parameter_count(posterior), "temperature": float(posterior.temperature)}
    if kind == "segmentation":
        parts = {split: read_measured(splits.pop(split)) for split in [*splits] if split not in (CORRUPT, CHOOSE)}
        score = checked_score(config.evaluation.get("score"), kind, 2)
        evaluation = evaluation_of_pixels(parts, score=score, **about)
    else:
        attacked = read_attacked(splits[ATTACK]) if ATTACK in splits else None
        evaluation = evaluation_of_rows(splits, config.evaluation, kind, attacked=attacked, **about)
    facts = read_json(folder / "training.json")
    if not is_number(facts.get("seconds")):
        raise damage_error(folder / "training.json", "without 'seconds'")
    evaluation = replace(
        evaluation,
        metrics=evaluation.metrics | {"cost/train_seconds": facts["seconds"]},
        notes={"classes": "\n".join(data.classes)}
        | precision_note(config.precision)
        | collapse_note(posterior, evaluation.metrics),
    )
    if GRID in splits:
        on_grid = read_predictions(splits[GRID]).predictive
        evaluation = extra_measures.with_grid(evaluation, on_grid, geometry_of(config, data), data.train.y)
    if TRAIN in splits:
        said = read_predictions(splits[TRAIN])
        evaluation = with_memorisation(extra_measures.with_training_rows(evaluation, said), said, data.train)
    if CALIBRATION in splits:
        evaluation = _with_calibration(evaluation, splits, calibrated, data)
    if CHOOSE in splits:
        evaluation = extra_measures.with_choice(evaluation, read_counts(splits[CHOOSE]))
    if "distances_every" in config.evaluation:
        evaluation = with_distances(evaluation, folder, posterior, compared)
    if "implicit" in config.evaluation:
        rows = data.test.sample(config.evaluation.get("implicit_rows", 10), seed=0)
        x, *_ = next(iter(standardised_batches(rows, data.standardiser, batch_size=len(rows.y))))
        penalty = config.evaluation["implicit"]
        changes = implicit_changes(posterior, x, data.standardiser, penalty=penalty)
        evaluation = extra_measures.with_metrics(evaluation, *changes)
    if "curves_every" in config.evaluation:
        evaluation = with_curves(evaluation, folder, data.train)
    return evaluation


def _with_calibration(
    evaluation: Evaluation, splits: Mapping[str, Path], calibrated: Posterior | None, data: TaskData
) -> Evaluation:
    test, held_out = (read_predictions(splits[each]) for each in ("test", CALIBRATION))
    correction = None if calibrated is None else calibrated.current_correction()
    evaluation = extra_measures.with_calibration(evaluation, test, held_out, correction)
    if calibrated is None or not calibrated.promises:
        return evaluation
    return extra_measures.with_guarantees(evaluation, test, calibrated, data.targets)


def evaluation_of_rows(
    splits: Mapping[str, Path], asked: Mapping[str, Any], kind: PredictionKind, **about: Any
) -> Evaluation:
    """The Evaluation of a classification or a regression from the files of its splits; `asked`: the task's [evaluation]."""
    test = read_predictions(splits["test"])
    elsewhere = {
        group: {s.removeprefix(group): read_predictions(path) for s, path in splits.items() if s.startswith(group)}
        for group in ("ood-", "shift-")
    }
    score = checked_score(asked.get("score"), kind, test.members)
    ood, shift = elsewhere["ood-"], elsewhere["shift-"]
    return evaluate_predictions(test, ood=ood, shift=shift, score=score, prevalence=asked.get("prevalence"), **about)
