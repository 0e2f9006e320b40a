"""What a forward writes into plain attributes (features that it keeps, counters, caches) is not configuration.

Attributes are restored after every call. A training call may change some that it has read, such as a counter: they are the
member's state. Each member then runs in its own template, and its state is stored as batch statistics are, once per step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from dissensus.core.attributes import OWN
from dissensus.numerics.tree import KnownParts, parts

HOLDERS = (list, dict, set, deque, tuple, Tensor)
MOST = 10_000  # entries of a list or dict; longer ones are not looked at


class OneAtATime(RuntimeError):
    """A forward or a hook may keep tensors of vmap, which mean nothing after it."""


class Written:
    """Runs a template, restores its attributes, and finds out which of them are state."""

    def __init__(self, unread: set[str] | None = None, state: Iterable[str] = ()) -> None:
        self.known, self.found = KnownParts(), [nn.Module()]
        self.unread = unread  # what training sets before it reads it; None before the first such call
        self.state = {*state}  # names of the attributes that are state
        self.waiting: list[tuple[_Holder, Any]] = []  # what the last training call has changed of it

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
        if at_once and any(map(_foreign, chain.from_iterable(map(dict.values, self.hooks)))):
            raise OneAtATime("hooks would see all members at once")
        trains, read = template.network.training, set[str]()
        traced = watched if trains and self.unread is None else ()
        kinds, holders = [type(part) for _, part in traced], _holders(watched)
        self.waiting = [] if trains else self.waiting
        try:
            for path, part in traced:
                _set_class(part, _traced(type(part), path, read, set()))
            result = function(*args, **keywords)
        finally:
            for (_, part), kind in zip(traced, kinds, strict=True):
                _set_class(part, kind)
            changed = [(name, each, after) for each in holders for name, after in each.restore().items()]
        if trains:
            if self.unread is None:
                self.unread = {name for name, each, _ in changed if each.path is not None and name not in read}
            self.state |= (now := {name for name, _, _ in changed} - self.unread)
            if now and alone and at_once:
                raise OneAtATime(f"forward reads and changes {min(now)}")
            self.waiting += [(each, after) for name, each, after in changed if name in now and alone]  # runs may be nested
        return result

    def store(self) -> None:
        """Stores the state that the last training call has left."""
        for holder, after in self.waiting:
            holder.fill(after)
        self.waiting = []


class _Holder:
    """A module's attributes, or a list, dict, set or tensor among them, with its contents before a call."""

    def __init__(self, name: str, held: Any, path: str | None = None) -> None:
        """`path`: that of the module."""
        self.name, self.held, self.path = name, held, path
        self.version = held._version if isinstance(held, Tensor) else None
        self.before = self.contents()

    def contents(self) -> Any:
        return self.held.copy() if self.version is None else self.held.detach().clone()

    def restore(self) -> dict[str, Any]:
        """Restores the contents; name -> what they were, of those that had changed."""
        held, before = self.held, self.before
        if self.version is not None:
            same = held._version == self.version
        elif isinstance(held, dict):
            same = held.keys() == before.keys() and all(map(is_, held.values(), map(before.get, held)))
        else:
            same = held == before if isinstance(held, set) else len(held) == len(before) and all(map(is_, held, before))
        if same:
            return {}
        after = self.contents()
        for key in held.keys() - before.keys() if self.path is not None else ():
            del held[key]
        self.fill(before)
        if self.path is None:
            return {self.name: after}
        return {self.path + k: {k: v} for k, v in after.items() if k not in before or before[k] is not v}

    @torch.no_grad()
    def fill(self, contents: Any) -> None:
        if self.version is not None:
            self.held.copy_(contents)
            return
        if self.path is None:
            self.held.clear()
        (self.held.update if isinstance(self.held, dict | set) else self.held.extend)(contents)


def _holders(watched: Sequence[tuple[str, nn.Module]]) -> list[_Holder]:
    """The attributes of these modules, and what they hold."""
    found = [_Holder("", vars(part), path) for path, part in watched]
    waiting = [(each.path + k, v) for each in found for k, v in each.held.items() if k not in OWN and isinstance(v, HOLDERS)]
    seen: set[int] = set()
    for name, each in waiting:  # which grows
        if id(each) not in seen and not isinstance(each, nn.Parameter):
            seen.add(id(each))
            if isinstance(each, Tensor):
                found += [_Holder(name, each)] if _usual(each) else []
            elif len(each) <= MOST:
                found += [] if isinstance(each, tuple) else [_Holder(name, each)]
                inside = each.values() if isinstance(each, dict) else each
                waiting += [(name, value) for value in inside if isinstance(value, HOLDERS)]
    return found


def _usual(tensor: Tensor) -> bool:
    """Whether the tensor has a version and values, and not those of a function transform."""
    return not (tensor.is_inference() or tensor.is_meta or _functorch.is_functorch_wrapped_tensor(tensor))


def _foreign(what: Any) -> bool:
    """Whether a class of layers, or a hook, may write attributes: torch's and the library's own do not."""
    return not str(getattr(what, "__module__", "")).startswith(("torch.", "dissensus."))


def _set_class(part: nn.Module, kind: type[nn.Module]) -> None:
    object.__setattr__(part, "__class__", kind)


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
