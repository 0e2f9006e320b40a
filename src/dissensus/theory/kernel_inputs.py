"""Checks the inputs of kernels, computes their normalised inner products in float64, and checks memory budgets."""

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.utils.checks import number
from dissensus.utils.text import format_bytes


def input_moments(x1: Tensor, x2: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(x·x'/D (N1, N2), x·x/D (N1, 1), x'·x'/D (1, N2)) of vectors (N1, D) and (N2, D); x2 = None means x1."""
    first, second = (x.to(torch.float64) for x in checked_pair(x1, x2))
    if first.ndim != 2:
        raise ValueError(f"expected inputs of shape (N, D), got {tuple(first.shape)}; flatten them first")
    width = first.shape[1]
    norm1, norm2 = first.square().sum(1)[:, None] / width, second.square().sum(1)[None] / width
    return first @ second.T / width, norm1, norm2


def checked_pair(x1: Tensor, x2: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both inputs (x2 = None means x1); raises if they are empty, not finite, or of different shapes."""
    second = x1 if x2 is None else x2
    for x in (x1, second):
        check_examples(x)
        if not bool(x.isfinite().all()):  # −∞ is valid in masks elsewhere, but has no kernel
            row = int((~x.isfinite()).nonzero()[0, 0])
            raise ValueError(f"expected finite inputs, got NaN or infinity in row {row}; clean the data")
    if x1.shape[1:] != second.shape[1:]:
        got = f"{tuple(x1.shape[1:])} and {tuple(second.shape[1:])}"
        raise ValueError(f"expected examples of one shape, got {got}; pass inputs of the same shape")
    first = x1.detach()
    return first, first if second is x1 else second.detach()


def check_examples(x: batches.Inputs) -> None:
    """Raises if there is no example."""
    if batches.count_examples(x) == 0:
        raise ValueError("expected at least one input, got none; pass some rows of the data")


def check_kernels(*kernels: Tensor) -> None:
    """Raises if a kernel overflowed float64."""
    if not all(bool(kernel.isfinite().all()) for kernel in kernels):
        raise ValueError("expected inputs whose squares fit float64, got a kernel of NaN or infinity; scale them down")


def check_budget(needed: int, memory: int, what: str, do: str) -> None:
    """Raises, before anything is computed, if `needed` bytes exceed `memory`."""
    if needed > memory:
        got = f"{format_bytes(needed)}; {do}, or pass memory={needed}"
        raise ValueError(f"expected {what} within {format_bytes(memory)}, got {got}")


def variance_of(name: str, value: float) -> float:
    """A variance as a float; raises if it is not one."""
    return float(number(name, value, least=0, hint="pass a variance"))
