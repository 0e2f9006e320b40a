"""Context managers that change training modes and torch switches and restore them, and how much freed memory is kept."""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from dissensus.utils.tensor_tree import TensorTree, all_submodules

_switching, _outside = threading.Lock(), list[bool]()  # how cuDNN was set outside of every `convolution_timing`


class _Switches(threading.local):
    """What is on in this thread; `set_attributes` changes it for a while."""

    for_graph = False  # this call is one that a CUDA graph will hold, or prepares it
    by_count = False  # the number of calls decides when to prepare a faster way, and no time
    fusing = False  # layers are fused with those after them
    norms = True  # batch norm may take other forms: not if its statistics span several processes
    looks_ahead = False  # seeds that are drawn do not advance torch's generator


thread = _Switches()
_mode = attrgetter("training")


@functools.cache
def keep_freed_memory() -> None:
    """Lets glibc keep what a batch frees, up to 32 MiB, as it does once it has freed 16: else the next gets its pages anew."""
    torch.empty(2**24 - 2**16, dtype=torch.uint8, device="cpu")


class eval_mode:  # not a generator, which takes three times as long
    """Eval mode inside; afterwards every submodule's own mode is restored.

    `parts`: the result of `all_submodules`, for frequent callers: finding them takes as long as running a layer.
    """

    def __init__(self, *modules: nn.Module, parts: Sequence[nn.Module] | None = None) -> None:
        self.modules, self.parts = modules, parts

    def __enter__(self) -> None:
        self.parts = all_submodules(*self.modules, trees=False) if self.parts is None else self.parts
        self.modes = [*map(_mode, self.parts)]
        if not any(self.modes):
            return
        try:
            if all(map(_has_plain_mode, self.parts)):
                for part in self.parts:
                    vars(part)["training"] = False  # `eval()` takes as long as a small network
            else:
                for module in self.modules:
                    module.eval()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.modes != [*map(_mode, self.parts or ())]:
            for part, mode in zip(self.parts or (), self.modes, strict=True):
                if "training" in vars(part):
                    vars(part)["training"] = mode
                else:
                    part.training = mode


def set_mode(module: nn.Module, mode: bool) -> None:
    """`module.train(mode)`, which takes as long as a small network even where it only sets an attribute of each submodule."""
    parts, plain = all_submodules(module, trees=False), (nn.Module.train, TensorTree.train)
    if all(type(part).train in plain and "training" in vars(part) and "train" not in vars(part) for part in parts):
        for part in parts:
            vars(part)["training"] = mode
    else:
        module.train(mode)


def _has_plain_mode(part: nn.Module) -> bool:
    """Whether eval mode is nothing but an attribute of the module: nobody but this library has overridden how it is set."""
    kind, own = type(part), vars(part)
    plain = kind.train is nn.Module.train or kind.train.__module__.startswith("dissensus.")
    return plain and kind.eval is nn.Module.eval and "training" in own and "train" not in own and "eval" not in own


@contextmanager
def set_attributes(*places: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of each of these objects have these values; afterwards those from before."""
    before = [(place, name, getattr(place, name)) for place in places for name in values]
    try:
        for place, name, _ in before:
            setattr(place, name, values[name])
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


@contextmanager
def convolution_timing(on: bool) -> Iterator[None]:
    """Inside, cuDNN times its algorithms for every convolution of a shape that it meets for the first time, or never does."""
    with _switching:
        _outside.append(outside := torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        with _switching:  # the last thread that leaves restores what the first one found
            torch.backends.cudnn.benchmark = outside if len(_outside) > 1 else _outside[0]
            _outside.pop()


def untimed_convolutions(device: torch.device) -> AbstractContextManager[object]:
    """Inside, cuDNN times nothing: what runs once, in a precision or shape of its own, would be timed for nothing."""
    return convolution_timing(False) if device.type == "cuda" else nullcontext()


@contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, attention runs without torch's inference fast path, which supports neither vmap nor hooks."""
    # The switch acts on the whole process, so networks with attention run under the process lock (`core/member_runner.py`).
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
