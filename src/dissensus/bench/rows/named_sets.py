"""The data sets of tasks by name: SETS for training, FOREIGN for OOD detection, SHIFTED for distribution shift.

GEOMETRIES has the grids of inputs, with named regions, on which one- and two-dimensional sets are drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.bench.rows.dataset_rows import DataRequest, DatasetRows, Root, SetKind, TaskRows
from dissensus.bench.rows.user_data import folder_rows, function_rows, image_rows, npz_rows, table_rows, uci_rows
from dissensus.bench.user_code import is_import_path
from dissensus.data import digits, fashion, image_set, quadratic_features, segmentation, toy
from dissensus.data.catalogue import CATALOGUE, data_folder, locate
from dissensus.data.file_formats import read_npz
from dissensus.data.tabular import REGRESSION_SETS, regression_folder

Ends = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Geometry:
    """The grid on which members are drawn, and its named regions."""

    positions: Tensor  # (n, 1) on a line, (side², 2) in a plane, the second coordinate running fastest
    inputs: Tensor  # (n, D) the network's inputs there, in original units
    regions: dict[str, Tensor]  # name -> (n,) boolean
    training_positions: Tensor  # (N, 1) or (N, 2) positions of the training rows


def line_geometry(
    x: Tensor,
    *,
    window: Ends,
    intervals: Sequence[Ends],
    inputs: Callable[[Tensor], Tensor] = lambda positions: positions,
    position: Callable[[Tensor], Tensor] = lambda x: x,
    points: int = 401,
) -> Geometry:
    """A Geometry on a line, "at_data" in the intervals; `inputs` turns positions (n, 1) into inputs, `position` back."""
    where = torch.linspace(*window, points)
    at_data = torch.stack([(where >= low) & (where <= high) for low, high in intervals]).any(0)
    outside = (where < intervals[0][0]) | (where > intervals[-1][1])
    regions = {"between": ~at_data & ~outside, "outside": outside, "at_data": at_data}
    shown = {name: inside for name, inside in regions.items() if inside.any()}
    return Geometry(where[:, None], inputs(where[:, None]), shown, position(x))


def plane_geometry(x: Tensor, *, window: Ends, far: float, side: int = 101) -> Geometry:
    """A Geometry in a square: "off_data" is farther than `far` from all training inputs, "at_data" nearer than half of it."""
    axis = torch.linspace(*window, side)
    positions = torch.cartesian_prod(axis, axis)
    distance = torch.cdist(positions, x.to(positions)).amin(1)
    return Geometry(positions, positions, {"off_data": distance > far, "at_data": distance < far / 2}, x)


# Data set -> function from its training inputs x (N, D) to its geometry.
# Intervals are those of the generating distribution, so regions do not depend on the draw.
X_SIN_X: dict[str, Any] = {"window": (0.0, 7.5), "intervals": ((1.5, 2.5), (4.5, 6.0))}
CLUSTERS: dict[str, Any] = {"window": (-10, 10), "intervals": ((-7.2, -4.8), (-1.2, 1.2), (4.8, 7.2)), "points": 801}
FEATURES: dict[str, Any] = {"inputs": quadratic_features, "position": lambda x: 2 * x[:, :1]}
GEOMETRIES: dict[str, Callable[[Tensor], Geometry]] = {
    "x_sin_x": partial(line_geometry, **X_SIN_X),
    "x_sin_x_features": partial(line_geometry, **X_SIN_X, **FEATURES),
    "cubic": partial(line_geometry, window=(-6.0, 6.0), intervals=((-4.0, 4.0),)),
    "cubic_gap": partial(line_geometry, window=(-4.5, 4.5), intervals=((-3.0, -1.0), (1.0, 3.0))),
    "hill": partial(line_geometry, window=(-4.0, 4.0), intervals=((-2.6, -1.4), (-0.6, 0.6), (1.4, 2.6))),
    "gp_draw": partial(line_geometry, window=(-6.0, 6.0), intervals=((-4.0, 0.0), (2.0, 4.0))),
    "three_clusters": partial(line_geometry, **CLUSTERS, **FEATURES),
    "two_moons": partial(plane_geometry, window=(-4.5, 5.0), far=1.0),
    "five_blobs": partial(plane_geometry, window=(-7.0, 7.0), far=1.0),  # blobs have a standard deviation of 0.4
}


UNKNOWN = "unknown"  # the set of foreign pixels: masks of test images, 1 at pixels of unknown classes


def scene_rows(
    read: Callable[..., segmentation.SegmentationSet],
    folder: Root,
    unknown: Sequence[str] = (),
    size: Sequence[int] | None = None,
) -> DatasetRows:
    """Images and masks of a set's splits. `unknown`: classes that are ignored in training and foreign at test time."""
    splits = tuple(read(split, folder=folder, size=size) for split in segmentation.SPLITS)
    ood = {}
    if unknown:
        splits, foreign = zip(*(segmentation.with_unknown(each, unknown) for each in splits), strict=True)
        ood = {UNKNOWN: TaskRows(splits[-1].images, foreign[-1])}
    train, validation, test = (TaskRows(each.images, each.masks) for each in splits)
    return DatasetRows(train, test, splits[0].classes, validation, ood)


