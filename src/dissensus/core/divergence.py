"""Values that are not finite: the error for them, and the members they belong to, in training and in prediction."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dissensus.utils.torch_private import tensor_norms

PLURALS = {"loss": "losses"}


class Diverged(ValueError):
    """Raised by `fit` and `predict` when a member has values that are not finite; a ValueError.

    Attributes: `.members`, the indices of these members; `.step`, the optimiser step at which it was noticed; `.what`, the
    kind of value: "loss", "gradient", "weight", "buffer", "moment" (of the optimiser) or "prediction".
    """

    def __init__(self, members: list[int], step: int, what: str = "loss") -> None:
        self.members, self.step, self.what = members, step, what
        who = ", ".join(str(i) for i in members)
        super().__init__(
            f"expected finite {PLURALS.get(what, f'{what}s')}, got a {what} that is not finite in member {who} at step {step}; "
            "lower the learning rate, clip gradients (clip=1.0) or look for extreme inputs"
        )

    def __reduce__(self) -> tuple[type["Diverged"], tuple[list[int], int, str]]:
        return type(self), (self.members, self.step, self.what)  # how it is pickled for another process


def may_be_nonfinite(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors may hold a value that is not finite; synchronises with the device."""
    # One pass without a temporary: a sum or norm is not finite if an entry is not, but also if it overflows. On a CPU no
    # norms: squares of small numbers, as of Adam's second moments, are too small for its fast arithmetic.
    given = [tensor.detach() for tensor in tensors if tensor.numel()]
    if all(tensor.is_cpu for tensor in given):
        return not math.isfinite(sum(tensor.sum().item() for tensor in given))
    return not math.isfinite(torch.stack(tensor_norms(given)).sum().item())


@torch.no_grad()
def largest_magnitudes(
    own: Sequence[Tensor], shared: Sequence[Tensor], members: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """((M,) largest absolute value in each member's own tensors (M, ...), () that of shared tensors); NaN if there is one."""
    # No branch in Python and no synchronisation, so it can be captured in a CUDA graph.
    rows = _maxima([row for tensor in own if tensor.numel() for row in tensor.unbind()])
    mine = rows.reshape(-1, members).amax(0) if len(rows) else torch.zeros(members, device=device)
    return mine, amax(shared, device)


@torch.no_grad()
def amax(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """() the largest absolute value in tensors on this device, NaN if they hold one, 0 if they are empty."""
    found = _maxima([tensor for tensor in tensors if tensor.numel()])
    return found.amax() if len(found) else torch.zeros((), device=device)


def _maxima(tensors: list[Tensor]) -> Tensor:
    """(T,) that of each tensor, in a few kernels for all tensors."""
    return torch.stack(tensor_norms(tensors, math.inf)) if tensors else torch.zeros(0)


def has_diverged(described: Sequence[Tensor]) -> bool:
    """Whether a description holds NaN or +∞; synchronises with the device. Quicker than to ask which member's."""
    return any(t.is_floating_point() and t.numel() and not t.max().item() < math.inf for t in described)


def member_maxima(described: Sequence[Tensor]) -> Tensor:
    """(T, M) each member's largest value in each description (M, B, ...), NaN if there is one; does not synchronise."""
    given = [tensor for tensor in described if tensor.is_floating_point() and tensor.numel()]
    return torch.stack([tensor.amax(tuple(range(1, tensor.ndim))) for tensor in given]) if given else torch.zeros(0, 0)


def diverged_members(maxima: Tensor) -> list[int]:
    """Indices of members whose maxima, (T, M), hold NaN or +∞; −∞ is the log of a probability 0."""
    # Synchronises with the device: the maxima are copied to the host once and compared there.
    found = zip(*maxima.tolist(), strict=True)
    return [member for member, values in enumerate(found) if not all(value < math.inf for value in values)]
