"""Learning and memorising: accuracy over training, and predictions at training rows with wrong labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from dissensus.bench.rows.dataset_rows import TaskRows
from dissensus.bench.run.extra_measures import with_metrics
from dissensus.bench.run.training_watch import MeasurementLog, with_measurements
from dissensus.core.posterior import Posterior, checked_prediction, inference_context
from dissensus.core.predictive import Predictive
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.loader_predictions import Predictions

FILE = "curves.jsonl"
ROWS = 1000  # rows of the training set and of the test set that are measured over training
NOISE = ("noise/memorised", "noise/recovered", "noise/clean")


def compare_with_labels(said: Tensor, rows: TaskRows) -> dict[str, Tensor]:
    """Whether predicted classes (N,) of training rows equal the wrong label, the true label, or, at clean rows, the label.

    noise/memorised and noise/recovered are (W,), for the W rows with a wrong label; noise/clean is (N − W,). Empty without
    wrong labels.
    """
    if rows.true_labels is None:
        return {}
    wrong = rows.y != rows.true_labels
    found = ((said == rows.y)[wrong], (said == rows.true_labels)[wrong], (said == rows.y)[~wrong])
    return dict(zip(NOISE, found, strict=True))


def with_memorisation(evaluation: Evaluation, said: Predictions, rows: TaskRows) -> Evaluation:
    """The evaluation with noise/… of the training rows: means, and arrays with the value of each row."""
    compared = compare_with_labels(said.predictive.mean.argmax(1), rows)
    found = {name: each.double() for name, each in compared.items() if len(each)}
    return with_metrics(evaluation, {name: float(each.mean()) for name, each in found.items()}, found)


def curve_names(train: TaskRows) -> list[str]:
    """The quantities measured over training; those of wrong labels only if there are some."""
    return ["train/accuracy", "test/accuracy", "test/nll", *(NOISE if train.true_labels is not None else ())]


def learning_callback(
    folder: Path,
    posterior: Posterior,
    train: TaskRows,
    test: TaskRows,
    load: Callable[[TaskRows], Iterable[Any]],
    *,
    every: int,
) -> MeasurementLog:
    """A callback that writes accuracies on some training and test rows during training; load: makes their batches."""
    shown = {"train": train.sample(ROWS, seed=0), "test": test.sample(ROWS, seed=0)}

    def measure() -> dict[str, float]:
        with inference_context(posterior):
            drawn, said = posterior.current(), {}
            for name, rows in shown.items():
                parts = [
                    checked_prediction(posterior, drawn.predict(posterior.prepare_batch(each).x))
                    for each in posterior.read(load(rows))
                ]
                said[name] = Predictive.cat([part.to(rows.y.device) for part in parts])
        classes = {name: each.mean.argmax(1) for name, each in said.items()}
        found = {f"{name}/accuracy": classes[name] == rows.y for name, rows in shown.items()}
        found |= {
            "test/nll": -said["test"].log_prob(shown["test"].y),
            **compare_with_labels(classes["train"], shown["train"]),
        }
        return {name: float(each.double().mean()) for name, each in found.items()}

    return MeasurementLog(folder / FILE, curve_names(train), measure, every=every)


def with_curves(evaluation: Evaluation, folder: Path, train: TaskRows) -> Evaluation:
    """The evaluation with arrays curves/epochs and curves/over/NAME, if they were measured over training."""
    path = folder / FILE
    return with_measurements(evaluation, path, curve_names(train), "curves") if path.is_file() else evaluation
