"""Measurements during a run's training: distances between members and learning curves, one line each in a .jsonl file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus.bench.rows.dataset_rows import TaskRows
from dissensus.core.posterior import Posterior, checked_prediction, inference_context
from dissensus.core.predictive import Predictive
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.loader_predictions import Predictions
from dissensus.evaluation.member_diagnostics import MemberDistances, member_distances
from dissensus.storage.atomic_files import write_text
from dissensus.training.history import Epoch
from dissensus.utils.file_errors import read_errors

DISTANCES = "distances.jsonl"
DISTANCE_ROWS = 500  # training rows at which members are compared

ComparedRows = Iterable[tuple[Tensor, Tensor]]


class MeasurementLog:
    """A callback that writes a line of numbers every `every` epochs, and one before training.

    A stopped run continues its file. An epoch that is repeated writes the same line twice.
    """

    def __init__(self, path: Path, keys: Sequence[str], measure: Callable[[], dict[str, float]], *, every: int) -> None:
        self.path, self.measure, self.every = path, measure, every
        there = read_measurements(path, keys) if path.is_file() else {}
        # Remove an incomplete last line, so that the next one starts on a new line.
        lines = (json.dumps({"epochs": epochs, **found}) for epochs, found in there.items())
        write_text(path, "".join(f"{line}\n" for line in lines))
        if 0 not in there:
            self.write_measurement(0)  # the networks are untrained here: a checkpoint is read later

    def __call__(self, epoch: Epoch) -> None:
        if epoch.epoch % self.every == 0:
            self.write_measurement(epoch.epoch)

    def write_measurement(self, epochs: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"epochs": epochs, **self.measure()}) + "\n")


def read_measurements(path: Path, names: Sequence[str]) -> dict[int, dict[str, float]]:
    """Epochs done -> numbers of these names, ascending; an incomplete last line of a stopped run is skipped."""
    whole, _, _ = path.read_bytes().decode(errors="replace").rpartition("\n")
    found = {}
    for line in whole.splitlines():
        with read_errors(path):
            entry = json.loads(line)
            found[int(entry["epochs"])] = {name: float(entry[name]) for name in names}
    return dict(sorted(found.items()))


def with_metrics(result: Evaluation, metrics: dict[str, float], arrays: dict[str, Tensor] | None = None) -> Evaluation:
    """The result with these metrics and arrays added."""
    return replace(result, metrics=result.metrics | metrics, arrays=result.arrays | (arrays or {}))


def with_measurements(evaluation: Evaluation, path: Path, names: Sequence[str], prefix: str) -> Evaluation:
    """The evaluation with arrays PREFIX/epochs and PREFIX/over/NAME of the measurements over training."""
    over = read_measurements(path, names)
    arrays = {f"{prefix}/epochs": torch.tensor(list(over), dtype=torch.int64)}
    for name in names:
        arrays[f"{prefix}/over/{name}"] = torch.tensor([found[name] for found in over.values()], dtype=torch.float64)
    return with_metrics(evaluation, {}, arrays)


def distance_callback(folder: Path, posterior: Posterior, rows: ComparedRows, *, every: int) -> MeasurementLog | None:
    """A callback that writes the distances between members; None for one network."""
    if posterior.particles.members < 2:
        return None
    x, y = concatenate_batches(rows)
    names = MemberDistances._fields
    return MeasurementLog(folder / DISTANCES, names, lambda: member_distances(posterior, x, y)._asdict(), every=every)


def with_distances(evaluation: Evaluation, folder: Path, posterior: Posterior, batches: ComparedRows) -> Evaluation:
    """The evaluation with distances/SPACE of the trained members, and arrays distances/epochs and distances/over/SPACE."""
    if posterior.particles.members < 2 or not (folder / DISTANCES).is_file():
        return evaluation
    now = member_distances(posterior, *concatenate_batches(batches))
    found = with_metrics(evaluation, {f"distances/{space}": value for space, value in now._asdict().items()})
    return with_measurements(found, folder / DISTANCES, MemberDistances._fields, "distances")


def concatenate_batches(batches: ComparedRows) -> tuple[Tensor, Tensor]:
    """All batches concatenated: (x, y)."""
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


CURVES = "curves.jsonl"
CURVE_ROWS = 1000  # rows of the training set and of the test set that are measured over training
NOISE = ("noise/memorised", "noise/recovered", "noise/clean")


def compare_with_labels(said: Tensor, rows: TaskRows) -> dict[str, Tensor]:
    """Whether predicted classes (N,) of training rows equal the wrong label, the true label, or, at clean rows, the label.

    noise/memorised and noise/recovered are (W,), for the W rows with a wrong label; noise/clean is (N − W,). Empty if W = 0.
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
    shown = {"train": train.sample(CURVE_ROWS, seed=0), "test": test.sample(CURVE_ROWS, seed=0)}

    def measure() -> dict[str, float]:
        with inference_context(posterior):
            drawn, said = posterior.current(), {}
            for name, rows in shown.items():
                read = map(posterior.prepare_batch, posterior.read(load(rows)))
                parts = [checked_prediction(posterior, drawn.predict(batch.x)) for batch in read]
                said[name] = Predictive.cat([part.to(rows.y.device) for part in parts])
        classes = {name: each.mean.argmax(1) for name, each in said.items()}
        found = {f"{name}/accuracy": classes[name] == rows.y for name, rows in shown.items()}
        found |= compare_with_labels(classes["train"], shown["train"])
        found["test/nll"] = -said["test"].log_prob(shown["test"].y)
        return {name: float(each.double().mean()) for name, each in found.items()}

    return MeasurementLog(folder / CURVES, curve_names(train), measure, every=every)


def with_curves(evaluation: Evaluation, folder: Path, train: TaskRows) -> Evaluation:
    """The evaluation with arrays curves/epochs and curves/over/NAME, if they were measured over training."""
    path = folder / CURVES
    return with_measurements(evaluation, path, curve_names(train), "curves") if path.is_file() else evaluation
