"""Copies of many tensors at once: on a GPU, one kernel for all that lie alike in memory."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dissensus.utils.torch_private import copy_tensors, in_function_transform


def copy_by_name(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors, on a GPU by few kernels for all of them; vmap has no rule for that."""
    # Compilers come first: older ones do not know the stack of function transforms.
    plain = torch.compiler.is_compiling() or not tensors or not all(tensor.is_cuda for tensor in tensors.values())
    if plain or in_function_transform():
        return {name: tensor.clone() for name, tensor in tensors.items()}
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    copy_all(list(found.values()), list(tensors.values()))
    return {name: copied.data for name, copied in found.items()}  # `data` begins at version 0, as a clone does


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, of the same shape.

    torch copies a whole list tensor by tensor if one pair has other dtypes or strides than the rest, so pairs are grouped, and
    strides of axes of length one, which say nothing, are made equal.
    """
    if not targets:
        return
    alike = [*map(Tensor.stride, targets)] == [*map(Tensor.stride, sources)]
    if not targets[0].is_cuda or (alike and len({each.dtype for each in (*targets, *sources)}) == 1):
        copy_tensors(list(targets), list(sources))
        return
    groups: defaultdict[object, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        # whether equal indices are equally far from the first number in memory
        axes = zip(target.shape, target.stride(), source.stride(), strict=True)
        alike = target.shape == source.shape and all(size == 1 or a == b for size, a, b in axes)
        if alike and target.stride() != source.stride():
            source = source.as_strided(target.shape, target.stride())
        group = groups[(target.dtype, source.dtype, alike)]
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        copy_tensors(*group)
