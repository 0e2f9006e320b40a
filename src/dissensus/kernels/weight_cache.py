"""What is computed from weights alone, kept while the weights stay the same: casts, kernels with batch norm folded into them.

Mixed precision casts a weight at every use, and a folded batch norm reads and writes all kernels at every batch. Autocast has a
cache of casts, but only of leaves that need gradients, which rows of a stack are not, and frees it while graphs still read it.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dissensus.utils.torch_modes import set_attributes
from dissensus.utils.torch_private import CAST, DispatchMode, pytree, version_of

LEAST = 2**14  # numbers in a tensor below which a cast costs next to nothing
Found = TypeVar("Found")
Parts = Sequence[Tensor | None]  # tensors, some of which may be left out


class WeightCache:
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
        self._made: list[tuple[Tensor, int]] = []  # all that was computed, with its version
        self._versions: dict[int, int] = {}  # of the weights in use, by address

    @property
    def has_casts(self) -> bool:
        """Whether there are casts among what is kept."""
        return any(what[0] == "cast" for what, *_ in self._found)

    def find(self, what: Hashable, tensors: Parts, make: Callable[..., Found], *, by_rows: bool = False) -> Found:
        """make(*tensors), or what it gave before; only if all of these tensors are weights, or parts of them.

        `by_rows`: that make gives a tuple of tensors, and each row of them follows from the same row of the tensors. If these
        are one member's rows of stacks (M, N, ...), all members' are computed at once, from (M · N, ...): in one launch, not M.
        """
        places = [None if tensor is None else _memory_key(tensor) for tensor in tensors]
        addresses = [place[0] for place in places if place is not None]
        if not all(address in self._weights for address in addresses):
            return make(*tensors)
        known, parts = self._found.get(key := (what, *places), (None, []))
        if known is not None and all(version_of(each) == before for each, before in parts):
            return known
        if known is not None:  # changed since
            return make(*tensors)
        with nullcontext() if _thread.side_stream is None else torch.cuda.stream(_thread.side_stream):
            stacks = self._stacks(tensors) if by_rows else []
            made: Any = make(*(stack and stack.flat() for stack in stacks) if stacks else tensors)
            rows = _results_by_row(what, stacks, made) if stacks else {key: made}
            self._found |= {each: (row, _with_versions(row)) for each, row in rows.items()}
            self._made += _with_versions(made)
            self._versions |= {address: self._total_version(address) for address in addresses}
        for tensor in () if _thread.replay_stream is None else pytree.tree_leaves(made):
            tensor.record_stream(_thread.replay_stream)
        return rows[key]

    def is_fresh(self) -> bool:
        """Whether neither the weights nor what was computed from them has been written to since."""
        intact = all(version_of(each) == before for each, before in self._made)
        return intact and all(self._total_version(address) == before for address, before in self._versions.items())

    def _total_version(self, address: int) -> int:
        return sum(version_of(tensor) for tensor in self._weights[address])

    def _stacks(self, tensors: Sequence[Tensor | None]) -> "list[_Stack | None]":
        """For each tensor the weight whose row it is, if all of them are the same row; else nothing."""
        found = [None if tensor is None else self._stack(tensor) for tensor in tensors]
        rows = {(stack.row, len(stack.stacked_weight)) for stack in found if stack is not None}
        complete = all(stack is not None or tensor is None for stack, tensor in zip(found, tensors, strict=True))
        return found if complete and len(rows) == 1 else []

    def _stack(self, tensor: Tensor) -> "_Stack | None":
        """The weight (M, ...) whose row the tensor is."""
        for whole in self._weights[tensor.untyped_storage().data_ptr()]:
            alike = (whole.shape[1:], whole.stride()[1:], whole.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
            if whole.ndim == tensor.ndim + 1 and alike and whole.stride(0) > 0:
                row, between = divmod(int(tensor.storage_offset() - whole.storage_offset()), whole.stride(0))
                if between == 0 and 0 <= row < len(whole):
                    return _Stack(whole, row)
        return None


class _Stack(NamedTuple):
    stacked_weight: Tensor  # (M, ...)
    row: int

    def flat(self) -> Tensor:
        """(M · N, ...), packed as its rows are."""
        found = self.stacked_weight.flatten(0, 1)
        return found.contiguous() if found.ndim == 1 else found


def _results_by_row(what: Hashable, stacks: "list[_Stack | None]", made: tuple[Tensor, ...]) -> dict[Any, Any]:
    """What was computed from these stacks, (M · N, ...), as `find` will be asked for it: row by row."""
    wholes = [stack and stack.stacked_weight for stack in stacks]
    count = next(len(whole) for whole in wholes if whole is not None)
    keys = ([None] * count if whole is None else map(_memory_key, whole.unbind()) for whole in wholes)
    places = zip(*keys, strict=True)
    rows = zip(*(each.view(count, -1, *each.shape[1:]).unbind() for each in made), strict=True)
    return {(what, *place): row for place, row in zip(places, rows, strict=True)}


def _with_versions(tree: Any) -> list[tuple[Tensor, int]]:
    return [(each, version_of(each)) for each in pytree.tree_leaves(tree)]


class _Thread(threading.local):
    weight_cache: WeightCache | None = None
    side_stream: torch.cuda.Stream | None = None  # where things are computed while a graph is captured
    replay_stream: torch.cuda.Stream | None = None  # that of the graph's replays


_thread = _Thread()


@contextmanager
def use_weight_cache(kept: WeightCache, *, casts: bool, beside: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Inside, `compute_cached` and casts of large weights keep what they find.

    Args:
        casts: whether casts are looked at, which costs time at every operation.
        beside: for the capture of a CUDA graph, a stream that is not captured: there things are computed at once. Wait for it
            before the first replay, on the stream that is current now.
    """
    now: dict[str, Any] = {
        "weight_cache": kept,
        "side_stream": beside,
        "replay_stream": beside and torch.cuda.current_stream(),
    }
    with set_attributes(_thread, **now), _CastCacheMode(kept) if casts else nullcontext():
        yield


def compute_cached(what: Hashable, tensors: Parts, make: Callable[..., Found], *, by_rows: bool = False) -> Found:
    """make(*tensors), or inside `use_weight_cache` what it gave before for the same weights: see `WeightCache.find`.

    `what` names all that it depends on besides.
    """
    kept = _thread.weight_cache
    return make(*tensors) if kept is None else kept.find(what, tensors, make, by_rows=by_rows)


class _CastCacheMode(DispatchMode):
    """Answers casts of weights; what is cast, and to what, is autocast's choice, and so are the bits."""

    def __init__(self, kept: WeightCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not CAST:
            return func(*args, **kwargs)
        source, dtype = args[0], kwargs.get("dtype")
        others = {name: each for name, each in kwargs.items() if each not in (None, False, dtype, source.device)}
        if others or type(source) not in (Tensor, nn.Parameter) or source.numel() < LEAST:
            return func(*args, **kwargs)
        return self.kept.find(("cast", dtype), args[:1], lambda source: func(source, **kwargs))


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
