"""A tree of named tensors as a module, so that `.to`, `state_dict` and checkpoints work."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dissensus.utils.torch_private import (
    buffers_of,
    children_of,
    forward_hooks_of,
    named_registries,
    named_submodules,
    parameters_of,
    tensors_of,
)

Tensors = dict[str, Tensor]  # by name


class TensorTree(nn.Module):
    """Named tensors as parameters and buffers of nested empty modules, so that `state_dict` looks like the network's."""

    def parameters_and_buffers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(parameters, buffers) by name; pruned and parametrised ones are computed as in a layer."""
        if torch.compiler.is_dynamo_compiling():
            return dict(self.named_parameters()), dict(self.named_buffers())
        # Tensors are read at every call, so that those of `torch.func.functional_call` are seen; nodes are found once.
        found = known_submodules(self)
        parameters = {path + key: tensor for path, node in found for key, tensor in parameters_of(node).items()}
        buffers = {path + key: tensor for path, node in found for key, tensor in buffers_of(node).items()}
        for path, node in found:
            before, _ = forward_hooks_of(node)
            for leaf in derived_names(node) if before or "parametrizations" in children_of(node) else ():
                for hook in before.values():
                    hook(node, ())
                parameters[path + leaf] = getattr(node, leaf)
        return parameters, buffers

    def train(self, mode: bool = True) -> Self:
        self.training = mode  # not of every node: nothing runs here, and there are as many as layers
        return self

    def add_tensor(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        *path, leaf = name.split(".")
        node: nn.Module = self
        for part in path:
            if part not in children_of(node):
                node.add_module(part, TensorTree().train(False))
            node = children_of(node)[part]
        if isinstance(tensor, nn.Parameter):
            node.register_parameter(leaf, tensor)
        else:
            node.register_buffer(leaf, tensor, persistent=persistent)


def derived_names(part: nn.Module) -> list[str]:
    """Names of tensors computed from parameters: by hooks in every forward (old weight norm, pruning), or parametrised ones."""
    sources = [(key, end) for key in parameters_of(part) for end in ("_g", "_orig") if key.endswith(end)]
    named = [name for key, end in sources if (name := key.removesuffix(end)) in vars(part)]
    parametrised = children_of(part).get("parametrizations")
    return [*named, *parametrised] if isinstance(parametrised, nn.ModuleDict) else named


def computed_names(module: nn.Module) -> list[str]:
    """Names of a tree's tensors that are pruned or parametrised in the tree."""
    found = named_submodules(module) if isinstance(module, TensorTree) else []
    return [path + leaf for path, node in found for leaf in derived_names(node)]


class TensorPlaces:
    """Where a module's tensors are registered; a tied tensor has several places, and the name of the first."""

    # Found once for a template. A caller's module may have changed since, so its places are found again for every call.

    def __init__(self, module: nn.Module) -> None:
        first: dict[int, str] = {}  # by id, since tensors are slow to hash
        # Each place's registry, its key there, and its name; three lists, since `map` takes a third of a loop.
        self.registries: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.names: list[str] = []
        self.tied: dict[str, str] = {}  # other name -> first name
        for path, registered in named_registries(module):
            for leaf, tensor in registered.items():
                if tensor is not None:
                    source = first.setdefault(id(tensor), name := path + leaf)
                    self.registries.append(registered)
                    self.keys.append(leaf)
                    self.names.append(source)
                    if source != name:
                        self.tied[name] = source


