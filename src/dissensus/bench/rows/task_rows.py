"""The rows of a task: training, validation, test, foreign and shifted rows, and their standardisation."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus.bench.rows.dataset_rows import DataRequest, Root, SetKind, TaskRows
from dissensus.bench.rows.named_sets import FOREIGN, SHIFTED, image_file, task_set
from dissensus.bench.setting_checks import name_list, settings_errors
from dissensus.data import noisy_labels, split_indices
from dissensus.data.input_transforms import Standardiser
from dissensus.utils.checks import one_of

STANDARDISED = ("training", "unit", "imagenet", "none")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # means and deviations of pixels in [0, 1], by channel
TARGETS = ("original", "standardised")
FILES = (".npz", ".csv", ".parquet")  # file types of foreign or shifted rows


@dataclass(frozen=True, eq=False)
class TaskData:
    """All rows of a task, in original units, images as uint8; the standardisers turn them into the network's inputs."""

    kind: SetKind
    classes: tuple[str, ...]  # () for a regression
    train: TaskRows
    validation: TaskRows  # empty if none are held out
    calibration: TaskRows  # held out of the test set for calibration; empty if none are
    test: TaskRows
    ood: dict[str, TaskRows]
    shift: dict[str, TaskRows]
    standardiser: Standardiser  # of inputs
    targets: Standardiser | None  # of the training targets, if networks learn standardised targets

    @property
    def digest(self) -> str:
        """Twelve digits that change with any training, validation or test row."""
        found = hashlib.sha256()
        for rows in (self.train, self.validation, self.calibration, self.test):
            for tensor in (each for each in rows[:2] if isinstance(each, Tensor)):  # not images in files
                found.update(tensor.contiguous().numpy().data)
        return found.hexdigest()[:12]

    @property
    def has_images(self) -> bool:
        return self.train.x.ndim == 4


class DataCache:
    """Loads task data by their settings; keeps the last, so that runs on the same rows read them once."""

    def __init__(self, folder: Root = None) -> None:
        self.folder = folder
        self._last: tuple[Any, TaskData] | None = None

    def __call__(self, settings: dict[str, Any], kind: SetKind | None = None, beside: str = "") -> TaskData:
        if self._last is None or self._last[0] != (settings, kind, beside):
            self._last = None  # two sets need not fit into memory
            self._last = ((settings, kind, beside), task_data(settings, self.folder, kind=kind, beside=beside))
        return self._last[1]


def task_data(given: dict[str, Any], folder: Root = None, *, kind: SetKind | None = None, beside: str = "") -> TaskData:
    """The rows of a run's [data] section; `kind`: of the task, for sets that fit several; `beside`: the task file's folder."""
    options = {key: value for key, value in given.items() if key not in ("ood", "shift")}
    name, seed = options.pop("name"), options.pop("seed", 0)
    validation, calibration = options.pop("validation", None), options.pop("calibration", 0)
    train_rows, test_rows, ood_rows = (options.pop(key, None) for key in ("train", "test", "ood_rows"))
    noise, source = options.pop("label_noise", 0.0), task_set(name)
    kind = source.kind or kind or "classification"
    # The user's targets may have any scale; the initial noise of likelihoods fits standardised targets.
    own_values = source.kind is None and kind == "regression"
    standardise = options.pop("standardise", "none" if source.standardised else "training")
    targets = options.pop("targets", "standardised" if own_values else "original")
    asked = DataRequest(folder, beside, kind, seed)
    with settings_errors(f"the data set {name}"):
        learned = source.make(asked if source.is_user_data else folder, **options)
    everything, test, classes, own_validation = learned[:4]
    labels = () if kind == "segmentation" else classes  # masks are checked where they are read
    _check_like_training(everything, everything, options.get("train_file", f"the training rows of {name}"), labels)
    _check_like_training(everything, test, options.get("test_file", f"the test rows of {name}"), labels)
    if learned.sorted:  # unshuffled batches, and batch statistics, would contain one class only
        everything = everything.select(torch.randperm(len(everything.y), generator=torch.Generator().manual_seed(seed)))

    def split_test_rows(rows: TaskRows) -> tuple[TaskRows, TaskRows]:
        return _split_rows(rows.sample(test_rows, seed=seed), calibration, seed, kind)

    # Validation rows of a noisy set are noisy too: whoever has wrong labels has no right ones to choose an epoch.
    training = _add_label_noise(everything.sample(train_rows, seed=seed), noise, labels, seed)
    if own_validation is None:
        training, held = _split_rows(training, 0.1 if validation is None else validation, seed, kind)
    else:
        held = own_validation if validation is None else _split_rows(own_validation, validation, seed, kind)[1]
        _check_like_training(training, held, f"the validation rows of {name}", labels)
    test, held_test = split_test_rows(test)

    def other_sets(key: str, known: Mapping[str, Callable[..., TaskRows]], **options: Any) -> dict[str, TaskRows]:
        """The sets named by the key; raises if two would have the same name in reports."""
        read, named = learned.read_file or partial(image_file, asked), labels if key == "shift" else ()
        found: dict[str, TaskRows] = dict(getattr(learned, key))
        for each, rows in found.items():
            if not re.fullmatch(r"[\w .+-]+", each):
                raise ValueError(f"expected a plain name for a set of data.{key}, got {each!r}; rename it")
            _check_like_training(training, rows, each, named)
        for each in dict.fromkeys(name_list(given.get(key, []))):
            if Path(each).stem in found:
                raise ValueError(f"expected different names in data.{key}, got {Path(each).stem!r} twice; rename one")
            file = Path(each).suffix in FILES
            rows = read(each, key == "shift") if file else known[one_of("a set", each, known)](folder, **options)
            _check_like_training(training, rows, each, named)
            found[Path(each).stem] = rows
        return found

    def foreign_rows(rows: TaskRows) -> TaskRows:  # for a segmentation they are pixels of its test rows
        return split_test_rows(rows)[0] if kind == "segmentation" else rows.sample(ood_rows, seed=seed)

    rows: dict[str, Any] = {"train": training, "validation": held, "calibration": held_test, "test": test}
    foreign = {each: foreign_rows(found) for each, found in other_sets("ood", FOREIGN).items()}
    rows |= {"ood": foreign, "shift": other_sets("shift", SHIFTED, **options)}
    scaled = _input_standardiser(training, standardise), _target_standardiser(training, targets, kind)
    return TaskData(kind=kind, classes=classes, **rows, standardiser=scaled[0], targets=scaled[1])


