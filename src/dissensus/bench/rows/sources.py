"""The data sets tasks go by: SETS to learn, FOREIGN to be told apart from them, SHIFTED to be answered elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.data import (
    cubic,
    cubic_gap,
    digits,
    far_ring,
    fashion,
    five_blobs,
    gaussian_process,
    image_set,
    quadratic_features,
    split_indices,
    three_clusters,
    two_moons,
    x_sin_x,
)
from dissensus.data.catalogue import CATALOGUE
from dissensus.data.formats import read_npz
from dissensus.data.images import ImageSet
from dissensus.data.locate import data_folder, locate
from dissensus.data.tabular import REGRESSION_SETS, regression_folder, uci_regression
from dissensus.numerics.checks import one_of

SetKind = Literal["classification", "regression"]
Folder = str | Path | None


class TaskRows(NamedTuple):
    """Inputs and targets: images (N, C, H, W) uint8 or rows (N, D); classes (N,) or values (N, 1)."""

    x: Tensor
    y: Tensor
    true: Tensor | None = None  # the labels before some were made wrong; None where none were

    def at(self, rows: Tensor) -> TaskRows:
        return TaskRows(self.x[rows], self.y[rows], None if self.true is None else self.true[rows])

    def first(self, count: int | None, *, seed: int) -> TaskRows:
        """At most `count` rows, chosen by the seed and kept in order."""
        if count is None or count >= len(self.y):
            return self
        return self.at(torch.randperm(len(self.y), generator=torch.Generator().manual_seed(seed))[:count].sort().values)


LearnedRows = tuple[TaskRows, TaskRows, tuple[str, ...]]  # train, test, class names


class TaskSet(NamedTuple):
    """A data set to learn: how to make its train and test rows, and what it is."""

    make: Callable[..., LearnedRows]  # (folder, **options)
    kind: SetKind
    about: str
    where: str | Callable[[Folder], Path] = "generated"  # a function where the user provides the files


def rows_elsewhere(name: str, known: Mapping[str, Callable[..., TaskRows]], folder: Folder, **options: Any) -> TaskRows:
    """A set of FOREIGN or SHIFTED by name, or from an .npz file of images; options: of the set learned."""
    if name.endswith(".npz"):
        return _npz(name, folder)
    return known[one_of("a set", name, known)](folder, **options)


def present(name: str, folder: Folder) -> str:
    """Where a set is: "shipped", "generated", a folder, or "not found"."""
    where = SETS[name].where
    if isinstance(where, str):
        return where
    try:
        return str(where(folder))
    except FileNotFoundError:
        return "not found"


# ------------------------------------------------------------------------------------------- images


def _digits(folder: Folder) -> LearnedRows:
    train, test = digits()
    return _rows(train), _rows(test), train.classes


def _images(name: str, folder: Folder) -> LearnedRows:
    train, test = (image_set(name, split, folder=folder) for split in ("train", "test"))
    return _rows(train), _rows(test), train.classes


def _image_folder(name: str, folder: Folder) -> Path:
    return locate(name, "test", folder=folder)[1][0].parent


def _own_images(folder: Folder, train_file: str, test_file: str, classes: int | None = None) -> LearnedRows:
    """classes: their number, where the training rows lack the last of them."""
    train, test = _npz(train_file, folder), _npz(test_file, folder)
    if not len(train.y):
        raise ValueError(f"expected images in {train_file!r}, got none; write at least one for each class")
    return train, test, tuple(str(i) for i in range(int(train.y.max()) + 1 if classes is None else classes))


def _test_images(name: str, folder: Folder) -> TaskRows:
    return _rows(image_set(name, "test", folder=folder))


def _rows(images: ImageSet) -> TaskRows:
    return TaskRows(images.images, images.labels)


def _npz(name: str, folder: Folder) -> TaskRows:
    root = data_folder(folder)
    path = Path(name) if root is None else root / name
    if not path.is_file():
        raise FileNotFoundError(
            f"expected an .npz file of images and labels at {path}, got none; correct its name in the task, or name the "
            "folder it is in by --data or DISSENSUS_DATA"
        )
    images, labels = read_npz(path)
    return TaskRows(torch.from_numpy(images), torch.from_numpy(labels))


# ------------------------------------------------------------------------------------------- tables


def _uci_regression(folder: Folder, set: str, split: int = 0, inner: float = 0.0) -> LearnedRows:
    """One of the standard splits, in original units and float64.

    inner: a share of the training rows takes the place of the test rows, which are left alone: to choose recipes by.
    """
    found = uci_regression(set, split, folder=folder, dtype=torch.float64)
    train = TaskRows(found.inputs.inverse(found.x_train), found.targets.inverse(found.y_train))
    if inner:
        rest, held = split_indices(len(train.y), validation=float(inner), seed=split)
        return train.at(rest), train.at(held), ()
    return train, TaskRows(found.inputs.inverse(found.x_test), found.targets.inverse(found.y_test)), ()


def _uci_folder(folder: Folder) -> Path:
    """The folder of the first set that is there."""
    for name in REGRESSION_SETS:
        try:
            return regression_folder(name, folder)
        except FileNotFoundError:
            continue
    raise FileNotFoundError


# ------------------------------------------------------------------------------------------- toys


def _two_moons(folder: Folder, count: int = 1000, noise: float = 0.1) -> LearnedRows:
    return (
        TaskRows(*two_moons(count, noise=noise, seed=0)),
        TaskRows(*two_moons(count, noise=noise, seed=1)),
        ("upper", "lower"),
    )


def _far_ring(folder: Folder) -> TaskRows:
    x = far_ring(count=400, centre=0, radius=4.0, std=0.3)
    return TaskRows(x, torch.zeros(len(x), dtype=torch.int64))


def _five_blobs(folder: Folder, points: int = 40, scale: float = 0.4, draw: int = 0) -> LearnedRows:
    train, test = five_blobs(points, scale=scale, seed=draw), five_blobs(20, scale=scale, seed=1000 + draw)
    return TaskRows(*train), TaskRows(*test), tuple("12345")


def _three_clusters(folder: Folder) -> LearnedRows:
    """The papers' 400 points have no test set: errors are those at the points that were fitted."""
    rows = TaskRows(*three_clusters())
    return rows, rows, ()


