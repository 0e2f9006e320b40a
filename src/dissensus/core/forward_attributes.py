"""What a forward writes into plain attributes (features that it keeps, counters, caches) is not configuration.

Attributes are restored after every call. A training call may change some that it has read, such as a counter: they are the
member's state. Each member then runs in its own template, and its state is stored as batch statistics are, once per step.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dissensus.core.member import NUMBER, PREFIX, empty_copy
from dissensus.utils.module_state import OWN
from dissensus.utils.tensor_tree import SubmoduleCache, derived_names, named_submodules, run_keeping_tensors
from dissensus.utils.torch_private import has_vmap_axis, in_vmap, is_transformed

MOST = 10_000  # entries of a list or dict; longer ones are not looked at
MISSING = object()
Named = Sequence[tuple[str, nn.Module]]  # modules with their paths
Attribute = tuple[dict[str, Any], str, Any]  # a module's attributes, the name of one, and its value


class SeparateRunsNeeded(RuntimeError):
    """A forward or a hook keeps tensors of vmap, which mean nothing after it."""


class ForwardAttributes:
    """Runs a template, restores its attributes, and finds out which of them are state."""

    def __init__(self, unread: set[str] | None = None, state: Iterable[str] = ()) -> None:
        self.known, self.found = SubmoduleCache(), [nn.Module()]
        self.unread = unread  # what training sets before it reads it; None before the first such call
        self.state = {*state}  # names of the attributes that are state
        self.pending_state: list[Attribute] = []  # the state that the last training call has left

    def __reduce__(self) -> tuple[type["ForwardAttributes"], tuple[Any, ...]]:
        return ForwardAttributes, (self.unread, self.state)

    def modules_to_watch(self, template: nn.Module) -> Named:
        """The template's modules that may write attributes: the caller's own, or all, if there are hooks."""
        if torch.compiler.is_dynamo_compiling():
            return ()
        if (found := self.known(template)) is not self.found:
            self.found, self.all = found, named_submodules(template)
            self.foreign = [each for each in self.all if _is_foreign(type(each[1])) or "forward" in vars(each[1])]
            self.hooks = [*chain.from_iterable((part._forward_hooks, part._forward_pre_hooks) for part in found)]
            self.known_values: list[Any] = []
        return self.all if any(self.hooks) else self.foreign

    def take_snapshot(self, template: nn.Module) -> "_AttributeSnapshot | None":
        """For several runs in eval mode, with `restore_attributes` after each. None if there are no attributes to restore."""
        return _AttributeSnapshot(self, watched) if (watched := self.modules_to_watch(template)) else None

    def run_with_own_tensors(self, template: Any, function: Callable[..., Any], *args: Any) -> Any:
        """function(template, *args) with the template's own tensors, which are restored, too."""
        return self.run(template, lambda: run_keeping_tensors(self.found, function, template, *args))

    def run(self, template: Any, function: Callable[..., Any], *args: Any, alone: bool = True, **keywords: Any) -> Any:
        """function(*args, **keywords), which runs the template; `alone`: whether no other member runs in it."""
        if not (watched := self.modules_to_watch(template)):
            return function(*args, **keywords)
        outside = [(each, each.copy()) for each in _outside_containers(self.hooks)] if any(self.hooks) else ()
        trains, lent = template.network.training, _AttributeSnapshot(self, watched)
        self.pending_state = [] if trains else self.pending_state
        try:
            if trains and self.unread is None:
                lent.trace(watched)
            result = function(*args, **keywords)
        finally:
            changed = lent.restore_attributes()
        for each, before in outside:
            inside = (value for value in _container_values(each) if isinstance(value, Tensor))
            if any(map(has_vmap_axis, inside)):
                each.clear()
                (each.extend if isinstance(each, list) else each.update)(before)
                raise SeparateRunsNeeded("a hook keeps tensors of all members outside of the network")
        if trains:
            if self.unread is None:
                self.unread = {name for name in changed if lent.first.get(name)}
                self.unread |= {path + name for path, part in watched for name in derived_names(part)}
            self.state |= (state := changed.keys() - self.unread)
            if state and alone:
                # A CUDA graph would repeat what this call has read.
                if in_vmap() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                    raise SeparateRunsNeeded(f"forward reads and changes {min(state)}")
                self.pending_state += map(changed.__getitem__, state)  # besides that of an inner run
        return result

    def store_state(self) -> None:
        """Stores the state that the last training call has left."""
        for attributes, name, value in self.pending_state:
            attributes[name] = value
        self.pending_state = []