def _add_label_noise(rows: TaskRows, noise: float, classes: tuple[str, ...], seed: int) -> TaskRows:
    """The rows with a share of wrong labels; the true labels are kept too."""
    if noise == 0:
        return rows
    if not classes:
        raise ValueError(f"expected classes for data.label_noise = {noise}, got a set without; leave the key out")
    return TaskRows(rows.x, noisy_labels(rows.y, noise, classes=len(classes), seed=seed), rows.y)


def _split_rows(rows: TaskRows, held_out: float, seed: int, kind: SetKind) -> tuple[TaskRows, TaskRows]:
    """(remaining rows, held-out rows); held_out: their number or share."""
    rest, held = torch.arange(len(rows.y)), torch.arange(0)
    if held_out != 0:
        labels = rows.y if kind == "classification" else None
        rest, held = split_indices(len(rows.y), validation=held_out, seed=seed, labels=labels)
    return rows.select(rest), rows.select(held)


def _input_standardiser(training: TaskRows, how: str) -> Standardiser:
    images = training.x.ndim == 4
    one_of("data.standardise", how, STANDARDISED)
    if how == "training" and training.x.dtype == torch.uint8:
        return Standardiser.of_channels(training.x)
    if how == "training":
        return _number_standardiser(training.x)
    if how != "none" and not (images and (how == "unit" or training.x.shape[1] == 3)):
        got = f'inputs of shape {tuple(training.x.shape[1:])}; choose "training" or "none"'
        raise ValueError(f'expected {"RGB " * (how == "imagenet")}images for data.standardise = "{how}", got {got}')
    if how == "imagenet":
        mean, std = (torch.tensor(each, dtype=torch.float64)[:, None, None] for each in IMAGENET)
        return Standardiser(mean, std)
    middle, scale = (0.5, 0.5) if how == "unit" else (0.0, 1.0)  # pixels in [0, 1] to [−1, 1]
    return Standardiser(torch.tensor(middle, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64))


def _number_standardiser(x: Tensor) -> Standardiser:
    """Standardiser by column for x (N, D), by channel for (N, C, H, W), by entry for other shapes."""
    shape = (-1, 1, 1) if x.ndim == 4 else x.shape[1:]
    found = Standardiser.of_rows(x.movedim(1, -1).flatten(0, 2) if x.ndim == 4 else x.flatten(1))
    return Standardiser(found.mean.view(shape), found.std.view(shape))


def _target_standardiser(training: TaskRows, how: str, kind: SetKind) -> Standardiser | None:
    if one_of("data.targets", how, TARGETS) == "original":
        return None
    if kind != "regression":
        raise ValueError(f'expected a regression for data.targets = "{how}", got a {kind}; leave the key out')
    return Standardiser.of_rows(training.y)


def _check_like_training(training: TaskRows, rows: TaskRows, name: str, classes: tuple[str, ...] = ()) -> None:
    """Raises if inputs do not have the shape of the training inputs, or if a label is not one of the classes."""
    outside = (rows.y < 0) | (rows.y >= len(classes))
    if classes and outside.any():
        row = int(outside.nonzero()[0, 0])
        got, advice = f"{int(rows.y[row])} in row {row}", "number classes as in training (npz tasks: set data.classes)"
        raise ValueError(f"expected labels from 0 to {len(classes) - 1} in {name!r}, got {got}; {advice}")
    if rows.x.shape[1:] != training.x.shape[1:]:
        shapes = f"{tuple(training.x.shape[1:])} in {name!r}, as in the training set, got {tuple(rows.x.shape[1:])}"
        raise ValueError(f"expected inputs of shape {shapes}; choose another set, or resize its images first")
    # Pixels are read as x / 255, numbers are not.
    if (rows.x.dtype == torch.uint8) != (training.x.dtype == torch.uint8):
        got = f"{rows.x.dtype}; save pixels as uint8 in all files, or numbers in all"
        raise ValueError(f"expected inputs of the training set's dtype, {training.x.dtype}, in {name!r}, got {got}")
