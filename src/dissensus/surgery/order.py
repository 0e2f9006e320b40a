"""The order in which a network calls its layers, found without an input.

The network is run on symbols (torch.fx), every layer of torch's own taken as one step. Not by torch.fx's tracer, which changes
`nn.Module` for the whole process meanwhile: here layers of a copy get a forward of their own. Networks whose forward
asks for sizes or values cannot be run so; then layers stand in the order in which they are registered.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves


class Followed(NamedTuple):
    """What a forward pass on symbols did with some layers."""

    calls: list[str]  # in turn; a layer that is called twice is there twice
    read: set[str]  # those whose weight or bias was used past the layer's own forward
    inputs: list[str]  # those that take in what the network does, through no other of them
    outputs: list[str]  # those whose outputs are the network's, through no other of them
    places: dict[fx.Node, list[str]]  # where in the graph they are called
    last: list[fx.Node]  # where in the graph the network's outputs are made


def call_order(network: nn.Module, names: Iterable[str]) -> list[str]:
    """These names of layers in the order of their first call; those never met, or all where there is no telling, as given."""
    wanted = list(names)
    met = calls(network, wanted) or []
    return [*met, *(name for name in wanted if name not in met)]


def calls(network: nn.Module, wanted: Sequence[str]) -> list[str] | None:
    """Those of these layers that a forward pass calls, in the order of their first call; None where there is no telling."""
    followed = follow(network, wanted)
    return None if followed is None else list(dict.fromkeys(followed.calls))


def ends(names: Sequence[str], followed: Followed | None) -> tuple[list[str], list[str]]:
    """(input layers, output layers); the first and the last name given where none was met. Layers never met are neither."""
    if followed is None or not followed.calls:
        return [names[0]], [names[-1]]
    return followed.inputs, followed.outputs


def chained(names: Sequence[str], followed: Followed | None) -> list[str]:
    """Layers as links of one chain, in the order of calls, one output layer at its end; those never met are no links."""
    if followed is None or not followed.calls:
        return list(names)
    return [*(n for n in dict.fromkeys(followed.calls) if n not in followed.outputs), followed.outputs[-1]]


def follow(network: nn.Module, wanted: Sequence[str]) -> Followed | None:
    """What a forward pass does with these layers; None where there is no telling.

    Looked for in a copy, without the hooks: what a forward leaves behind in its module, or a hook elsewhere, must be no symbol.
    """
    if "" in wanted:  # the network is itself the layer
        return Followed([""], set(), [""], [""], {}, [])
    met: list[str] = []
    places: dict[fx.Node, list[str]] = {}  # where in the graph layers are called
    tracer = fx.Tracer()
    tracer.graph, tracer.tensor_attrs = fx.Graph(tracer_cls=fx.Tracer), {}

    def step(name: str, inside: list[str]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            called = [each for each in wanted if each == name or each in inside]
            symbols = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, fx.Proxy)]
            if not symbols:
                raise TypeError("no symbol")
            made = tracer.create_proxy("call_function", step, tuple(symbols), {})
            met.extend(called)
            places.update({made.node: called} if called else {})
            return made

        return forward

    try:
        network = copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})
        tracer.root = network
        for name, part in network.named_modules():
            part._forward_hooks, part._forward_pre_hooks = OrderedDict(), OrderedDict()
            leaf = type(part).__module__.startswith("torch.nn") and not isinstance(part, nn.Sequential)
            if name and (leaf or name in wanted):
                vars(part)["forward"] = step(name, [f"{name}.{each}" for each, _ in part.named_modules() if each])
        needed = [p for p in inspect.signature(network.forward).parameters.values() if p.default is p.empty]
        plain = [p for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.POSITIONAL_ONLY]
        with torch.enable_grad():
            result = network(
                *[tracer.create_proxy("placeholder", parameter.name, (), {}) for parameter in plain or needed[:1]]
            )
    except Exception:  # whatever a forward says to symbols
        return None
    last = [each.node for each in tree_leaves(result) if isinstance(each, fx.Proxy)]
    stems = [called[0] for node, called in places.items() if not _next(node.all_input_nodes, places, _sources)]
    return Followed(
        met, _used(wanted, tracer), list(dict.fromkeys(stems)), _heads(last, places) or met[-1:], places, last
    )


def _heads(last: list[fx.Node], places: dict[fx.Node, list[str]]) -> list[str]:
    """The layers that the last nodes come from; of those, where there are such, the ones that feed no other layer."""
    found = _next(last, places, _sources)
    pure = [node for node in found if not _next(list(node.users), places, lambda each: list(each.users))]
    return list(dict.fromkeys(places[node][-1] for node in sorted(pure or found)))


def _sources(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def _next(
    start: list[fx.Node], places: dict[fx.Node, list[str]], step: Callable[[fx.Node], list[fx.Node]]
) -> list[fx.Node]:
    """The layers that are met first on all ways from these nodes."""
    seen: set[fx.Node] = set()
    found, left = [], list(start)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in places:
            found.append(node)
        else:
            left.extend(step(node))
    return found


def _used(wanted: Sequence[str], tracer: fx.Tracer) -> set[str]:
    """Layers with a parameter that met a symbol, itself or what was computed of it; not its dtype alone."""
    got = {str(node.target) for node in tracer.graph.nodes if node.op == "get_attr"}
    met = {id(parameter) for name, parameter in tracer.root.named_parameters() if name in got}
    met |= _leaves([each for each in tracer.tensor_attrs if isinstance(each, Tensor)])
    return {name for name in wanted if any(id(p) in met for p in tracer.root.get_submodule(name).parameters())}


def _leaves(computed: list[Tensor]) -> set[int]:
    """The ids of the parameters that these tensors were computed of."""
    left, seen = [each.grad_fn for each in computed], set()
    found = set()
    while left:
        step: Any = left.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if hasattr(step, "variable"):
            found.add(id(step.variable))
        left.extend(each for each, _ in step.next_functions)
    return found
