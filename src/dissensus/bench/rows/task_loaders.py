"""Loaders of a task's rows: images are standardised batch by batch, and augmented if the task says so."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dissensus.bench.rows.dataset_rows import TaskRows
from dissensus.data import Augmentation, Batches, SegmentationAugmentation, Standardiser

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

    def __init__(self, standardiser: Standardiser, augment: Callable[..., Any] | None) -> None:
        self.standardiser, self.augment = standardiser, augment or AUGMENTATIONS["none"]()

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
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
    """(x, y) batches in float32; images are augmented, then standardised. Random numbers come from torch's generator.

    A training checkpoint stores that generator's state, so a stopped run continues with the same batches.
    """
    y = rows.y if targets is None else targets(rows.y)
    y = y.float() if y.is_floating_point() else y
    if rows.x.ndim == 4:
        prepare = _ImagePreparation(standardiser, augment)
        seen = Batches(rows.x, y, batch_size=batch_size, shuffle=shuffle, augment=prepare)
    else:  # rows are standardised once, in their precision
        seen = Batches(standardiser(rows.x).float(), y, batch_size=batch_size, shuffle=shuffle)
    return seen