def all_submodules(*modules: nn.Module | None, trees: bool = True) -> list[nn.Module]:
    """These modules and their submodules, each once, in any order; `trees`: whether also those of a `TensorTree`."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [*modules]
    while waiting:
        part = waiting.pop()
        if part is not None and part not in found:
            found[part] = None
            if trees or not isinstance(part, TensorTree):
                waiting += children_of(part).values()
    return list(found)


class Cache:
    """Base class of what is found once and found again where it could have changed: neither copied nor saved."""

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class SubmoduleCache(Cache):
    """`all_submodules`, found again only where one of them has other submodules than before: to see that takes a tenth."""

    # Do not keep it where one of the modules is its owner, which would then be deleted late.

    def __init__(self) -> None:
        self.walked: list[nn.Module] = []  # those whose children were looked at
        self.children: list[dict[str, nn.Module | None]] = []  # of these, with names
        self.known: tuple[list[Any], list[nn.Module]] | None = None

    def __call__(self, *modules: nn.Module | None, trees: bool = True) -> list[nn.Module]:
        """The modules may be None, but not change with `trees`."""
        same = self.known is not None and all(map(is_, map(children_of, self.walked), self.children))
        if self.known is None or not same or self.known[0] != self._list_children(modules):
            found = all_submodules(*modules, trees=trees)
            self.walked = [part for part in found if trees or not isinstance(part, TensorTree)]
            self.children = [*map(children_of, self.walked)]
            self.known = self._list_children(modules), found
        return self.known[1]

    def _list_children(self, modules: Sequence[nn.Module | None]) -> list[Any]:
        """The modules, names of all children, and these."""
        each = [*filter(None, self.children)]
        parts = chain.from_iterable(map(dict.values, each))
        return [*modules, *map(len, self.children), *chain.from_iterable(each), *parts]


class NamedSubmodules(Cache):
    """(path, submodule) of all below a module, found again only where submodules changed; not of itself: it keeps this."""

    def __init__(self) -> None:
        self.submodules, self.known = SubmoduleCache(), list[nn.Module]()
        self.named: list[tuple[str, nn.Module]] = []

    def __call__(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        if (found := self.submodules(*children_of(module).values())) is not self.known:
            self.known, self.named = found, named_submodules(module)[1:]
        return self.named


def known_submodules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """`named_submodules` of a module of this library, which keeps them."""
    cache = vars(module).get("_named_submodules")
    if cache is None:
        cache = vars(module)["_named_submodules"] = NamedSubmodules()
    return [("", module), *cache(module)]


def call_with_tensors(module: nn.Module, tensors: Tensors, *args: Any, places: TensorPlaces | None = None) -> Any:
    """module(*args) with these tensors in place of its own, tied ones in all their places."""
    # As torch's `functional_call`, the only one compilers know, but quick, and right for a layer with two names.
    places = TensorPlaces(module) if places is None else places
    if torch.compiler.is_dynamo_compiling():
        others = {name: tensors[source] for name, source in places.tied.items() if source in tensors}
        return functional_call(module, {**tensors, **others}, args, tie_weights=False)
    before = [*map(dict.__getitem__, places.registries, places.keys)]
    try:
        assign_tensors(places, map(tensors.get, places.names, before))
        return module(*args)
    finally:
        assign_tensors(places, before)


def assign_tensors(places: TensorPlaces, tensors: Iterable[Tensor]) -> None:
    """Puts these tensors into the places, in their order."""
    deque(map(dict.__setitem__, places.registries, places.keys, tensors), maxlen=0)


def run_keeping_tensors(modules: Sequence[nn.Module], function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); afterwards the modules have their tensors again if a forward has assigned others."""
    modules = () if torch.compiler.is_dynamo_compiling() else modules
    registered = [*filter(None, chain.from_iterable(map(tensors_of, modules)))]
    before = [*map(dict.copy, registered)]
    try:
        return function(*args)
    finally:
        deque(map(dict.update, registered, before), maxlen=0)


class OwnTensors(Tensors):
    """The parameters of a module, themselves: to run it with these, none has to be put in place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.buffers: Tensors = {}
        nodes = named_submodules(module)
        _collect(nodes, parameters_of, self)
        _collect(nodes, buffers_of, self.buffers)


class OwnTensorsCache(Cache):
    """`OwnTensors` of a module, collected again only if one of its submodules or of their tensors is another."""

    def __init__(self) -> None:
        self.submodules = SubmoduleCache()
        self.parts: list[nn.Module] = []
        self.registries: list[dict[str, Any]] = []
        self.known: tuple[list[Any], OwnTensors] | None = None

    def __call__(self, module: nn.Module) -> OwnTensors:
        if (parts := self.submodules(module)) is not self.parts:
            self.parts, self.known = parts, None
            self.registries = [*chain.from_iterable(map(tensors_of, parts))]
        now = [*chain.from_iterable(map(dict.values, self.registries))]
        if self.known is None or len(now) != len(self.known[0]) or not all(map(is_, now, self.known[0])):
            self.known = now, OwnTensors(module)
        return self.known[1]


def named_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters, buffers) by name; for a caller's module they may change between calls."""
    if isinstance(module, TensorTree):
        return module.parameters_and_buffers()
    own = OwnTensors(module)
    return dict(own), own.buffers


def known_tensors(module: nn.Module, registered_in: Callable[..., Any]) -> Tensors:
    """Name -> tensor in these registries of a module of this library, which keeps its submodules."""
    found: Tensors = {}
    _collect(known_submodules(module), registered_in, found)
    return found


def _collect(nodes: Iterable[tuple[str, nn.Module]], registered_in: Callable[..., Any], into: Tensors) -> None:
    """Puts the tensors in these registries into a dictionary by name, each once."""
    seen: set[int] = set()
    for path, part in nodes:
        for leaf, tensor in registered.items() if (registered := registered_in(part)) else ():  # most have none
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                into[path + leaf] = tensor
