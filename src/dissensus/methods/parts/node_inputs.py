"""Inputs of a NodeBNN in training: each example several times, and beside them what belongs to no example."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.particles import Member, Particles


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


def taken_whole(particles: Particles, x: Inputs, known: Collection[int]) -> set[int]:
    """Numbers of further tensors t in x, as long as the batch, that the network takes whole.

    Those by which the last example is what it is in the batch, f(x, t)_B = f(x_B, t), and is not with its row of t alone.
    Raises where t is (B, B, ...) and the last example is another one either way: then t belongs to pairs of examples.
    """
    size, several = batches.size(x), batches.tensors(x)
    square = {i: t.shape[:2] == (size, size) for i, t in enumerate(several)}
    doubtful = [i for i, t in enumerate(several) if i and i not in known and t.ndim and len(t) == size > 1]

    def last_of(some: Inputs, rows: int) -> Tensor | None:
        """The last example's outputs; None where the network does not give one for each of so many."""

        def run(member: Member) -> Tensor:
            return batches.call(member.network, some)

        try:
            outputs: Tensor = particles.call(run, *particles.at(0))[0]
        except Exception:  # whatever a forward says to one example beside the rows of many
            return None
        return outputs[-1] if outputs.ndim and len(outputs) == rows else None

    found: set[int] = set()
    together = last_of(x, size) if doubtful else None
    for i in sorted(doubtful, key=square.__getitem__):  # pairs last: what else is taken whole is known by then
        whole, sliced = last_of(_last(x, {*known, *found, i}), 1), last_of(_last(x, {*known, *found}), 1)
        if together is None:
            continue
        rounding = 100 * torch.finfo(together.dtype).eps * _largest(together)
        if sliced is not None and _largest(sliced - together) <= 10 * rounding:
            continue
        if whole is not None and _largest(whole - together) <= rounding:
            found.add(i)
        elif square[i]:
            raise ValueError(
                f"expected inputs with a row for each example, got one of shape {tuple(several[i].shape)} for {size} examples "
                "that the network reads as pairs; NodeBNN repeats examples, which pairs do not follow: compute them in forward"
            )
    return found


def _largest(tensor: Tensor) -> float:
    """The largest absolute value that is finite; logits may be −inf."""
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _last(x: Inputs, whole: Collection[int]) -> Inputs:
    """The last example of x, beside what belongs to none."""
    size, number = batches.size(x), count()

    def one(tensor: Tensor) -> Tensor:
        mine = next(number) not in whole and tensor.ndim > 0 and len(tensor) == size
        return tensor[-1:] if mine else tensor

    return batches.apply(x, one)