def own_scene_rows(
    folder: Root,
    images: str,
    masks: str,
    classes: Sequence[str],
    void: int = segmentation.VOID,
    unknown: Sequence[str] = (),
    size: Sequence[int] | None = None,
) -> DatasetRows:
    """Rows from folders of images and masks; {split} in their names stands for train, val and test."""

    def read(split: str, *, folder: Root, size: Any) -> segmentation.SegmentationSet:
        root = data_folder(folder) or Path()
        pictures, labels = (root / name.replace("{split}", split) for name in (images, masks))
        return segmentation.segmentation_folder(pictures, labels, classes, void=void, size=size)

    return scene_rows(read, folder, unknown, size)


def scene_folder(part: str, folder: Root) -> Path:
    """The folder of a set that contains a folder of this name."""
    root = data_folder(folder)
    for path in [] if root is None else [root / part, *root.glob(f"*/{part}")]:
        if path.is_dir():
            return path.parents[part.count("/")]
    raise FileNotFoundError


class TaskSet(NamedTuple):
    """A data set for training: the function that makes its rows, its kind and its description."""

    make: Callable[..., DatasetRows]  # (folder, **options), or (asked, **options)
    kind: SetKind | None  # None: the likelihood decides between classes and values
    description: str
    location: str | Callable[[Root], Path] = "generated"  # a function if the user provides the files
    is_user_data: bool = False  # whether rows are the user's: `make` then takes a `DataRequest`, not the folder
    standardised: bool = False  # whether inputs are standardised already, unless the task says otherwise


def task_set(name: str) -> TaskSet:
    """The set of that name: one of SETS, or the result of the user's function."""
    if is_import_path(name):
        return TaskSet(partial(function_rows, name), None, "your own function", "your file", is_user_data=True)
    return SETS[name]


def image_file(asked: DataRequest, name: str, labelled: bool) -> TaskRows:
    """The images and labels in an .npz file."""
    images, labels = read_npz(asked.path(name))
    return TaskRows(torch.from_numpy(images), torch.from_numpy(labels))


def set_location(name: str, folder: Root) -> str:
    """Where a set is: "shipped", "generated", a folder, or "not found"."""
    where = SETS[name].location
    if isinstance(where, str):
        return where
    try:
        return str(where(folder))
    except FileNotFoundError:
        return "not found"


def _image_rows(name: str, folder: Root) -> DatasetRows:
    train, test = digits() if name == "digits" else (image_set(name, each, folder=folder) for each in ("train", "test"))
    return DatasetRows(image_rows(train), image_rows(test), train.classes)


def _toy_rows(train: toy.Points, test: toy.Points, *, classes: tuple[str, ...] = ()) -> DatasetRows:
    return DatasetRows(TaskRows(*train), TaskRows(*test), classes)


def _two_moons(folder: Root, count: int = 1000, noise: float = 0.1) -> DatasetRows:
    return _toy_rows(*(toy.two_moons(count, noise=noise, seed=seed) for seed in (0, 1)), classes=("upper", "lower"))


