"""Weights and inputs cast once for many uses in mixed precision.

Without its cache autocast casts a weight at every use, and inputs once per member: for ten ResNet-18 more than two hundred
small kernels a batch. The cache cannot serve a CUDA graph: it keeps only leaves that need gradients, which rows of a stack
are not, and frees them at the end of the context, when graphs still read them.
"""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Cast = tuple[int, torch.dtype]  # number of a tensor, and what it is cast to


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which of these tensors are cast, as wholes or in rows, and answers the casts in `wanted` from copies.

    Autocast decides what is cast, and to what. The copies are made on entry, of whole tensors: a stack of members' weights is
    one kernel. They have the bits and strides of what autocast would make. Tensors changed since then are cast as usual.

    Attribute: `seen`, the casts so far, in order.
    """

    def __init__(self, tensors: Sequence[Tensor], wanted: Collection[Cast] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = tensors
        self.seen: dict[Cast, None] = {}
        self._at: dict[int, list[int]] = {}  # address of memory -> numbers of the tensors in it
        for number, tensor in enumerate(tensors):
            plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference()
            if plain and tensor.is_floating_point() and _dense(tensor.shape, tensor.stride()):
                self._at.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
        self._copies = {each: torch.empty_like(tensors[each[0]], dtype=each[1]) for each in wanted}
        with torch.no_grad():
            if self._copies:
                torch._foreach_copy_([*self._copies.values()], [tensors[number] for number, _ in self._copies])
        self._versions = {number: tensors[number]._version for number, _ in self._copies}
        self._answers: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.keys() == {"dtype"}:
            source, dtype = args[0], kwargs["dtype"]
            number, offset = self._place(source)
            if number is not None:
                self.seen[number, dtype] = None
                copy = self._copies.get((number, dtype))
                if copy is not None and source._version == self._versions[number]:
                    answer = copy.as_strided(source.shape, source.stride(), offset)
                    self._answers.append((answer, answer._version))
                    return answer
        return func(*args, **kwargs)

    def _place(self, source: Tensor) -> tuple[int | None, int]:
        """(number of the tensor that this one is a part of, first entry in it); (None, 0) for any other."""
        for number in self._at.get(source.untyped_storage().data_ptr(), ()):
            whole = self.tensors[number]
            first = source.storage_offset() - whole.storage_offset()
            if (
                source.dtype == whole.dtype
                and 0 <= first <= whole.numel() - source.numel()
                and _dense(source.shape, source.stride())
            ):
                return number, first
        return None, 0

    def check(self) -> None:
        """Raises if the network has changed an answer in place, since others would see that."""
        if any(answer._version != version for answer, version in self._answers):
            raise RuntimeError("the network changes a cast weight in place")


@cache
def _dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a copy has the same strides: entries fill their memory without holes."""
    return torch.empty_strided(shape, stride, device="meta").clone().stride() == stride
