"""Loaders of a task's rows: images standardised batch by batch, augmented where a task asks for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dissensus.bench.rows.sources import TaskRows
from dissensus.data import Augmentation, Batches, Standardiser
from dissensus.numerics.checks import one_of

AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda images: images,
    "crop": Augmentation(padding=2, flip=False),  # for what must not be flipped: digits
    "flip_crop": Augmentation(),  # as usual for CIFAR
}


def standardised_batches(
    rows: TaskRows,
    standardiser: Standardiser,
    *,
    targets: Standardiser | None = None,
    batch_size: int,
    shuffle: bool = False,
    augment: str = "none",
) -> Batches:
    """(x, y) batches in float32, images standardised after they were augmented; what is random is torch's generator's.

    That generator's state is in a training checkpoint, so a run that was stopped goes on with the batches it would have had.
    """
    change = AUGMENTATIONS[one_of("training.augment", augment, AUGMENTATIONS)]
    y = rows.y if targets is None else targets(rows.y)
    y = y.float() if y.is_floating_point() else y
    if rows.x.ndim == 4:
        seen = Batches(rows.x, y, batch_size=batch_size, shuffle=shuffle, augment=lambda x: standardiser(change(x)))
    else:  # rows once and for all, in the precision they have
        seen = Batches(standardiser(rows.x).float(), y, batch_size=batch_size, shuffle=shuffle)
    return seen
