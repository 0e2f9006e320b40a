"""Splits of a training set into train and validation rows, and deliberately wrong labels at known rows."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dissensus.utils.arrays import as_tensor, tensor_of
from dissensus.utils.checks import integer, number

if TYPE_CHECKING:
    from dissensus.data.images import ImageSet


def split_indices(
    count: int, *, validation: int | float, seed: int = 0, labels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Splits rows 0 … count − 1 at random: train rows (N − V,) and validation rows (V,), both int64 and ascending.

    Args:
        count: number of rows, N.
        validation: number of validation rows V if an integer, their share of all rows if a float.
        seed: the same seed gives the same rows; the global generator is not used.
        labels: (count,) class indices for a stratified split: every class gives its share, rounded by largest remainder.
    """
    number("validation", validation)
    held, labels = int(validation if isinstance(validation, Integral) else round(validation * count)), as_tensor(labels)
    if not 0 < held < count:
        got = f"{held} (validation={validation!r}); pass a float for a share, an integer for a number"
        raise ValueError(f"expected between 1 and {count - 1} validation rows of {count}, got {got}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if labels is None:
        chosen = order[:held]
    else:
        if labels.shape != (count,):
            raise ValueError(f"expected labels of shape ({count},), got {tuple(labels.shape)}; pass one class per row")
        labels = labels.cpu()
        grouped = order[torch.argsort(labels[order], stable=True)]  # by class, shuffled within
        counts = torch.unique(labels, return_counts=True)[1]
        rank = torch.arange(count) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        # Validation rows of each class: held · n_c / N by largest remainder, in exact integer arithmetic.
        quotas = held * counts // count
        left = held - int(quotas.sum())
        quotas[torch.argsort(held * counts % count, descending=True, stable=True)[:left]] += 1
        chosen = grouped[rank < torch.repeat_interleave(quotas, counts)]
    mask = torch.zeros(count, dtype=torch.bool)
    mask[chosen] = True
    return torch.nonzero(~mask).flatten(), torch.nonzero(mask).flatten()


def train_validation(
    images: ImageSet, *, validation: int | float, seed: int = 0, stratified: bool = True
) -> tuple[ImageSet, ImageSet]:
    """Splits a training ImageSet into a train and a validation ImageSet.

    Args:
        validation, seed: as in `split_indices`.
        stratified: keeps the shares of the classes in both.
    """
    labels = images.labels if stratified else None
    train, held = split_indices(len(images), validation=validation, seed=seed, labels=labels)
    return images.subset(train), images.subset(held)


def noisy_labels(labels: Tensor, share: float, *, classes: int, seed: int = 0) -> Tensor:
    """Replaces round(share · N) labels, chosen by the seed, by another class, uniform over the others; returns (N,) labels.

    The wrong rows are those where the result differs from `labels`. The global generator is not used.

    Args:
        labels: (N,) true class indices.
        share: share of wrong labels, 0 to 1. Below 1 − 1/classes the true class remains the most frequent one.
        classes: number of classes C, at least 2.
        seed: the same seed gives the same wrong labels; a larger share keeps the wrong labels of a smaller one.
    """
    labels = tensor_of(labels)
    number("share", share, least=0, most=1)
    integer("classes", classes, least=2)
    if labels.ndim != 1 or labels.is_floating_point() or bool(((labels < 0) | (labels >= classes)).any()):
        got = f"{labels.dtype} of shape {tuple(labels.shape)} with other values"
        raise ValueError(f"expected labels (N,) from 0 to {classes - 1}, got {got}; pass class indices")
    generator = torch.Generator().manual_seed(seed)
    # Draw the steps first: a permutation drawn first would equal that of `split_indices`, and the held-out rows would be wrong.
    steps = torch.randint(1, classes, (len(labels),), generator=generator)  # to one of the C − 1 other classes
    rows = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    noisy = labels.clone()
    noisy[rows] = ((labels[rows].cpu() + steps[rows]) % classes).to(labels)
    return noisy
