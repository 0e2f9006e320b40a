"""Deliberately wrong labels at known rows, to separate memorising from learning."""

from __future__ import annotations

import torch
from torch import Tensor

from dissensus.numerics.arrays import tensor_of
from dissensus.numerics.checks import number, whole


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
    whole("classes", classes, least=2)
    if labels.ndim != 1 or labels.is_floating_point() or bool(((labels < 0) | (labels >= classes)).any()):
        raise ValueError(
            f"expected labels (N,) from 0 to {classes - 1}, got {labels.dtype} of shape {tuple(labels.shape)} with other "
            "values; pass class indices"
        )
    generator = torch.Generator().manual_seed(seed)
    # Draw the steps first: a permutation drawn first would equal that of `split_indices`, and the held-out rows would be wrong.
    steps = torch.randint(1, classes, (len(labels),), generator=generator)  # to one of the C − 1 other classes
    rows = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    noisy = labels.clone()
    noisy[rows] = ((labels[rows].cpu() + steps[rows]) % classes).to(labels)
    return noisy
