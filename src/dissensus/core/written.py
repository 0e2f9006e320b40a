"""What a forward writes into plain attributes (features that it keeps, counters, caches) is not configuration.

Attributes are restored after every call. A training call may change some that it has read, such as a counter: they are the
member's state. Each member then runs in its own template, and its state is stored as batch statistics are, once per step.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from dissensus.core.attributes import OWN
from dissensus.numerics.tree import KnownParts, parts

HOLDERS = (list, dict, set, deque, Tensor)
# Larger ones are not looked at: entries of a list or dict, numbers in a tensor
MOST_ENTRIES, MOST_NUMBERS = 10_000, 2**22
MISSING = object()
Attribute = tuple[dict[str, Any], str, Any]  # a module's attributes, the name of one, and its value


class OneAtATime(RuntimeError):
    """A forward or a hook may keep tensors of vmap, which mean nothing after it."""


class Written:
    """Runs a template, restores its attributes, and finds out which of them are state."""

    def __init__(self, unread: set[str] | None = None, state: Iterable[str] = ()) -> None:
        self.known, self.found = KnownParts(), [nn.Module()]
        self.unread = unread  # what training sets before it reads it; None before the first such call
        self.state = {*state}  # names of the attributes that are state
        self.waiting: list[Attribute] = []  # the state that the last training call has left

    def __reduce__(self) -> tuple[type["Written"], tuple[Any, ...]]:
        return Written, (self.unread, self.state)

    def run(self, template: Any, alone: bool, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """function(*args, **keywords), which runs the template; `alone`: whether no other member runs in it."""
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **keywords)
        if (found := self.known(template)) is not self.found:
            self.found, self.all = found, parts(template)
            self.foreign = [(path, part) for path, part in self.all if _foreign(type(part)) or "forward" in vars(part)]
            self.hooks = [*chain.from_iterable((part._forward_hooks, part._forward_pre_hooks) for part in found)]
        watched = self.all if any(self.hooks) else self.foreign
        if not watched:
            return function(*args, **keywords)
        stack = _functorch.get_interpreter_stack() or ()
        at_once = any(each.key() == _functorch.TransformType.Vmap for each in stack)
        outside = [(each, each.copy()) for each in _reached(watched)] if at_once else []
        trains, lent = template.network.training, _Lent(self.found)
        first = trains and self.unread is None
        kinds = [(path, part, type(part)) for path, part in watched if first and _foreign(type(part))]
        read: set[str] = set()
        self.waiting = [] if trains else self.waiting
        given = [(path, now := vars(part), now.copy()) for path, part in watched]
        for path, now, before in given:
            for key, each in before.items():
                if key not in OWN and isinstance(each, HOLDERS):
                    now[key] = lent(path + key, each)
        try:
            for path, part, kind in kinds:
                object.__setattr__(part, "__class__", _traced(kind, path, read, set()))
            result = function(*args, **keywords)
        finally:
            for _, part, kind in kinds:
                object.__setattr__(part, "__class__", kind)
            changed = lent.take_back(given)
        for each, before in outside:
            if any(map(_is_batched, each.values() if isinstance(each, dict) else each)):
                each.clear()
                (each.extend if isinstance(each, list) else each.update)(before)
                raise OneAtATime("a hook or a forward keeps tensors of all members outside of the network")
        if trains:
            if self.unread is None:  # only of what was traced is it known
                traced = [vars(part) for _, part, _ in kinds]
                known = {name for name, (now, _, _) in changed.items() if any(now is each for each in traced)}
                self.unread = known - read - lent.changed
            self.state |= (state := changed.keys() - self.unread)
            if state and alone and at_once:
                raise OneAtATime(f"forward reads and changes {min(state)}")
            self.waiting += [changed[name] for name in state if alone]  # besides that of an inner run
        return result

    def store(self) -> None:
        """Stores the state that the last training call has left."""
        for attributes, name, value in self.waiting:
            attributes[name] = value
        self.waiting = []


class _Lent:
    """Copies for the time of a call of what attributes hold and a forward may change in place."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.copies: dict[int, tuple[str, Any, Any]] = {}  # id -> (name, object, its copy)
        self.changed: set[str] = set()  # names of attributes that hold something which the call has changed

    def __call__(self, name: str, value: Any) -> Any:
        """A copy of the value, which holds copies; the value itself if it is registered, or not to be copied."""
        if id(value) in self.copies:
            return self.copies[id(value)][2]
        if isinstance(value, Tensor):
            made = value.detach().clone() if self._is_plain(value) else value
        elif len(value) > MOST_ENTRIES:
            return value
        else:
            made = copy.copy(value)
        self.copies[id(value)] = name, value, made
        if isinstance(value, dict | list | deque):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(each, HOLDERS):
                    made[key] = self(name, each)
        return made

    def take_back(self, given: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, Attribute]:
        """Restores the attributes (path, those now, those before) of modules; returns those that the call has changed."""
        inside = {id(value): name for name, value, made in self.copies.values() if self._differs(value, made)}
        self.changed, found = {*inside.values()}, {}
        for path, now, before in given:
            if not self.copies and len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for key, each in now.items():
                value = before.get(key, MISSING)
                if each is not self._copy_of(value) or path + key in self.changed or id(value) in inside:
                    found[path + key] = now, key, each
            for key in now.keys() - before.keys():
                del now[key]
            now.update(before)
        return found

    def _copy_of(self, value: Any) -> Any:
        return self.copies[id(value)][2] if id(value) in self.copies else value

    def _differs(self, value: Any, made: Any) -> bool:
        if isinstance(value, Tensor):
            return made is not value and made._version > 0
        if isinstance(value, set) or len(value) != len(made):
            return bool(value != made)
        pairs = ((each, made.get(key, MISSING)) for key, each in value.items()) if isinstance(value, dict) else zip(value, made, strict=True)
        return any(now is not self._copy_of(each) for each, now in pairs)

    def _is_plain(self, tensor: Tensor) -> bool:
        """Whether the tensor is neither registered nor one that cannot be copied."""
        usual = not (tensor.requires_grad or tensor.is_inference() or _functorch.is_functorch_wrapped_tensor(tensor))
        registered = (tensor is each for part in self.modules for each in part._buffers.values())
        return usual and tensor.numel() <= MOST_NUMBERS and not any(registered)


