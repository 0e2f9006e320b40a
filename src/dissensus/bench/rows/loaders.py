"""Loaders of a task's rows: images standardised batch by batch, augmented where a task asks for it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dissensus.bench.rows.learned import TaskRows
from dissensus.data import Augmentation, Batches, SegmentationAugmentation, Standardiser

# What makes an augmentation, with the settings that a task may write.
AUGMENTATIONS: dict[str, Callable[..., Any]] = {
    "none": lambda: lambda images: images,
    "crop": lambda padding=2: Augmentation(padding=padding, flip=False),  # for what must not be flipped: digits
    "flip_crop": lambda padding=4: Augmentation(padding=padding),  # as usual for CIFAR
    "segmentation": SegmentationAugmentation,
}


class _SeenImages:
    """(images, targets) as networks see them: augmented, standardised, classes as int64."""

    joint = True  # takes inputs and targets

    def __init__(self, standardiser: Standardiser, augment: Callable[..., Any] | None) -> None:
        self.standardiser, self.augment = standardiser, augment or AUGMENTATIONS["none"]()

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if getattr(self.augment, "joint", False):
            x, y = self.augment(self.standardiser(x), y)  # it interpolates: no whole numbers
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
    """(x, y) batches in float32, images standardised after they were augmented; what is random is torch's generator's.

    That generator's state is in a training checkpoint, so a run that was stopped goes on with the batches it would have had.
    """
    y = rows.y if targets is None else targets(rows.y)
    y = y.float() if y.is_floating_point() else y
    if rows.x.ndim == 4:
        seen = Batches(rows.x, y, batch_size=batch_size, shuffle=shuffle, augment=_SeenImages(standardiser, augment))
    else:  # rows once and for all, in the precision they have
        seen = Batches(standardiser(rows.x).float(), y, batch_size=batch_size, shuffle=shuffle)
    return seen
