"""Weights and inputs cast once for many uses in mixed precision.

Without its cache autocast casts a weight at every use, and inputs once per member: for ten ResNet-18 more than two hundred
small kernels a batch. The cache cannot serve a CUDA graph: it keeps only leaves that need gradients, which rows of a stack
are not, and frees them at the end of the context, when graphs still read them.
"""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 256  # bytes; libraries choose algorithms by the alignment of what they are given


class Cast(NamedTuple):
    """A cast of one of several tensors."""

    number: int  # of the tensor
    dtype: torch.dtype  # that it is cast to
    rows: bool  # whether rows of it are cast, or parts of rows; otherwise the whole


class Casts(TorchDispatchMode):
    """Sees which of these tensors are cast, whole or in rows, and answers the casts in `wanted` from copies.

    Autocast decides what is cast, and to what. The copies are made on entry, of whole tensors: a stack of members' weights is
    one kernel. Answers have the bits, strides and alignment of what autocast would make. Tensors changed since then are cast
    as usual.

    Attribute: `seen`, the casts so far, in order.
    """

    def __init__(self, tensors: Sequence[Tensor], wanted: Collection[Cast] = ()) -> None:
        super().__init__()
        self.tensors = tensors
        self.seen: dict[Cast, None] = {}
        self._at: dict[int, list[int]] = {}  # address of memory -> numbers of the tensors in it
        for number, tensor in enumerate(tensors):
            plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference() and tensor.numel() > 0
            if plain and tensor.is_floating_point() and _dense(tensor.shape, tensor.stride()):
                self._at.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
        self._copies = {each: _room(tensors[each.number], each) for each in wanted}
        self._versions = {each.number: tensors[each.number]._version for each in wanted}
        self._answers: list[tuple[Tensor, int]] = []
        with torch.no_grad():
            pairs = [(copy, tensors[each.number]) for each, copy in self._copies.items()]
            if alike := [pair for pair in pairs if pair[0].stride() == pair[1].stride()]:
                torch._foreach_copy_([copy for copy, _ in alike], [tensor for _, tensor in alike])
            for copy, tensor in pairs:
                if copy.stride() != tensor.stride():
                    copy.copy_(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.keys() == {"dtype"}:
            answer = self._answer(args[0], kwargs["dtype"])
            if answer is not None:
                return answer
        return func(*args, **kwargs)

    def _answer(self, source: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The source in this dtype, from a copy; None if there is no such copy."""
        for number in self._at.get(source.untyped_storage().data_ptr(), ()):
            whole = self.tensors[number]
            cast = Cast(number, dtype, source.numel() < whole.numel())
            size = whole.numel() // len(whole) if cast.rows else whole.numel()
            row, rest = divmod(int(source.storage_offset() - whole.storage_offset()), size)
            inside = row >= 0 and row * size < whole.numel() and rest + source.numel() <= size
            inside &= not cast.rows or whole.stride(0) == size  # rows lie one after the other
            aligned = rest * dtype.itemsize % ALIGNMENT == 0
            if inside and aligned and source.dtype == whole.dtype and _dense(source.shape, source.stride()):
                self.seen[cast] = None
                copy = self._copies.get(cast)
                if copy is None or source._version != self._versions[number]:
                    return None
                offset = row * copy.stride(0) + rest if cast.rows else 0
                answer = copy.as_strided(source.shape, source.stride(), offset)
                self._answers.append((answer, answer._version))
                return answer
        return None

    def check(self) -> None:
        """Raises if the network has changed an answer in place, since others would see that."""
        if any(answer._version != version for answer, version in self._answers):
            raise RuntimeError("the network changes a cast weight in place")


def _room(tensor: Tensor, cast: Cast) -> Tensor:
    """Memory for a copy of the tensor; if rows of it are needed, each is aligned."""
    if not cast.rows:
        return torch.empty_like(tensor, dtype=cast.dtype)
    entries = ALIGNMENT // cast.dtype.itemsize
    stride = -(-(tensor.numel() // len(tensor)) // entries) * entries
    memory = torch.empty(len(tensor) * stride, dtype=cast.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:]))


@cache
def _dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a copy has the same strides: entries fill their memory without holes."""
    return torch.empty_strided(shape, stride, device="meta").clone().stride() == stride