def _x_sin_x(folder: Folder, points: int = 45, noise: float = 0.25) -> LearnedRows:
    return TaskRows(*x_sin_x(points, noise=noise, seed=0)), TaskRows(*x_sin_x(4 * points, noise=noise, seed=1)), ()


def _x_sin_x_features(folder: Folder, points: int = 45, noise: float = 0.25, draw: int = 0) -> LearnedRows:
    train, test = x_sin_x(points, noise=noise, seed=2 * draw), x_sin_x(4 * points, noise=noise, seed=2 * draw + 1)
    return TaskRows(quadratic_features(train[0]), train[1]), TaskRows(quadratic_features(test[0]), test[1]), ()


def _gap(folder: Folder, points: int = 45, noise: float = 0.25) -> TaskRows:
    """x sin x between the two clusters of `x_sin_x`, where nothing was seen."""
    generator = torch.Generator().manual_seed(2)
    x = 2.5 + 2.0 * torch.rand(200, 1, generator=generator)
    return TaskRows(x, x * x.sin() + noise * torch.randn(200, 1, generator=generator))


def _cubic(folder: Folder, points: int = 20, noise: float = 3.0, draw: int = 0) -> LearnedRows:
    return (
        TaskRows(*cubic(points, noise=noise, seed=2 * draw)),
        TaskRows(*cubic(200, noise=noise, seed=2 * draw + 1)),
        (),
    )


def _outside(folder: Folder, points: int = 20, noise: float = 3.0, draw: int = 0) -> TaskRows:
    """x³ on [−6, −4] and [4, 6], beyond what `cubic` has seen."""
    generator = torch.Generator().manual_seed(draw)
    x = 4.0 + 2.0 * torch.rand(200, 1, generator=generator)
    x[::2] *= -1
    return TaskRows(x, x**3 + noise * torch.randn(200, 1, generator=generator))


def _cubic_gap(folder: Folder, points: int = 201, noise: float = 2.0, draw: int = 0) -> LearnedRows:
    return (
        TaskRows(*cubic_gap(points, noise=noise, seed=2 * draw)),
        TaskRows(*cubic_gap(noise=noise, seed=2 * draw + 1)),
        (),
    )


