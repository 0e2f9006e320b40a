"""Whether numbers are finite, and which member's are not: asked in training and in prediction."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def suspicious(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors may hold a number that is not finite; read on the host.

    One pass without a temporary, by norms: these are not finite if a term is not, and also where they overflow.
    """
    given = [tensor for tensor in tensors if tensor.numel()]
    return bool(given) and not math.isfinite(torch.stack(torch._foreach_norm(given)).sum().item())


@torch.no_grad()
def flag_not_finite(tensors: Sequence[Tensor], flag: Tensor, one: Tensor) -> None:
    """Sets the flag, () in float32, to 1 where a tensor holds a number that is not finite; else it stays as it is.

    One kernel for all tensors of a dtype, without waiting for the device: the one that torch's GradScaler uses. It multiplies
    the tensors by `one`, a 1 on their device.
    """
    for dtype in {tensor.dtype for tensor in tensors}:
        torch._amp_foreach_non_finite_check_and_unscale_([t for t in tensors if t.dtype == dtype], flag, one)


@torch.no_grad()
def largest(own: Sequence[Tensor], shared: Sequence[Tensor], members: int) -> tuple[Tensor, Tensor]:
    """((M,) the largest absolute value of each member's rows of own tensors (M, ...), () that of shared ones); NaN where there
    is one.

    No branch in Python and no waiting for the device: it can be captured in a CUDA graph.
    """
    rows = _norms([row for tensor in own if tensor.numel() for row in tensor.unbind()])
    wholes = _norms([tensor for tensor in shared if tensor.numel()])
    device = next((tensor.device for tensor in (*own, *shared)), None)
    mine = rows.reshape(-1, members).amax(0) if len(rows) else torch.zeros(members, device=device)
    return mine, wholes.amax() if len(wholes) else torch.zeros((), device=device)


def _norms(tensors: list[Tensor]) -> Tensor:
    """(T,) the largest absolute value of each tensor, NaN where it holds one: all tensors in a few kernels."""
    return torch.stack(torch._foreach_norm(tensors, math.inf)) if tensors else torch.zeros(0)


def member_maxima(described: Sequence[Tensor]) -> Tensor:
    """(T, M) the largest number of every member in each description (M, B, ...), NaN where there is one; no waiting."""
    given = [tensor for tensor in described if tensor.is_floating_point() and tensor.numel()]
    return torch.stack([tensor.amax(tuple(range(1, tensor.ndim))) for tensor in given]) if given else torch.zeros(0, 0)


def diverged_members(maxima: Tensor) -> list[int]:
    """Indices of members whose maxima, (T, M), hold NaN or +∞; −∞ is the log of a probability 0.

    Waits for the device: one copy to the host, where they are compared.
    """
    found = zip(*maxima.tolist(), strict=True)
    return [member for member, values in enumerate(found) if not all(value < math.inf for value in values)]
