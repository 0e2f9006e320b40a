"""Predictions and evaluations as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dissensus.bench.files import damaged, read_json, read_tensors, write_json, write_tensors
from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.evaluate import Evaluation
from dissensus.evaluation.corrupted import CorruptedCounts
from dissensus.evaluation.predictions import Predictions

COUNTS = ("nll", "counts", "confidence", "correct", "clean", "example_accuracy", "example_nll")
FACTS = ("kind", "score", "ood", "shift", "corruptions", "severities", "notes")


def write_predictions(path: Path, predictions: Predictions) -> None:
    described = predictions.predictive.described()
    names = _described(predictions.predictive)
    tensors = {"targets": predictions.targets, **dict(zip(names, described, strict=True)), **predictions.examples}
    if predictions.energy is not None:
        tensors["energy"] = predictions.energy
    facts = {
        "kind": type(predictions.predictive).__name__,
        "shapes": predictions.shapes,
        "milliseconds": predictions.milliseconds,
    }
    write_tensors(path, tensors, facts)


def read_predictions(path: Path) -> Predictions:
    tensors, facts = read_tensors(path)
    try:
        predictive: Predictive
        if facts["kind"] == "ClassificationPredictive":
            predictive = ClassificationPredictive(tensors["log_probabilities"])
        else:
            predictive = RegressionPredictive(tensors["means"], tensors["variances"])
        return Predictions(
            predictive=predictive,
            targets=tensors["targets"],
            energy=tensors.get("energy"),
            examples={name: tensor for name, tensor in tensors.items() if name.startswith("examples/")},
            shapes=tuple(map(tuple, facts["shapes"])),
            milliseconds=facts["milliseconds"],
        )
    except (KeyError, TypeError) as error:
        raise damaged(path, f"without {error}") from error


def write_counts(path: Path, counts: CorruptedCounts) -> None:
    facts = {"types": counts.types, "severities": counts.severities}
    write_tensors(path, {name: getattr(counts, name) for name in COUNTS}, facts)


def read_counts(path: Path) -> CorruptedCounts:
    tensors, facts = read_tensors(path)
    try:
        return CorruptedCounts(
            types=tuple(facts["types"]), severities=tuple(facts["severities"]), **{n: tensors[n] for n in COUNTS}
        )
    except KeyError as error:
        raise damaged(path, f"without {error}") from error


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """arrays.safetensors, then metrics.json."""
    write_tensors(folder / "arrays.safetensors", evaluation.arrays, {})
    facts = {name: getattr(evaluation, name) for name in FACTS}
    write_json(folder / "metrics.json", facts | {"metrics": evaluation.metrics})


def read_evaluation(folder: Path) -> Evaluation:
    """The Evaluation of a run folder."""
    path = folder / "metrics.json"
    facts: dict[str, Any] = read_json(path)
    arrays: dict[str, Tensor] = read_tensors(folder / "arrays.safetensors")[0]
    try:
        lists = {name: tuple(facts[name]) for name in ("ood", "shift", "corruptions", "severities")}
        return Evaluation(
            kind=facts["kind"],
            metrics=facts["metrics"],
            arrays=arrays,
            score=facts["score"],
            notes=facts["notes"],
            **lists,
        )
    except (KeyError, TypeError) as error:
        raise damaged(path, f"without {error}") from error


def _described(predictive: Predictive) -> tuple[str, ...]:
    return ("log_probabilities",) if isinstance(predictive, ClassificationPredictive) else ("means", "variances")
