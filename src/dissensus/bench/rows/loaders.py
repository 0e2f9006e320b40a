"""Loaders of a task's rows: images standardised batch by batch, augmented where a task asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.bench.rows.learned import TaskRows
from dissensus.data import Batches, SegmentationAugmentation, Standardiser

# What makes an augmentation, with the settings that a task may write.
AUGMENTATIONS: dict[str, Callable[..., Any]] = {
    "none": lambda: lambda images: images,
    "crop": lambda pad=2: lambda images: crop(images, pad=pad),  # for what must not be flipped: digits
    "flip_crop": lambda pad=4: lambda images: crop(flip(images), pad=pad),  # as usual for CIFAR
    "segmentation": SegmentationAugmentation,
}


class StandardisedBatches:
    """(x, y) batches in float32, images standardised after they were augmented, with masks before; what is random is torch's
    generator's.

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
        augment: Callable[..., Any] | None = None,
    ) -> None:
        self.images = rows.x.ndim == 4
        x = rows.x if self.images else standardiser(rows.x).float()  # rows once and for all, in the precision they have
        y = rows.y if targets is None else targets(rows.y)
        self.batches = Batches(x, y.float() if y.is_floating_point() else y, batch_size=batch_size, shuffle=shuffle)
        self.standardiser = standardiser
        self.augment: Any = augment

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.images:
            yield from self.batches
            return
        for x, y in self.batches:
            if getattr(self.augment, "joint", False):
                x, y = self.augment(self.standardiser(x), y)  # interpolates, so no whole numbers
            else:
                x = self.standardiser(x if self.augment is None else self.augment(x))
            yield x, y.long()


def flip(images: Tensor) -> Tensor:
    """Images (B, C, H, W), each mirrored left to right with probability ½."""
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)


def crop(images: Tensor, *, pad: int) -> Tensor:
    """Images (B, C, H, W), each moved by up to `pad` pixels in both directions, zeros outside."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    down, right = torch.randint(2 * pad + 1, (2, count))
    rows = (down[:, None] + torch.arange(height))[:, None, :, None]  # (B, 1, H, 1)
    columns = (right[:, None] + torch.arange(width))[:, None, None, :]  # (B, 1, 1, W)
    batch, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return padded[batch, channel, rows, columns]
