"""Inputs of a NodeBNN in training: each example several times, and beside them what belongs to no example."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.particles import Particles


def repeated_inputs(x: Inputs, times: int, *, first: int | None = None, whole: Collection[int] = ()) -> Inputs:
    """x, or its first rows, with each row so many times; what has no row per example is left as it is.

    `whole`: numbers of tensors that have none though they may be as long as the batch.
    """
    size, number = batches.size(x), count()

    def one(tensor: Tensor) -> Tensor:
        mine = next(number) not in whole and tensor.ndim > 0 and len(tensor) == size
        return repeated(tensor[:first], times) if mine else tensor

    return batches.apply(x, one)


def repeated(tensor: Tensor, times: int) -> Tensor:
    """(B · times, ...): each row so many times, in a row."""
    return tensor if times == 1 else tensor[:, None].expand(-1, times, *tensor.shape[1:]).flatten(0, 1)


def of_another_length(x: Inputs) -> set[int]:
    """Numbers of the tensors in x that are not as long as the batch. One row may stand for those of all examples."""
    size = batches.size(x)
    return {i for i, tensor in enumerate(batches.tensors(x)) if tensor.ndim and len(tensor) not in (1, size)}


def check_repeatable(particles: Particles, x: Inputs, whole: Collection[int]) -> None:
    """Raises where examples that stand twice in a batch, x₁, x₁, x₂, x₂, …, have other outputs than when they stand once.

    Then one of several tensors as long as the batch has no row per example: it is a table, or belongs to pairs of examples.
    """
    size = batches.size(x)
    beside = [t for i, t in enumerate(batches.tensors(x)) if i and i not in whole and t.ndim and len(t) == size > 1]
    if not beside:
        return

    def outputs(some: Inputs) -> Tensor:
        found: Tensor = particles.call(lambda member: batches.call(member.network, some), *particles.at(0))[0]
        return found

    once = repeated(outputs(x), 2)
    try:
        twice = outputs(repeated_inputs(x, 2, whole=whole))
    except (RuntimeError, ValueError, IndexError):
        twice = once[:0]
    rounding = 1e-3 * float(once.nan_to_num(0.0, 0.0, 0.0).abs().max())
    if twice.shape != once.shape or not torch.allclose(twice, once, rtol=0.0, atol=rounding, equal_nan=True):
        raise ValueError(
            f"expected inputs with a row for each example, got {[tuple(t.shape) for t in beside]} beside {size} examples, of "
            "which the network reads one whole; NodeBNN repeats examples: keep a table in the network as a buffer, compute "
            "what belongs to pairs of examples in forward, or let batches have another size than the table"
        )
