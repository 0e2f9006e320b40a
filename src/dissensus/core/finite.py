"""Finite or not, and in which member: the questions that training and prediction ask of their numbers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dissensus.core.errors import Diverged


@torch.no_grad()
def suspicious(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors may hold a number that is not finite; read on the host.

    One pass without a temporary: a norm is not finite if a term is not, nor where it overflows.
    """
    given = [tensor for tensor in tensors if tensor.numel()]
    return bool(given) and not math.isfinite(torch.stack(torch._foreach_norm(given)).sum().item())


@torch.no_grad()
def members_not_finite(own: Sequence[Tensor], shared: Sequence[Tensor], members: int) -> Tensor:
    """(M,) whose rows of the own tensors (M, ...) are not finite; all members where only a shared tensor is not.

    Without a choice in Python and without waiting for a device, so that a CUDA graph can hold it.
    """
    rows = [_largest(tensor, tuple(range(1, tensor.ndim))).isfinite() for tensor in own if tensor.numel()]
    wholes = [_largest(tensor, tuple(range(tensor.ndim))).isfinite() for tensor in shared if tensor.numel()]
    of_all = ~torch.stack(wholes).all() if wholes else None
    if not rows:
        nobody = torch.zeros(members, dtype=torch.bool)
        return nobody if of_all is None else of_all.expand(members)
    bad = ~torch.stack(rows).all(0)
    return bad if of_all is None else torch.where(bad.any(), bad, of_all)


def _largest(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The largest absolute value over these axes; NaN where there is one."""
    largest: Tensor = torch.linalg.vector_norm(tensor, math.inf, dim=axes) if axes else tensor.abs()
    return largest


def check_predictions(described: Sequence[Tensor], steps: Tensor, *, first: int = 0) -> None:
    """Raises Diverged where members' descriptions, each (M, B, ...), hold NaN or +∞; −∞ is the log of a probability 0.

    `first`: the number of the first of these members. Waits for the device.
    """
    given = [tensor for tensor in described if tensor.is_floating_point() and tensor.numel()]
    largest = [tensor.amax(tuple(range(1, tensor.ndim))) for tensor in given]  # (M,) NaN where there is one
    if not given:
        return
    bad = ~(torch.stack(largest) < math.inf).all(0)
    if bad.any():
        raise Diverged([first + i for i in bad.nonzero().flatten().tolist()], int(steps), "prediction")