def _far_ring(folder: Root) -> TaskRows:
    x = toy.far_ring(count=400, centre=0, radius=4.0, std=0.3)
    return TaskRows(x, torch.zeros(len(x), dtype=torch.int64))


def _five_blobs(folder: Root, points: int = 40, scale: float = 0.4, draw: int = 0) -> DatasetRows:
    drawn = partial(toy.five_blobs, scale=scale)
    return _toy_rows(drawn(points, seed=draw), drawn(20, seed=1000 + draw), classes=tuple("12345"))


def _line_rows(
    make: Callable[..., toy.Points], test: int | None, folder: Root, points: int, noise: float, draw: int = 0
) -> DatasetRows:
    """Rows of a regression on a line; `test`: argument of its test rows, None for four times that of training rows."""
    counts = (points, 4 * points if test is None else test)
    return _toy_rows(*(make(count, noise=noise, seed=2 * draw + i) for i, count in enumerate(counts)))


def _x_sin_x_features(points: int, **options: Any) -> toy.Points:
    x, y = toy.x_sin_x(points, **options)
    return toy.quadratic_features(x), y


def _x_sin_x_gap(folder: Root, points: int = 45, noise: float = 0.25, draw: int = 0) -> TaskRows:
    """x sin x between the two clusters of `x_sin_x`, where there are no training rows."""
    generator = torch.Generator().manual_seed(2)
    x = 2.5 + 2.0 * torch.rand(200, 1, generator=generator)
    return TaskRows(x, x * x.sin() + noise * torch.randn(200, 1, generator=generator))


def _cubic_outside(folder: Root, points: int = 20, noise: float = 3.0, draw: int = 0) -> TaskRows:
    """x³ on [−6, −4] and [4, 6], outside the training inputs of `cubic`."""
    generator = torch.Generator().manual_seed(draw)
    x = 4.0 + 2.0 * torch.rand(200, 1, generator=generator)
    x[::2] *= -1
    return TaskRows(x, x**3 + noise * torch.randn(200, 1, generator=generator))


def _cubic_at(low: float, high: float, folder: Root, points: int = 201, noise: float = 2.0, draw: int = 0) -> TaskRows:
    """x³ at both signs of x from low to high."""
    x = torch.cat([-torch.linspace(high, low, 100), torch.linspace(low, high, 100)])[:, None]
    return TaskRows(x, x**3 + noise * torch.randn(200, 1, generator=torch.Generator().manual_seed(draw)))


def _hill(folder: Root, points: int = 3, noise: float = 0.5) -> DatasetRows:
    """Training rows without noise, so that both sides are equal; test rows with noise."""
    return _toy_rows(toy.hill(points), toy.hill(10 * points, noise=noise))


GAP = (0.0, 2.0)  # gap in the inputs of a Gaussian-process sample; training inputs lie on [−4, 0] and [2, 4]


def _gp_set(folder: Root, points: int = 40, lengthscale: float = 1.0, noise: float = 0.1, draw: int = 0) -> DatasetRows:
    seen, _ = _gp_rows(points, lengthscale, noise, draw)
    return DatasetRows(seen.select(torch.arange(points)), seen.select(torch.arange(points, len(seen.y))), ())


def _gp_gap(folder: Root, points: int = 40, lengthscale: float = 1.0, noise: float = 0.1, draw: int = 0) -> TaskRows:
    """The same function inside the gap."""
    return _gp_rows(points, lengthscale, noise, draw)[1]


def _gp_rows(points: int, lengthscale: float, noise: float, draw: int) -> tuple[TaskRows, TaskRows]:
    """Rows of one function, outside and inside the gap."""
    rows = TaskRows(*toy.gaussian_process(2 * points + 400, lengthscale=lengthscale, noise=noise, seed=draw))
    inside = ((rows.x > GAP[0]) & (rows.x < GAP[1])).squeeze(1)
    return rows.select(torch.nonzero(~inside).squeeze(1)), rows.select(torch.nonzero(inside).squeeze(1))


_own_set = partial(TaskSet, location="your files", is_user_data=True)


def _image_set(name: str) -> TaskSet:
    place, about = (lambda folder: locate(name, "test", folder=folder)[1][0].parent), CATALOGUE[name].classes
    return TaskSet(partial(_image_rows, name), "classification", f"{len(about)} classes", place)


