"""Wrong labels on purpose, and known: what a network memorises can then be told from what it learns."""

from __future__ import annotations

import torch
from torch import Tensor

from dissensus.numerics.arrays import tensor_of
from dissensus.numerics.checks import number, whole


def noisy_labels(labels: Tensor, share: float, *, classes: int, seed: int = 0) -> Tensor:
    """(N,) labels of which round(share · N), chosen by the seed, are replaced by another class, each as likely.

    A row is wrong exactly where the result differs from `labels`. The global generator is not touched.

    Args:
        labels: (N,) class indices, the true ones.
        share: of wrong labels, 0 to 1. All classes are still told apart best by the truth below 1 − 1/classes.
        classes: C, at least 2.
        seed: the same seed gives the same wrong labels; those of a smaller share are among those of a larger one.
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
    # Steps first: a permutation straight from the seed is the one `split_indices` has, and wrong rows would be those held out.
    steps = torch.randint(1, classes, (len(labels),), generator=generator)  # to one of the C − 1 other classes
    rows = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    noisy = labels.clone()
    noisy[rows] = ((labels[rows].cpu() + steps[rows]) % classes).to(labels)
    return noisy