class _AttributeSnapshot:
    """The attributes of modules before a call. Lists, dicts and plain tensors are lent as copies, to be changed in place."""

    def __init__(self, written: ForwardAttributes, watched: Named) -> None:
        self.modules = written.found
        self.kinds: list[tuple[nn.Module, type[nn.Module]]] = []  # of modules that are traced
        self.copies: dict[int, Any] = {}  # by id of the list, dict or tensor
        self.first: dict[str, bool] = {}  # name of a traced attribute -> whether it was set before it was read
        if len(written.known_values) != len(watched):
            written.known_values = [(path, vars(part), {}, []) for path, part in watched]
        for i, (path, now, before, _) in enumerate(written.known_values):
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                keys = [key for key, each in now.items() if key not in OWN and isinstance(each, list | dict | Tensor)]
                written.known_values[i] = path, now, now.copy(), keys
        self.before = written.known_values.copy()
        self._lend_copies()

    def _lend_copies(self) -> None:
        self.copies.clear()
        for _, now, before, keys in self.before:
            for key in keys:
                now[key] = self._copy_container(before[key])

    def trace(self, watched: Named) -> None:
        """Notes which attributes of a caller's modules are read, and which are set, first."""
        for path, part in watched:
            if _is_foreign(kind := type(part)):
                self.kinds.append((part, kind))
                object.__setattr__(part, "__class__", _tracing_class(kind, path, self.first))

    def restore_attributes(self, *, again: bool = False) -> dict[str, Attribute]:
        """Restores the attributes; returns those that the call has changed, by name. `again`: lends them again."""
        for part, kind in self.kinds:
            object.__setattr__(part, "__class__", kind)
        found: dict[str, Attribute] = {}
        for path, now, before, keys in self.before:
            if not keys and len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for key, each in now.items():
                value = before.get(key, MISSING)
                lent = self.copies.get(id(value), value)
                if each is not lent or (lent is not value and self._has_changed(value, lent)):
                    found[path + key] = now, key, each
                    self.first[path + key] = each is not lent and self.first.get(path + key, False)
            for key in now.keys() - before.keys():
                del now[key]
            now.update(before)
        if again and self.copies:
            self._lend_copies()
        return found

    def _copy_container(self, value: Any) -> Any:
        if id(value) not in self.copies and (isinstance(value, Tensor) or len(value) <= MOST):
            deep = isinstance(value, Tensor) or any(
                isinstance(e, list | dict | tuple | Tensor) for e in _container_values(value)
            )
            self.copies[id(value)] = pytree.tree_map(self._copy_leaf, value) if deep else value.copy()
        return self.copies.get(id(value), value)

    def _copy_leaf(self, each: Any) -> Any:
        """A copy, if this is a tensor that is neither registered nor part of a graph or a transform."""
        if not isinstance(each, Tensor) or each.requires_grad or each.is_inference():
            return each
        registered = (tensor for part in self.modules for tensor in part._buffers.values())
        if is_transformed(each) or any(each is tensor for tensor in registered):
            return each
        return self.copies.setdefault(id(each), each.detach().clone())

    def _has_changed(self, value: Any, lent: Any) -> bool:
        if not isinstance(value, Tensor) and _has_same_objects(value, lent):
            return False
        (leaves, form), (now, other) = pytree.tree_flatten(value), pytree.tree_flatten(lent)
        pairs = zip(leaves, now, strict=False)
        same = (b is self.copies.get(id(a), a) and (b is a or not b._version) for a, b in pairs)
        return form != other or not all(same)


def _tracing_class(kind: type[nn.Module], path: str, first: dict[str, bool]) -> type[nn.Module]:
    def get(part: nn.Module, name: str) -> Any:
        first.setdefault(path + name, False)
        return kind.__getattribute__(part, name)

    def put(part: nn.Module, name: str, value: Any) -> None:
        first.setdefault(path + name, True)
        kind.__setattr__(part, name, value)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    meta: Any = type(kind)
    return meta(kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": put, **names})  # type: ignore[no-any-return]


def _outside_containers(hooks: Sequence[dict[int, Any]]) -> list[Any]:
    """Lists and dicts outside of the network that its hooks know as variables."""
    found: list[Any] = []
    for each in chain.from_iterable(map(dict.values, hooks)):
        if isinstance(each, FunctionType):
            found += [cell.cell_contents for cell in each.__closure__ or ()]
            found += map(each.__globals__.get, each.__code__.co_names)
    return [each for each in found if isinstance(each, list | dict)]


def _has_same_objects(now: Any, before: Any) -> bool:
    """Whether lists or dicts hold the same objects."""
    same = len(now) == len(before) and all(map(is_, now, before))
    return same and all(map(is_, _container_values(now), _container_values(before)))


def _container_values(holder: Any) -> Any:
    return holder.values() if isinstance(holder, dict) else holder


def _is_foreign(kind: type[nn.Module]) -> bool:
    """Whether layers of this class may write attributes: torch's and the library's own do not."""
    return not kind.__module__.startswith(("torch.", "dissensus."))


log = logging.getLogger("dissensus")
Result = TypeVar("Result")


def state_names(particles: Any) -> set[str]:
    """Names of the networks' plain attributes that training reads and changes."""
    return {name.removeprefix(PREFIX) for written in particles._forward_attributes.values() for name in written.state}


def run_separately(particles: Any, run: Callable[[], Result]) -> Result:
    """run(), and once more with a template for each member if forward has state in attributes of the one for all."""
    result = run()
    if not particles._forward_attributes[0].state or len(particles.templates) >= particles.members:
        return result
    others = [empty_copy(particles.template) for _ in range(1, particles.members)]
    particles.templates = (particles.template, *others)
    particles.own.add_tensor(NUMBER, torch.arange(particles.members, device=particles.device), persistent=False)
    particles._choose_runner()
    log.info("members run one after the other: forward reads and changes %s", ", ".join(sorted(state_names(particles))))
    return run()


def run_compiled(particles: Any, run: Callable[[], Result]) -> Result:
    """run(), in which compiled code runs members; raises if they have state, which that would not keep apart."""
    pairs = [(particles._forward_attributes[i], each) for i, each in enumerate(particles.templates)]
    lent = [(written, written.take_snapshot(template)) for written, template in pairs]
    try:
        return run()
    finally:
        for written, each in lent:
            if each is not None and each.restore_attributes().keys() - (written.unread or set()):
                raise SeparateRunsNeeded("forward changes attributes")


def warn_of_state(particles: Any) -> None:
    """Logs, once, which attributes a state dict does not hold."""
    if state := sorted(state_names(particles) - particles._logged_names):
        particles._logged_names.update(state)
        log.warning(
            "a state holds tensors only, not the attribute %s, which forward reads and changes in training: wherever it is "
            "loaded, the attribute is that of a new network; register it as a buffer",
            ", ".join(state),
        )
