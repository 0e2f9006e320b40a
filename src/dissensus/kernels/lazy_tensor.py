"""Tensors that wait: the result of a layer, computed at its first use, so that layers can run as one kernel.

`fused()` in `kernels/fused_norm.py` makes them. torch's Python functions see an ordinary tensor.
"""

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.utils.torch_private import pytree, tensor_without_memory, version_of

RELUS: dict[Any, bool] = dict.fromkeys((F.relu, torch.relu, Tensor.relu), False)  # function -> whether in place
RELUS |= dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), True)
SUMS: dict[Any, bool] = dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), False)
SUMS |= dict.fromkeys((Tensor.add_, Tensor.__iadd__), True)
_READ: Any = Tensor  # its properties are read with __get__
FACTS: dict[Any, Callable[["PendingTensor"], Any]] = {
    **dict.fromkeys((_READ.shape.__get__, Tensor.size), lambda mine: mine.facts[0]),
    _READ.dtype.__get__: lambda mine: mine.facts[1],
    _READ.device.__get__: lambda mine: mine.facts[2],
    **dict.fromkeys((_READ.ndim.__get__, Tensor.dim), lambda mine: len(mine.facts[0])),
}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.pending_tensors: weakref.WeakSet[PendingTensor] = weakref.WeakSet()


_thread = _Thread()


def compute_pending() -> None:
    """Computes every tensor that waits, before something that it is computed from is changed unseen."""
    for each in [each for each in _thread.pending_tensors if each.result is None]:
        each.value()


class FusionError(RuntimeError):
    """A network reads a waiting tensor in a way that would lose gradients; it must run without `fused`."""


class PendingTensor(Tensor):
    """The result of a layer that is not yet computed. The first use decides what is computed.

    A use past torch's Python functions (a scripted module, an own `autograd.Function`) would lose gradients: `FusionError`.
    """

    facts: tuple[torch.Size, torch.dtype, torch.device]
    source_versions: list[tuple[Tensor, int]]  # tensors that it is computed from, with their versions
    graph: bool
    result: Tensor | None

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, read: Iterable[Tensor | None]
    ) -> "PendingTensor":
        self: PendingTensor = tensor_without_memory(cls, shape, dtype=dtype, device=device)
        self.facts, self.graph, self.result = (shape, dtype, device), torch.is_grad_enabled(), None
        known = [each for each in read if each is not None and not isinstance(each, PendingTensor)]
        self.source_versions = [(each, version_of(each)) for each in known]
        _thread.pending_tensors.add(self)
        return self

    @abstractmethod
    def compute_result(self, *, relu: bool) -> Tensor:
        """The tensor, or ReLU of it."""

    def fuse_addition(self, other: Any) -> "PendingTensor | None":
        """This one with something added; None if that cannot be part of the kernel."""
        return None

    def value(self) -> Tensor:
        """The tensor, computed at the first use."""
        if self.result is None:
            self.result = self.compute_now(relu=False)
        return self.result

    def compute_now(self, *, relu: bool) -> Tensor:
        if self.graph and not torch.is_grad_enabled():
            raise FusionError("a layer's result is read without gradients, as custom functions do")
        self.check_unchanged()
        return self.compute_result(relu=relu)

    def check_unchanged(self) -> None:
        """Raises if a tensor that this one is computed from was written to meanwhile: the layer would have run before."""
        if any(version_of(each) != before for each, before in self.source_versions):
            raise FusionError("a layer's result is read after its input has been changed in place")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in FACTS and len(args) == 1 and isinstance(first, PendingTensor):
            return FACTS[func](first)
        if func in RELUS and isinstance(first, PendingTensor) and first.result is None:
            made = first.compute_now(relu=True)
            if RELUS[func] or kwargs.get("inplace") or True in args[1:2]:
                first.result = made  # other references to this tensor see the change
            return made
        if func in SUMS and len(args) == 2 and not kwargs:
            mine, other = args if isinstance(first, PendingTensor) else reversed(args)
            in_place = SUMS[func]
            waits = mine.result is None and (not in_place or mine is first)
            if waits and (total := mine.fuse_addition(other)) is not None:
                if not in_place:
                    return total
                vars(mine).update(vars(total))
                return mine
        args, kwargs = materialise((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise FusionError(f"{func} reads a layer's result past torch's Python functions")


def materialise(tree: Any) -> Any:
    """The tree with waiting tensors computed."""
    if isinstance(tree, Tensor):
        return tree.value() if isinstance(tree, PendingTensor) else tree
    return pytree.tree_map_only(PendingTensor, PendingTensor.value, tree)
