"""The data sets tasks go by: SETS to learn, FOREIGN to be told apart from them, SHIFTED to be answered elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.bench.names import listed, unknown
from dissensus.data import digits, far_ring, fashion, image_set, split_indices, two_moons, x_sin_x
from dissensus.data.catalogue import CATALOGUE
from dissensus.data.formats import read_npz
from dissensus.data.images import ImageSet
from dissensus.data.locate import data_folder, locate
from dissensus.data.standardise import Standardiser

Kind = Literal["classification", "regression"]
Folder = str | Path | None


class Rows(NamedTuple):
    """Inputs and targets: images (N, C, H, W) uint8 or rows (N, D); classes (N,) or values (N, 1)."""

    x: Tensor
    y: Tensor

    def at(self, rows: Tensor) -> Rows:
        return Rows(self.x[rows], self.y[rows])

    def first(self, count: int | None, *, seed: int) -> Rows:
        """At most `count` rows, chosen by the seed and kept in order."""
        if count is None or count >= len(self.y):
            return self
        if count < 1:
            raise ValueError(f"expected a positive number of rows, got {count}; leave it out for all rows")
        return self.at(torch.randperm(len(self.y), generator=torch.Generator().manual_seed(seed))[:count].sort().values)


class Source(NamedTuple):
    """A data set to learn: how to make its train and test rows, and what it is."""

    make: Callable[..., tuple[Rows, Rows, tuple[str, ...]]]  # (folder, **options) -> train, test, class names
    kind: Kind
    about: str
    files: str | None = None  # its name in the catalogue, where the user provides the files


@dataclass(frozen=True, eq=False)
class TaskData:
    """Everything a task runs on. Images stay uint8; `standardiser`, of the training rows, is applied batch by batch."""

    kind: Kind
    classes: tuple[str, ...]  # () for a regression
    train: Rows
    validation: Rows
    test: Rows
    ood: dict[str, Rows]
    shift: dict[str, Rows]
    standardiser: Standardiser

    @property
    def images(self) -> bool:
        return self.train.x.ndim == 4


def task_data(settings: dict[str, Any], folder: Folder = None) -> TaskData:
    """The rows of a task's [data] section; a set that is not there is a FileNotFoundError that says what to put where."""
    options = dict(settings)
    name, seed = options.pop("name"), options.pop("seed", 0)
    validation = options.pop("validation", 0.1)
    train_rows, test_rows, ood_rows = (options.pop(key, None) for key in ("train", "test", "ood_rows"))
    ood, shift = (listed(options.pop(key, [])) for key in ("ood", "shift"))
    source = SETS[name]
    everything, test, classes = source.make(folder, **options)
    everything = everything.first(train_rows, seed=seed)
    labels = everything.y if source.kind == "classification" else None
    train, held = split_indices(len(everything.y), validation=validation, seed=seed, labels=labels)
    training = everything.at(train)
    images = training.x.ndim == 4
    return TaskData(
        kind=source.kind,
        classes=classes,
        train=training,
        validation=everything.at(held),
        test=test.first(test_rows, seed=seed),
        ood={_stem(each): _like(training, foreign(each, folder), each).first(ood_rows, seed=seed) for each in ood},
        shift={_stem(each): _like(training, shifted(each, folder), each) for each in shift},
        standardiser=Standardiser.of_channels(training.x) if images else Standardiser.of_rows(training.x),
    )


def _like(training: Rows, rows: Rows, name: str) -> Rows:
    """The rows, whose inputs have the shape of the training ones."""
    if rows.x.shape[1:] != training.x.shape[1:]:
        raise ValueError(
            f"expected inputs of shape {tuple(training.x.shape[1:])} in {name!r}, as in the training set, "
            f"got {tuple(rows.x.shape[1:])}; choose another set, or resize its images first"
        )
    return rows


def foreign(name: str, folder: Folder) -> Rows:
    """A set of foreign inputs by name, or from an .npz file of images."""
    if name.endswith(".npz"):
        return _rows(_npz(name, folder))
    if name not in FOREIGN:
        raise unknown("an OOD set", name, FOREIGN)
    return FOREIGN[name](folder)


