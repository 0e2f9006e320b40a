"""Splitting a training set into train and validation rows, so that nothing is ever chosen on test data."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dissensus.numerics.arrays import as_tensor
from dissensus.numerics.checks import number

if TYPE_CHECKING:
    from dissensus.data.images import ImageSet


def split_indices(
    count: int, *, validation: int | float, seed: int = 0, labels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Train rows (N − V,) and validation rows (V,), int64, ascending, disjoint, together 0 … count − 1.

    Args:
        count: N.
        validation: V, how many rows, or which share of them when it is a float.
        seed: the same seed gives the same rows; the global generator is not touched.
        labels: (count,); every class then gives its proportional share, rounded by largest remainder so that the sum is
            exact.
    """
    held, labels = _held_out(count, validation), as_tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    if labels is None:
        chosen = order[:held]
    else:
        if labels.shape != (count,):
            raise ValueError(
                f"expected labels of shape ({count},), got {tuple(labels.shape)}; pass one class index a row"
            )
        labels = labels.cpu()
        grouped = order[torch.argsort(labels[order], stable=True)]  # by class, shuffled within
        counts = torch.unique(labels, return_counts=True)[1]
        rank = torch.arange(count) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        chosen = grouped[rank < torch.repeat_interleave(_quotas(counts, held), counts)]
    mask = torch.zeros(count, dtype=torch.bool)
    mask[chosen] = True
    return torch.nonzero(~mask).flatten(), torch.nonzero(mask).flatten()


def train_validation(
    images: ImageSet, *, validation: int | float, seed: int = 0, stratified: bool = True
) -> tuple[ImageSet, ImageSet]:
    """Train and validation ImageSet cut from a training set.

    Args:
        validation, seed: as in `split_indices`.
        stratified: whether both keep the shares of the classes.
    """
    labels = images.labels if stratified else None
    train, held = split_indices(len(images), validation=validation, seed=seed, labels=labels)
    return images.subset(train), images.subset(held)


def _held_out(count: int, validation: int | float) -> int:
    number("validation", validation)
    held = int(validation) if isinstance(validation, Integral) else round(validation * count)
    if not 0 < held < count:
        raise ValueError(
            f"expected between 1 and {count - 1} validation rows of {count}, got {held} (validation={validation!r}); "
            f"a float is a share of the rows, an integer a number of rows"
        )
    return held


def _quotas(counts: Tensor, held: int) -> Tensor:
    """(C,) rows each class gives up: held · n_c / N by largest remainder, in integers, which round nothing."""
    scaled = held * counts
    total = int(counts.sum())
    quotas = scaled // total
    left = held - int(quotas.sum())
    quotas[torch.argsort(scaled % total, descending=True, stable=True)[:left]] += 1
    return quotas
