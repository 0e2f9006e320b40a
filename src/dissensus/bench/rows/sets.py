"""The rows a task runs on: trained on, held out, tested on, foreign and shifted, and how they are standardised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dissensus.bench.fitting import fitting
from dissensus.bench.names import listed
from dissensus.bench.rows.sources import SETS, Folder, Kind, Rows, foreign, shifted
from dissensus.core.errors import unknown
from dissensus.data import split_indices
from dissensus.data.standardise import Standardiser

STANDARDISED = ("training", "unit", "imagenet", "none")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # means and deviations of pixels in [0, 1], by channel
TARGETS = ("original", "standardised")


@dataclass(frozen=True, eq=False)
class TaskData:
    """Everything a task runs on, in original units; images stay uint8. Networks see what the standardisers make of it."""

    kind: Kind
    classes: tuple[str, ...]  # () for a regression
    train: Rows
    validation: Rows  # empty where nothing is held out
    calibration: Rows  # held out of the test set for temperatures; empty where none are
    test: Rows
    ood: dict[str, Rows]
    shift: dict[str, Rows]
    standardiser: Standardiser  # of inputs
    targets: Standardiser | None  # of the training targets, where networks learn them standardised

    @property
    def held_out(self) -> Rows:
        """The rows that a temperature is fitted on."""
        return self.calibration if len(self.calibration.y) else self.validation

    @property
    def images(self) -> bool:
        return self.train.x.ndim == 4


class LastData:
    """Task data by its settings; the last is kept, so that runs on the same rows read them once."""

    def __init__(self, folder: Folder = None) -> None:
        self.folder = folder
        self._last: tuple[dict[str, Any], TaskData] | None = None

    def __call__(self, settings: dict[str, Any]) -> TaskData:
        if self._last is None or self._last[0] != settings:
            self._last = None  # two sets need not fit into memory
            self._last = (settings, task_data(settings, self.folder))
        return self._last[1]


def task_data(settings: dict[str, Any], folder: Folder = None) -> TaskData:
    """The rows of a run's [data] section; a set that is not there is a FileNotFoundError that says what to put where."""
    options = dict(settings)
    name, seed = options.pop("name"), options.pop("seed", 0)
    validation, calibration = options.pop("validation", 0.1), options.pop("calibration", 0)
    train_rows, test_rows, ood_rows = (options.pop(key, None) for key in ("train", "test", "ood_rows"))
    ood, shift = (_apart_by_name(listed(options.pop(key, [])), key) for key in ("ood", "shift"))
    standardise, targets = options.pop("standardise", "training"), options.pop("targets", "original")
    source = SETS[name]
    with fitting(f"the data set {name}"):
        everything, test, classes = source.make(folder, **options)
    _in_classes(classes, everything, options.get("train_file", f"the training rows of {name}"))
    test = _labelled_like(everything, test, classes, options.get("test_file", f"the test rows of {name}"))
    everything = everything.first(train_rows, seed=seed)
    labels = everything.y if source.kind == "classification" else None
    train, held = torch.arange(len(everything.y)), torch.arange(0)
    if validation != 0:
        train, held = split_indices(len(everything.y), validation=validation, seed=seed, labels=labels)
    training = everything.at(train)
    test, held_test = _apart(test.first(test_rows, seed=seed), calibration, seed, source.kind)
    return TaskData(
        kind=source.kind,
        classes=classes,
        train=training,
        validation=everything.at(held),
        calibration=held_test,
        test=test,
        ood={_stem(each): _like(training, foreign(each, folder), each).first(ood_rows, seed=seed) for each in ood},
        shift={_stem(each): _labelled_like(training, shifted(each, folder, options), classes, each) for each in shift},
        standardiser=_of_inputs(training, standardise),
        targets=_of_targets(training, targets, source.kind),
    )


def _apart(test: Rows, calibration: float, seed: int, kind: Kind) -> tuple[Rows, Rows]:
    """(test rows, those held out of them for temperatures)."""
    rest, held = torch.arange(len(test.y)), torch.arange(0)
    if calibration != 0:
        labels = test.y if kind == "classification" else None
        rest, held = split_indices(len(test.y), validation=calibration, seed=seed, labels=labels)
    return test.at(rest), test.at(held)


def _of_inputs(training: Rows, how: str) -> Standardiser:
    images = training.x.ndim == 4
    if how not in STANDARDISED:
        raise unknown("a way to standardise", how, STANDARDISED)
    if how == "training":
        return Standardiser.of_channels(training.x) if images else Standardiser.of_rows(training.x)
    if how in ("unit", "imagenet") and not images:
        raise ValueError(f'expected images for data.standardise = "{how}", got rows; choose "training" or "none"')
    if how == "imagenet":
        if training.x.shape[1] != 3:
            raise ValueError(
                f'expected images of 3 channels for data.standardise = "imagenet", got {training.x.shape[1]}; choose another'
            )
        mean, std = (torch.tensor(each, dtype=torch.float64)[:, None, None] for each in IMAGENET)
        return Standardiser(mean, std)
    middle, scale = (0.5, 0.5) if how == "unit" else (0.0, 1.0)  # pixels in [0, 1] to [−1, 1]
    return Standardiser(torch.tensor(middle, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64))


def _of_targets(training: Rows, how: str, kind: Kind) -> Standardiser | None:
    if how not in TARGETS:
        raise unknown("a kind of targets", how, TARGETS)
    if how == "original":
        return None
    if kind != "regression":
        raise ValueError(f'expected a regression for data.targets = "{how}", got a {kind}; leave the key out')
    return Standardiser.of_rows(training.y)


def _like(training: Rows, rows: Rows, name: str) -> Rows:
    """The rows, whose inputs have the shape of the training ones."""
    if rows.x.shape[1:] != training.x.shape[1:]:
        raise ValueError(
            f"expected inputs of shape {tuple(training.x.shape[1:])} in {name!r}, as in the training set, "
            f"got {tuple(rows.x.shape[1:])}; choose another set, or resize its images first"
        )
    return rows


def _labelled_like(training: Rows, rows: Rows, classes: tuple[str, ...], name: str) -> Rows:
    """The rows, whose inputs have the shape of the training ones and whose labels are classes of theirs."""
    _in_classes(classes, rows, name)
    return _like(training, rows, name)


def _in_classes(classes: tuple[str, ...], rows: Rows, name: str) -> None:
    """Raises where a label stands for no class; a regression has none."""
    if not classes:
        return
    outside = ((rows.y < 0) | (rows.y >= len(classes))).nonzero()
    if len(outside):
        row = int(outside[0, 0])
        raise ValueError(
            f"expected labels from 0 to {len(classes) - 1} in {name!r}, as many classes as the training set has, got "
            f"{int(rows.y[row])} in row {row}; number classes alike in all files (data.classes: how many, of an npz task)"
        )


def _apart_by_name(names: list[str], key: str) -> list[str]:
    """The sets, no two of which would be reported under one name."""
    first: dict[str, str] = {}
    for name in names:
        if (other := first.setdefault(_stem(name), name)) != name:
            raise ValueError(
                f"expected sets of different names in data.{key}, got {other!r} and {name!r}, both of which would be called "
                f"{_stem(name)!r}; rename a file"
            )
    return names


def _stem(name: str) -> str:
    return Path(name).stem