def _foreign(what: Any) -> bool:
    """Whether this class or function may write attributes of layers: torch's and the library's own do not."""
    return not str(what.__module__).startswith(("torch.", "dissensus."))


def _reached(modules: Sequence[tuple[str, nn.Module]]) -> list[Any]:
    """Lists and dicts outside of the modules that their hooks and forwards know: variables, and attributes of objects."""
    found: list[Any] = []
    for _, part in modules:
        for each in (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), type(part).forward):
            function = getattr(each, "__func__", each)
            found += vars(each.__self__).values() if isinstance(each, MethodType) else ()
            if isinstance(function, FunctionType) and _foreign(function):
                found += [cell.cell_contents for cell in function.__closure__ or ()]
                found += map(function.__globals__.get, function.__code__.co_names)
    return [each for each in found if isinstance(each, list | dict)]


def _is_batched(value: Any) -> bool:
    return isinstance(value, Tensor) and _functorch.is_batchedtensor(value)


def _traced(kind: type[nn.Module], path: str, read: set[str], written: set[str]) -> type[nn.Module]:
    """The class, but adding to `read` the names of attributes that are read before they are set."""

    def get(self: nn.Module, name: str) -> Any:
        if name not in written:
            read.add(path + name)
        return kind.__getattribute__(self, name)

    def put(self: nn.Module, name: str, value: Any) -> None:
        written.add(name)
        kind.__setattr__(self, name, value)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": put, **names})
