"""Which layers all that becomes of a network's inputs passes: the links of a chain, and not of a way beside another."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_leaves

from dissensus.surgery.order import follow


def passed(network: nn.Module, layers: Sequence[str], heads: Sequence[str]) -> set[str]:
    """Those of these layers through which every way from the inputs to the outputs leads; none where there is no telling.

    `heads`: layers, some of these, that count as one.
    """
    within = [name for name in dict.fromkeys([*layers, *heads]) if _looked_into(network, name)]
    met: dict[str, list[fx.Node]] = {}
    watched = copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})
    for name in within:
        if name:
            watched.set_submodule(name, _Watch(watched.get_submodule(name), met.setdefault(name, [])))
    outputs: list[fx.Node] = []
    whole = _watch_all(watched, outputs)
    if follow(whole, [f"layer.{name}.layer" if name else "layer" for name in within]) is None:
        return set()
    together = {node for name in heads for node in met.get(name, outputs)}
    cuts = {name: together if name in heads else set(met[name]) for name in layers if name in within}
    return {name for name, nodes in cuts.items() if nodes and not _reaches_inputs(outputs, nodes)}


class _Watch(nn.Module):
    """A layer, with a note of where in the graph its outputs are made."""

    def __init__(self, layer: nn.Module, nodes: list[fx.Node]) -> None:
        super().__init__()
        self.layer, self.nodes = layer, _Kept(nodes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.layer(*args, **kwargs)
        self.nodes.nodes.extend(each.node for each in tree_leaves(found) if isinstance(each, fx.Proxy))
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)


class _Kept:
    """A list that copies share."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


def _watch_all(network: nn.Module, nodes: list[fx.Node]) -> nn.Module:
    """The network, watched, with its own signature: a trace asks for it."""

    def forward(self: _Watch, *args: Any) -> Any:
        return _Watch.forward(self, *args)

    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    needed = [p for p in inspect.signature(network.forward).parameters.values() if p.default is p.empty]
    given = [p.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for p in needed if p.kind is not p.VAR_KEYWORD]
    forward.__signature__ = inspect.Signature([me, *given])  # type: ignore[attr-defined]
    kind: type[_Watch] = type("_Whole", (_Watch,), {"forward": forward})
    return kind(network, nodes)


def _looked_into(network: nn.Module, name: str) -> bool:
    """Whether the layer is called by a forward that is followed, not inside a layer of torch's own."""
    while name:
        name = name.rpartition(".")[0]
        part = network.get_submodule(name)
        opened = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if type(part).__module__.startswith("torch.nn") and not opened:
            return False
    return True


def _reaches_inputs(outputs: list[fx.Node], without: set[fx.Node]) -> bool:
    left, seen = list(outputs), set(without)
    while left:
        node = left.pop()
        if node in seen:
            continue
        if node.op == "placeholder":
            return True
        seen.add(node)
        left.extend(node.all_input_nodes)
    return False