def _scene_set(read: Callable[..., segmentation.SegmentationSet], part: str, description: str) -> TaskSet:
    return TaskSet(partial(scene_rows, read), "segmentation", description, partial(scene_folder, part))


def _line_set(description: str, *rows: Any, **defaults: Any) -> TaskSet:
    return TaskSet(partial(_line_rows, *rows, **defaults), "regression", description)


_GAPPED, _FEATURES = "with noise on two intervals with a gap between them", "as features x/2 and (x/2)²"
_CLUSTERS = "400 points in three clusters on a line"
_SCENES = "images and masks in folders: data.images, data.masks, data.classes"
_UCI = f"data.set of {', '.join(REGRESSION_SETS)}, or your own folder in this layout; data.split"
SETS: dict[str, TaskSet] = {
    "digits": TaskSet(
        partial(_image_rows, "digits"), "classification", "10,000 + 2,000 MNIST digits in the package", "shipped"
    ),
    "two_moons": TaskSet(_two_moons, "classification", "two interleaved half circles in the plane"),
    "x_sin_x": _line_set(f"x sin x {_GAPPED}", toy.x_sin_x, None, points=45, noise=0.25),
    "x_sin_x_features": _line_set(
        f"x sin x on two intervals, {_FEATURES}", _x_sin_x_features, None, points=45, noise=0.25
    ),
    "five_blobs": TaskSet(_five_blobs, "classification", "five Gaussian blobs on a ring in the plane"),
    "three_clusters": TaskSet(  # which has no test set in the papers: test errors are those on the training points
        lambda folder: _toy_rows(*[toy.three_clusters()] * 2), "regression", f"{_CLUSTERS}, {_FEATURES}", "shipped"
    ),
    "cubic": _line_set("x³ with noise, 20 points on [−4, 4]", toy.cubic, 200, points=20, noise=3.0),
    "cubic_gap": _line_set(f"x³ {_GAPPED}", toy.cubic_gap, 201, points=201, noise=2.0),
    "hill": TaskSet(_hill, "regression", "1 in the middle and −1 on both sides, symmetric"),
    "gp_draw": TaskSet(_gp_set, "regression", "a sample of a Gaussian process, observed on two intervals"),
    "npz": _own_set(npz_rows, None, "arrays x and y in .npz files: data.train_file, data.test_file"),
    "folder": _own_set(folder_rows, "classification", "images in data.path/train/CLASS and test/CLASS"),
    "table": _own_set(table_rows, None, "a CSV or Parquet file: data.file, data.target", standardised=True),
    **{name: _image_set(name) for name in ("mnist", "fashion_mnist", "cifar10", "cifar100", "svhn")},
    "camvid": _scene_set(segmentation.camvid, "trainannot", "11 classes of street scenes"),
    "streethazards": _scene_set(
        segmentation.streethazards, "train/annotations/training", "13 classes of simulated streets, and anomalies"
    ),
    "bdd_anomaly": _scene_set(
        segmentation.bdd_anomaly, "seg/labels/train", "19 classes of streets, some of them anomalies"
    ),
    "segmentation_folder": TaskSet(own_scene_rows, "segmentation", _SCENES, "your files"),
    "uci_regression": TaskSet(
        uci_rows, "regression", _UCI, lambda folder: regression_folder(folder, *REGRESSION_SETS), is_user_data=True
    ),
}
FOREIGN: dict[str, Callable[[Root], TaskRows]] = {
    "fashion": lambda folder: image_rows(fashion()),
    "digits": lambda folder: image_rows(digits()[1]),
    "far_ring": _far_ring,
    **{
        name: partial(lambda name, folder: image_rows(image_set(name, "test", folder=folder)), name)
        for name in CATALOGUE
    },
}
SHIFTED: dict[str, Callable[..., TaskRows]] = {
    "gap": _x_sin_x_gap,
    "outside": _cubic_outside,
    "gp_gap": _gp_gap,
    "cubic_between": partial(_cubic_at, 0.0, 1.0),
    "cubic_beyond": partial(_cubic_at, 3.0, 4.0),
}
