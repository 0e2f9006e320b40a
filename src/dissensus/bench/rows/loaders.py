"""Loaders of a task's rows: images standardised batch by batch, augmented where a task asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from dissensus.bench.rows.sources import TaskRows
from dissensus.data import Augmentation, Batches, Standardiser
from dissensus.numerics.checks import one_of

AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda images: images,
    "crop": Augmentation(padding=2, flip=False),  # for what must not be flipped: digits
    "flip_crop": Augmentation(),  # as usual for CIFAR
}


class StandardisedBatches:
    """(x, y) batches in float32, images standardised after they were augmented; what is random is torch's generator's.

    That generator's state is in a training checkpoint, so a run that was stopped goes on with the batches it would have had.
    """

    def __init__(
        self,
        rows: TaskRows,
        standardiser: Standardiser,
        *,
        targets: Standardiser | None = None,
        batch_size: int,
        shuffle: bool = False,
        augment: str = "none",
    ) -> None:
        self.images = rows.x.ndim == 4
        x = rows.x if self.images else standardiser(rows.x).float()  # rows once and for all, in the precision they have
        y = rows.y if targets is None else targets(rows.y)
        self.batches = Batches(x, y.float() if y.is_floating_point() else y, batch_size=batch_size, shuffle=shuffle)
        self.standardiser = standardiser
        self.augment = AUGMENTATIONS[one_of("training.augment", augment, AUGMENTATIONS)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.images:
            yield from self.batches
            return
        for x, y in self.batches:
            yield self.standardiser(self.augment(x)), y
