"""Predictions and evaluations as files."""

from pathlib import Path
from typing import Any

from torch import Tensor

from dissensus.core.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.loader_predictions import Predictions
from dissensus.evaluation.robustness_curves import AttackedInputs, CorruptedCounts
from dissensus.storage.run_files import read_json, read_tensors, write_json, write_tensors
from dissensus.storage.atomic_files import read_json, read_tensors, write_json, write_tensors
from dissensus.utils.file_errors import damage_error

COUNTS = ("nll", "counts", "confidence", "correct", "clean", "example_accuracy", "example_nll", "examples")
PROMISED = "promised/"  # prefix of the names of promises' tables
FACTS = ("kind", "score", "ood", "shift", "corruptions", "severities", "notes")


def write_predictions(path: Path, predictions: Predictions) -> None:
    classes = isinstance(predictions.predictive, ClassificationPredictive)
    names = ("log_probabilities",) if classes else ("means", "variances")
    described = dict(zip(names, predictions.predictive.defining_tensors(), strict=True))
    tensors = {"targets": predictions.targets, **described, **predictions.examples}
    if predictions.energy is not None:
        tensors["energy"] = predictions.energy
    facts = {
        "kind": type(predictions.predictive).__name__,
        "shapes": predictions.shapes,
        "milliseconds": predictions.milliseconds,
        "networks": predictions.networks,
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
            networks=facts["networks"],
        )
    except Exception as error:  # a tensor or fact is missing, or has another shape or type
        raise damage_error(path, f"without {error}") from error


def write_counts(path: Path, counts: CorruptedCounts) -> None:
    facts = {"types": counts.types, "severities": counts.severities}
    promised = {f"{PROMISED}{name}": table for name, table in counts.promised.items()}
    write_tensors(path, {name: getattr(counts, name) for name in COUNTS} | promised, facts)


def read_counts(path: Path) -> CorruptedCounts:
    tensors, facts = read_tensors(path)
    try:
        sums: dict[str, Any] = {name: tensors[name] for name in COUNTS}
        sums["promised"] = {n.removeprefix(PROMISED): each for n, each in tensors.items() if n.startswith(PROMISED)}
        return CorruptedCounts(types=tuple(facts["types"]), severities=tuple(facts["severities"]), **sums)
    except (KeyError, TypeError) as error:
        raise damage_error(path, f"without {error}") from error


def write_attacked(path: Path, attacked: AttackedInputs) -> None:
    facts = {"names": attacked.names, "epsilons": attacked.epsilons}
    write_tensors(path, {"values": attacked.values, **attacked.fooling}, facts)


def read_attacked(path: Path) -> AttackedInputs:
    tensors, facts = read_tensors(path)
    try:
        return AttackedInputs(tuple(facts["names"]), tuple(facts["epsilons"]), tensors.pop("values"), tensors)
    except (KeyError, TypeError) as error:
        raise damage_error(path, f"without {error}") from error


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Writes arrays.safetensors, then metrics.json."""
    write_tensors(folder / "arrays.safetensors", evaluation.arrays, {})
    facts = {name: getattr(evaluation, name) for name in FACTS}
    write_json(folder / "metrics.json", facts | {"metrics": evaluation.metrics})


def read_evaluation(folder: Path) -> Evaluation:
    """Reads the Evaluation of a run folder."""
    path = folder / "metrics.json"
    facts: dict[str, Any] = read_json(path)
    arrays: dict[str, Tensor] = read_tensors(folder / "arrays.safetensors")[0]
    if "test/nll" not in arrays or arrays["test/nll"].ndim != 1:
        raise damage_error(folder / "arrays.safetensors", "without test/nll")
    try:
        names = ("ood", "shift", "corruptions", "severities")
        several: dict[str, Any] = {name: tuple(facts.pop(name)) for name in names}
        return Evaluation(arrays=arrays, **several, **facts)
    except (KeyError, TypeError) as error:  # a fact is missing, unknown, or not a list
        raise damage_error(path, f"without {error}") from error
