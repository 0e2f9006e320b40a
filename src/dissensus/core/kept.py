"""What is computed from weights alone, kept while the weights stay the same: casts, kernels with batch norm folded into them.

Mixed precision casts a weight at every use, and a folded batch norm reads and writes all kernels at every batch. Autocast has a
cache of casts, but not for graphs: it keeps only leaves that need gradients, which rows of a stack are not, and frees its
copies at the end of the context, when graphs still read them.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LEAST = 2**14  # numbers in a tensor below which a cast costs next to nothing
Found = TypeVar("Found")


class Kept:
    """Tensors computed from some weights, by what was computed from which part of them.

    Args:
        weights: tensors that stay where they are in memory while this object is in use.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights: dict[int, list[Tensor]] = {}  # by the address of their memory
        for tensor in weights:
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference() and tensor.numel():
                self._weights.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._found: dict[tuple[Any, ...], tuple[Any, list[tuple[Tensor, int]]]] = {}
        self._versions: dict[int, int] = {}  # of the weights in use, by address

    @property
    def casts(self) -> bool:
        """Whether there are casts among what is kept."""
        return any(what[0] == "cast" for what, *_ in self._found)

    def find(self, what: Hashable, tensors: Sequence[Tensor | None], make: Callable[[], Found]) -> Found:
        """make(), or what it gave before; only if all of these tensors are weights, or parts of them."""
        places = [None if tensor is None else _place(tensor) for tensor in tensors]
        addresses = [place[0] for place in places if place is not None]
        if not all(address in self._weights for address in addresses):
            return make()
        known, parts = self._found.get(key := (what, *places), (None, []))
        if known is not None and all(each._version == before for each, before in parts):
            return known  # type: ignore[no-any-return]
        if known is not None:  # changed since
            return make()
        with nullcontext() if _thread.beside is None else torch.cuda.stream(_thread.beside):
            made = make()
            self._found[key] = made, [(each, each._version) for each in pytree.tree_leaves(made)]
            self._versions |= {address: self._version(address) for address in addresses}
        for tensor in () if _thread.reader is None else pytree.tree_leaves(made):
            tensor.record_stream(_thread.reader)
        return made

    def fresh(self) -> bool:
        """Whether neither the weights nor what was computed from them has been written to since."""
        intact = all(each._version == before for _, parts in self._found.values() for each, before in parts)
        return intact and all(self._version(address) == before for address, before in self._versions.items())

    def _version(self, address: int) -> int:
        return sum(tensor._version for tensor in self._weights[address])


class _Thread(threading.local):
    kept: Kept | None = None
    beside: torch.cuda.Stream | None = None  # where things are computed while a graph is captured
    reader: torch.cuda.Stream | None = None  # that of the graph's replays


_thread = _Thread()


@contextmanager
def keeping(kept: Kept, *, casts: bool, beside: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Inside, `derived` and casts of large weights keep what they find.

    Args:
        casts: whether casts are looked at, which costs time at every operation.
        beside: for the capture of a CUDA graph, a stream that is not captured: there things are computed at once. Wait for it
            before the first replay, on the stream that is current now.
    """
    before = _thread.kept, _thread.beside, _thread.reader
    _thread.kept, _thread.beside, _thread.reader = kept, beside, beside and torch.cuda.current_stream()
    try:
        with _Casts(kept) if casts else nullcontext():
            yield
    finally:
        _thread.kept, _thread.beside, _thread.reader = before


def derived(what: Hashable, tensors: Sequence[Tensor | None], make: Callable[[], Found]) -> Found:
    """make(), or inside `keeping` what it gave before for the same weights; `what` names all that it depends on besides."""
    return make() if _thread.kept is None else _thread.kept.find(what, tensors, make)


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers casts of weights; what is cast, and to what, is autocast's choice, and so are the bits."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `Watch`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._to_copy.default:
            return func(*args, **kwargs)
        source, dtype = args[0], kwargs.get("dtype")
        others = {name: each for name, each in kwargs.items() if each not in (None, False, dtype, source.device)}
        if others or type(source) not in (Tensor, nn.Parameter) or source.numel() < LEAST:
            return func(*args, **kwargs)
        return self.kept.find(("cast", dtype), args[:1], lambda: func(*args, **kwargs))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