def shifted(name: str, folder: Folder) -> Rows:
    """A labelled set of another distribution by name, or from an .npz file of images."""
    if name.endswith(".npz"):
        return _rows(_npz(name, folder))
    if name not in SHIFTED:
        raise unknown("a shifted set", name, SHIFTED)
    return SHIFTED[name](folder)


def present(name: str, folder: Folder) -> str:
    """Where a set is: "shipped", "generated", a folder, or "not found"."""
    files = SETS[name].files
    if files is None:
        return {"digits": "shipped", "npz": "your files"}.get(name, "generated")
    try:
        return str(locate(files, "test", folder=folder)[1][0].parent)
    except FileNotFoundError:
        return "not found"


def _digits(folder: Folder) -> tuple[Rows, Rows, tuple[str, ...]]:
    train, test = digits()
    return _rows(train), _rows(test), train.classes


def _images(name: str, folder: Folder) -> tuple[Rows, Rows, tuple[str, ...]]:
    train, test = (image_set(name, split, folder=folder) for split in ("train", "test"))
    return _rows(train), _rows(test), train.classes


def _own_images(folder: Folder, train_file: str, test_file: str) -> tuple[Rows, Rows, tuple[str, ...]]:
    train, test = _rows(_npz(train_file, folder)), _rows(_npz(test_file, folder))
    return train, test, tuple(str(i) for i in range(int(train.y.max()) + 1))


def _two_moons(folder: Folder, count: int = 1000, noise: float = 0.1) -> tuple[Rows, Rows, tuple[str, ...]]:
    return (
        Rows(*two_moons(count, noise=noise, seed=0)),
        Rows(*two_moons(count, noise=noise, seed=1)),
        ("upper", "lower"),
    )


def _x_sin_x(folder: Folder, points: int = 45, noise: float = 0.25) -> tuple[Rows, Rows, tuple[str, ...]]:
    return Rows(*x_sin_x(points, noise=noise, seed=0)), Rows(*x_sin_x(4 * points, noise=noise, seed=1)), ()


def _far_ring(folder: Folder) -> Rows:
    x = far_ring(count=400, centre=0, radius=4.0, std=0.3)
    return Rows(x, torch.zeros(len(x), dtype=torch.int64))


def _gap(folder: Folder, noise: float = 0.25) -> Rows:
    """x sin x between the two clusters of `x_sin_x`, where nothing was seen."""
    generator = torch.Generator().manual_seed(2)
    x = 2.5 + 2.0 * torch.rand(200, 1, generator=generator)
    return Rows(x, x * x.sin() + noise * torch.randn(200, 1, generator=generator))


def _test_images(name: str, folder: Folder) -> Rows:
    return _rows(image_set(name, "test", folder=folder))


def _rows(images: ImageSet | tuple[Tensor, Tensor]) -> Rows:
    return Rows(images.images, images.labels) if isinstance(images, ImageSet) else Rows(*images)


def _npz(name: str, folder: Folder) -> tuple[Tensor, Tensor]:
    root = data_folder(folder)
    images, labels = read_npz(Path(name) if root is None else root / name)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _stem(name: str) -> str:
    return Path(name).stem


SETS: dict[str, Source] = {
    "digits": Source(_digits, "classification", "10,000 + 2,000 MNIST digits inside the package"),
    "two_moons": Source(_two_moons, "classification", "two interleaved half circles in the plane"),
    "x_sin_x": Source(_x_sin_x, "regression", "x sin x with noise on two intervals and a gap between"),
    "npz": Source(_own_images, "classification", "images and labels in .npz files: data.train_file, data.test_file"),
    **{
        name: Source(partial(_images, name), "classification", f"{len(CATALOGUE[name].classes)} classes", name)
        for name in ("mnist", "fashion_mnist", "cifar10", "cifar100", "svhn")
    },
}
FOREIGN: dict[str, Callable[[Folder], Rows]] = {
    "fashion": lambda folder: _rows(fashion()),
    "digits": lambda folder: _rows(digits()[1]),
    "far_ring": _far_ring,
    **{name: partial(_test_images, name) for name in CATALOGUE},
}
SHIFTED: dict[str, Callable[[Folder], Rows]] = {"gap": _gap}
