"""The rows of a data set (training, validation and test rows), and loaders that standardise and augment them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.data import Augmentation, Batches, SegmentationAugmentation, Standardiser
from dissensus.data.catalogue import FOLDER_VARIABLE, data_folder

SetKind = Literal["classification", "regression", "segmentation"]
Root = str | Path | None


class TaskRows(NamedTuple):
    """Inputs and targets: images (N, C, H, W) uint8 or rows (N, D); classes (N,), masks (N, H, W) uint8 or values (N, 1).

    Images may be an object that stands for them: x[rows] has those rows, x.read() is their tensor, made batch by batch.
    """

    x: Tensor
    y: Tensor
    true_labels: Tensor | None = None  # the true labels if some were made wrong, else None

    def select(self, rows: Tensor) -> TaskRows:
        return TaskRows(self.x[rows], self.y[rows], None if self.true_labels is None else self.true_labels[rows])

    def sample(self, count: int | None, *, seed: int) -> TaskRows:
        """At most `count` rows, chosen by the seed, in their original order."""
        if count is None or count >= len(self.y):
            return self
        order = torch.randperm(len(self.y), generator=torch.Generator().manual_seed(seed))
        return self.select(order[:count].sort().values)


class DataRequest(NamedTuple):
    """The request for the rows of a user's data set."""

    folder: Root  # folder of the user's data
    beside: str  # folder of the user's task file; "" for shipped tasks
    kind: SetKind
    seed: int  # seed of the held-out rows

    def path(self, name: str) -> Path:
        """A file or folder: an absolute path, or a name in the data folder, beside the task, or in the current folder."""
        places = [data_folder(self.folder), Path(self.beside) if self.beside else None, Path()]
        return find_file(name, [place for place in places if place is not None])


def find_file(name: str, folders: Sequence[Path], what: str = "") -> Path:
    """An absolute path, or the name in the first folder that has it, or in the current folder if there are no folders."""
    tried = [folder / Path(name).expanduser() for folder in folders or [Path()]]
    for path in tried:
        if path.exists():
            return path
    raise FileNotFoundError(
        f"expected {what}{name!r} at {' or '.join(map(str, dict.fromkeys(tried)))}, got nothing there; correct its name in "
        f"the task, put it beside the task, or pass its folder as --data or {FOLDER_VARIABLE}"
    )


class DatasetRows(NamedTuple):
    """The rows of a data set for training, and sets that come with it; validation is None if it has none."""

    train: TaskRows
    test: TaskRows
    classes: tuple[str, ...]
    validation: TaskRows | None = None
    ood: Mapping[str, TaskRows] = MappingProxyType({})
    shift: Mapping[str, TaskRows] = MappingProxyType({})
    read_file: Callable[[str, bool], TaskRows] | None = None  # (file, whether it has targets) -> rows like these
    sorted: bool = False  # whether training rows may come sorted by class


# Constructors of augmentations; their arguments are the settings of a task.
AUGMENTATIONS: dict[str, Callable[..., Any]] = {
    "none": lambda: lambda images: images,
    # for images that must not be flipped, such as digits
    "crop": lambda padding=2: Augmentation(padding=padding, flip=False),
    "flip_crop": lambda padding=4: Augmentation(padding=padding),  # as usual for CIFAR
    "segmentation": SegmentationAugmentation,
}


class _ImagePreparation:
    """Turns (images, targets) into the network's inputs and targets: augmented, standardised, classes as int64."""

    joint = True  # takes inputs and targets

    def __init__(self, standardiser: Standardiser, augment: Callable[..., Any] | None, files: Any = None) -> None:
        self.standardiser, self.augment, self.files = standardiser, augment or AUGMENTATIONS["none"](), files

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.files is not None:  # x are rows
            x = self.files[x].read().to(y.device)
        if getattr(self.augment, "joint", False):
            x, y = self.augment(self.standardiser(x), y)  # it interpolates, so inputs must be floating point
            return x, y.long()
        return self.standardiser(self.augment(x)), y if y.is_floating_point() else y.long()


def standardised_batches(
    rows: TaskRows,
    standardiser: Standardiser,
    *,
    targets: Standardiser | None = None,
    batch_size: int,
    shuffle: bool = False,
    augment: Callable[..., Any] | None = None,
) -> Batches:
    """(x, y) batches in float32; images are augmented, then standardised, by torch's generator, which checkpoints save."""
    y = rows.y if targets is None else targets(rows.y)
    y = y.float() if y.is_floating_point() else y
    if rows.x.ndim != 4:  # rows are standardised once, in their precision
        return Batches(standardiser(rows.x).float(), y, batch_size=batch_size, shuffle=shuffle)
    files = None if isinstance(rows.x, Tensor) else rows.x
    x = rows.x if files is None else torch.arange(len(y), device=y.device)
    prepare = _ImagePreparation(standardiser, augment, files)
    return Batches(x, y, batch_size=batch_size, shuffle=shuffle, augment=prepare)