def _cubic_elsewhere(
    low: float, high: float, folder: Folder, points: int = 201, noise: float = 2.0, draw: int = 0
) -> TaskRows:
    """x³ at both signs of x from low to high."""
    x = torch.cat([-torch.linspace(high, low, 100), torch.linspace(low, high, 100)])[:, None]
    return TaskRows(x, x**3 + noise * torch.randn(200, 1, generator=torch.Generator().manual_seed(draw)))


GAP = (0.0, 2.0)  # of the draw of a Gaussian process: seen on [−4, 0] and [2, 4]


def _gp_draw(
    folder: Folder, points: int = 40, lengthscale: float = 1.0, noise: float = 0.1, draw: int = 0
) -> LearnedRows:
    seen, _ = _gp_rows(points, lengthscale, noise, draw)
    return seen.at(torch.arange(points)), seen.at(torch.arange(points, len(seen.y))), ()


def _gp_gap(folder: Folder, points: int = 40, lengthscale: float = 1.0, noise: float = 0.1, draw: int = 0) -> TaskRows:
    """The same function where nothing of it was seen."""
    return _gp_rows(points, lengthscale, noise, draw)[1]


def _gp_rows(points: int, lengthscale: float, noise: float, draw: int) -> tuple[TaskRows, TaskRows]:
    """Rows outside and inside the gap, of one function."""
    rows = TaskRows(*gaussian_process(2 * points + 400, lengthscale=lengthscale, noise=noise, seed=draw))
    inside = ((rows.x > GAP[0]) & (rows.x < GAP[1])).squeeze(1)
    return rows.at(torch.nonzero(~inside).squeeze(1)), rows.at(torch.nonzero(inside).squeeze(1))


SETS: dict[str, TaskSet] = {
    "digits": TaskSet(_digits, "classification", "10,000 + 2,000 MNIST digits inside the package", "shipped"),
    "two_moons": TaskSet(_two_moons, "classification", "two interleaved half circles in the plane"),
    "x_sin_x": TaskSet(_x_sin_x, "regression", "x sin x with noise on two intervals and a gap between"),
    "x_sin_x_features": TaskSet(
        _x_sin_x_features, "regression", "x sin x on two intervals, as features x/2 and (x/2)²"
    ),
    "five_blobs": TaskSet(_five_blobs, "classification", "five Gaussian blobs on a ring in the plane"),
    "three_clusters": TaskSet(
        _three_clusters, "regression", "400 points in three clusters on a line, as features x/2 and (x/2)²", "shipped"
    ),
    "cubic": TaskSet(_cubic, "regression", "x³ with noise, 20 points on [−4, 4]"),
    "cubic_gap": TaskSet(_cubic_gap, "regression", "x³ with noise on two intervals and a gap between"),
    "gp_draw": TaskSet(_gp_draw, "regression", "a draw of a Gaussian process, seen on two intervals"),
    "npz": TaskSet(
        _own_images, "classification", "images and labels in .npz files: data.train_file, data.test_file", "your files"
    ),
    **{
        name: TaskSet(
            partial(_images, name),
            "classification",
            f"{len(CATALOGUE[name].classes)} classes",
            partial(_image_folder, name),
        )
        for name in ("mnist", "fashion_mnist", "cifar10", "cifar100", "svhn")
    },
    "uci_regression": TaskSet(
        _uci_regression, "regression", f"data.set of {', '.join(REGRESSION_SETS)}; data.split", _uci_folder
    ),
}
FOREIGN: dict[str, Callable[[Folder], TaskRows]] = {
    "fashion": lambda folder: _rows(fashion()),
    "digits": lambda folder: _rows(digits()[1]),
    "far_ring": _far_ring,
    **{name: partial(_test_images, name) for name in CATALOGUE},
}
SHIFTED: dict[str, Callable[..., TaskRows]] = {
    "gap": _gap,
    "outside": _outside,
    "gp_gap": _gp_gap,
    "cubic_between": partial(_cubic_elsewhere, 0.0, 1.0),
    "cubic_beyond": partial(_cubic_elsewhere, 3.0, 4.0),
}
