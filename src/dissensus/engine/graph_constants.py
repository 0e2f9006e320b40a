"""Constants that a forward makes on the host, such as `x.new_tensor([0.1, 0.2])` or `table.to(x.device)`.

A CUDA graph cannot hold the copy of such a tensor to the device. It is therefore made in the calls before a capture, and the
graph copies it from there. Only what had the same value in all these calls, and has it at the capture, is a constant. Graphs of
training steps compare again at the beginning of every epoch.
"""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dissensus.core.member_runner import first_line
from dissensus.utils.torch_private import is_transformed, outside_transforms

FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as)
TORCH, LIBRARY = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


class NotConstant(RuntimeError):
    """What a forward sends to the device changes from call to call."""

    def __init__(self, where: str | None) -> None:
        super().__init__(f"tensors made on the host change from call to call ({where})")


class HostConstant(NamedTuple):
    """One call that made a tensor from the host's data: the data, and the tensor if it is on the device."""

    function: Any
    data: Tensor
    made: Tensor | None
    needs_grad: bool


class Constants(TorchFunctionMode):
    """Inside `watching`, tensors that are made from the host's data are kept; inside `given`, they are handed out again.

    Each caller gets a copy, which it may change. `on`: the kind of device.
    """

    def __init__(self, on: str = "cuda") -> None:
        super().__init__()
        self.device_type = on
        self.entries: list[HostConstant] = []
        self.varying: str | None = None  # the first line of code whose tensor differed between calls
        self._position = 0
        self._reuses = False

    @contextlib.contextmanager
    def record_constants(self) -> Iterator[None]:
        """A call before the capture, or one that looks whether constants are still the same (`varying`)."""
        first = not self.entries
        self._position, self._reuses = 0, False
        with self:
            yield
        if not first and self._position != len(self.entries):
            self.varying = self.varying or "a number of them that varies"

    @contextlib.contextmanager
    def reuse_constants(self) -> Iterator[None]:
        """The call that is captured."""
        self._position, self._reuses = 0, True
        if self.varying is not None:
            raise NotConstant(self.varying)
        with self:
            yield
        if self._position != len(self.entries):
            raise NotConstant("a number of them that varies")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if function is Tensor.__getitem__ and args[0].device.type == self.device_type:
            several = isinstance(args[1], tuple)
            index = [self._device_index(each, args[0].device) for each in (args[1] if several else (args[1],))]
            return function(args[0], tuple(index) if several else index[0])
        data = _host_data(function, args, kwargs)
        if data is None:
            return function(*args, **kwargs)
        return self._reuse_or_make(function, data, lambda: function(*args, **kwargs))

    def _device_index(self, index: Any, device: torch.device) -> Any:
        """An index on the device, if it is a list or an array of integers."""
        data = _as_tensor(index) if isinstance(index, list | np.ndarray | Tensor) else None
        if data is None or data.dtype == torch.bool or data.ndim == 0 or data.is_floating_point():
            return index
        return self._reuse_or_make(Tensor.__getitem__, data, lambda: data.to(device))

    def _reuse_or_make(self, function: Any, data: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """make(), or a copy of what it made before."""
        number, self._position = self._position, self._position + 1
        if number < len(self.entries):
            before = self.entries[number]
            if before.function is not function or (before.made is not None and not _has_same_bits(before.data, data)):
                self.varying = self.varying or user_line()
                if self._reuses:
                    raise NotConstant(self.varying)
            if not self._reuses or before.made is None:
                return make()
            copy = before.made.clone()
            return copy.requires_grad_() if before.needs_grad else copy
        if self._reuses:
            raise NotConstant(user_line())
        made = make()
        with outside_transforms():  # what is kept outlives the function transforms that the call is in
            plain = data.clone()
            there = plain.to(made.device, made.dtype, copy=True) if made.device.type == self.device_type else None
        self.entries.append(HostConstant(function, plain, there, made.requires_grad))
        return made


def failure_reason(error: Exception) -> str:
    """Why a call could not be captured, with the line of the user's code."""
    line = None if isinstance(error, NotConstant) else user_line(error)
    return first_line(error) + (f" ({line})" if line else "")


def user_line(error: BaseException | None = None) -> str | None:
    """ "file.py:12: code" of the innermost line outside of torch and this library: of an error, or of this call."""
    if error is None:
        return _innermost_line(traceback.extract_stack())
    found = None
    while error is not None:  # leaving a failed capture raises another error: the line of the first one counts
        found = _innermost_line(traceback.extract_tb(error.__traceback__)) or found
        error = error.__context__
    return found


def _innermost_line(outer_first: traceback.StackSummary) -> str | None:
    for each in reversed(outer_first):
        if not each.filename.startswith((TORCH, LIBRARY, contextlib.__file__)):
            return f"{Path(each.filename).name}:{each.lineno}: {each.line}"
    return None


def _host_data(function: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The host's data that a call would send to a device, as a tensor; None for all other calls."""
    if function in MOVES:
        return _as_tensor(args[0])
    if function in FROM_DATA:
        return _as_tensor(args[0] if args else kwargs.get("data", kwargs.get("obj")))
    if function is Tensor.new_tensor:
        return _as_tensor(args[1] if len(args) > 1 else kwargs.get("data"))
    return None


def _as_tensor(data: Any) -> Tensor | None:
    """The host's data as a tensor without a gradient; None for a tensor on another device, or one that is trained."""
    if isinstance(data, Tensor):
        wrapped = is_transformed(data)
        return None if data.device.type != "cpu" or data.requires_grad or wrapped else data
    try:
        with outside_transforms():
            return torch.from_numpy(np.array(data))
    except (TypeError, ValueError, RuntimeError):  # no numbers, or tensors of a device among them
        return None


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same bits."""
    with outside_transforms():
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))
