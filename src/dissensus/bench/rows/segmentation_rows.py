"""Segmentation sets as rows: images and masks of a set's splits, with some classes made unknown."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dissensus.bench.rows.dataset_rows import DatasetRows, Root, TaskRows
from dissensus.data.catalogue import data_folder
from dissensus.data.segmentation import SPLITS, VOID, SegmentationSet, segmentation_folder, with_unknown

UNKNOWN = "unknown"  # the set of foreign pixels: masks of test images, 1 at pixels of unknown classes


def scene_rows(
    read: Callable[..., SegmentationSet], folder: Root, unknown: Sequence[str] = (), size: Sequence[int] | None = None
) -> DatasetRows:
    """Images and masks of a set's splits. `unknown`: classes that are ignored in training and foreign at test time."""
    train, validation, test = (read(split, folder=folder, size=size) for split in SPLITS)
    ood = {}
    if unknown:
        splits = (train, validation, test)
        (train, _), (validation, _), (test, foreign) = (with_unknown(each, unknown) for each in splits)
        ood = {UNKNOWN: TaskRows(test.images, foreign)}
    learned, held, tested = (TaskRows(each.images, each.masks) for each in (train, validation, test))
    return DatasetRows(learned, tested, train.classes, held, ood)


def own_scene_rows(
    folder: Root,
    images: str,
    masks: str,
    classes: Sequence[str],
    void: int = VOID,
    unknown: Sequence[str] = (),
    size: Sequence[int] | None = None,
) -> DatasetRows:
    """Rows from folders of images and masks; {split} in their names stands for train, val and test."""

    def read(split: str, *, folder: Root, size: Any) -> SegmentationSet:
        root = data_folder(folder) or Path()
        pictures, labels = (root / name.replace("{split}", split) for name in (images, masks))
        return segmentation_folder(pictures, labels, classes, void=void, size=size)

    return scene_rows(read, folder, unknown, size)


def scene_folder(part: str, folder: Root) -> Path:
    """The folder of a set that contains a folder of this name."""
    root = data_folder(folder)
    for path in [] if root is None else [root / part, *root.glob(f"*/{part}")]:
        if path.is_dir():
            return path.parents[part.count("/")]
    raise FileNotFoundError
