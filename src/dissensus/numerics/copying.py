"""Copies of many tensors at once: on a GPU, one kernel for all that lie alike in memory."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, of the same shape.

    torch copies a whole list tensor by tensor if one pair has other dtypes or strides than the rest, so pairs are grouped, and
    strides of axes of length one, which say nothing, are made equal.
    """
    if not targets or not targets[0].is_cuda:
        torch._foreach_copy_(list(targets), list(sources))
        return
    groups: defaultdict[object, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        alike = _same_places(target, source)
        if alike and target.stride() != source.stride():
            source = source.as_strided(target.shape, target.stride())
        group = groups[(target.dtype, source.dtype, alike)]
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


def _same_places(a: Tensor, b: Tensor) -> bool:
    """Whether equal indices are equally far from the first number in memory."""
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.shape == b.shape and all(size == 1 or one == other for size, one, other in pairs)
