"""The order in which a network calls its layers, and other uses of their weights, found without an input.

The network is traced with symbols (torch.fx); every layer of torch counts as one step. Symbols, not a batch, because the
answer is needed when a posterior is built or loaded, before there are inputs, and because a batch shows only one path
through the forward. A symbol cannot be compared, counted or looped over, so a forward that branches on sizes or values fails
to trace. The result therefore holds for all inputs, or there is none; then layers keep the order in which they are
registered, and each is assumed to be read by other modules.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch import fx, nn

from dissensus.utils.network_outputs import named_output
from dissensus.utils.torch_private import DispatchMode, forward_hooks_of, pytree

# Operations that use only the dtype, device or size of a tensor.
VALUE_FREE = ("aten::new_", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")


class TracedCalls(NamedTuple):
    """Uses of some layers in a forward pass on symbols."""

    calls: list[str]  # calls in order; a layer that is called twice is listed twice
    read_directly: set[str]  # layers whose weight or bias was used outside their own forward
    inputs: list[str]  # layers that get the network's inputs, not through another of them
    outputs: list[str]  # layers whose outputs reach the network's outputs, not through another of them
    places: dict[fx.Node, list[str]]  # graph nodes in which they are called
    last: list[fx.Node]  # graph nodes that compute the network's outputs


def call_order(names: Sequence[str], followed: TracedCalls | None) -> list[str]:
    """Names of layers in the order of their first call; layers without a call, or all if tracing failed, as given."""
    return list(dict.fromkeys([*(followed.calls if followed else ()), *names]))


def end_layers(names: Sequence[str], followed: TracedCalls | None) -> tuple[list[str], list[str]]:
    """(input layers, output layers); the first and the last name if no call was found. Layers never called are neither."""
    if followed is None or not followed.calls:
        return [names[0]], [names[-1]]
    return followed.inputs, followed.outputs


def layer_chain(names: Sequence[str], followed: TracedCalls | None) -> list[str]:
    """Layers as one chain in the order of calls, with one output layer at its end, without layers never called."""
    if followed is None or not followed.calls:
        return list(names)
    return [*(n for n in dict.fromkeys(followed.calls) if n not in followed.outputs), followed.outputs[-1]]


def trace_calls(network: nn.Module, wanted: Sequence[str]) -> TracedCalls | None:
    """Uses of these layers in a forward pass; None if it cannot be traced."""
    if "" in wanted:  # the network is itself the layer
        return TracedCalls([""], set(), [""], [""], {}, [])
    met: list[str] = []
    places: dict[fx.Node, list[str]] = {}  # graph nodes in which layers are called
    # Not by the tracer's `trace`, which changes `nn.Module` for the whole process meanwhile; instead, layers of a copy get
    # another forward. The copy has no hooks, which could keep symbols; its parameters are the network's own, only read.
    tracer, used = fx.Tracer(), _UsedTensors()
    tracer.graph, tracer.tensor_attrs = fx.Graph(tracer_cls=fx.Tracer), {}

    def step(name: str, inside: list[str]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            called = [each for each in wanted if each == name or each in inside]
            symbols = [arg for arg in pytree.tree_leaves((args, kwargs)) if isinstance(arg, fx.Proxy)]
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
            for hooks in forward_hooks_of(part):
                hooks.clear()
            # Layers inside a module of torch (attention, transformers) count as called where that module is, because its
            # forward reads sizes. A Sequential only calls its parts, one after the other.
            leaf = type(part).__module__.startswith("torch.nn") and not isinstance(part, nn.Sequential)
            if name and (leaf or name in wanted):
                vars(part)["forward"] = step(name, [f"{name}.{each}" for each, _ in part.named_modules() if each])
        needed = [p for p in inspect.signature(network.forward).parameters.values() if p.default is p.empty]
        plain = [p for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.POSITIONAL_ONLY]
        symbols = [tracer.create_proxy("placeholder", parameter.name, (), {}) for parameter in plain or needed[:1]]
        with used:
            result = named_output(network(*symbols))
    except Exception:  # a forward may raise anything on symbols
        return None
    # No layer has run, so every computation with a parameter was outside a layer's own forward. Operations between tensors
    # are seen when they run; those between a tensor and a symbol do not run, but leave the tensor's name in the graph.
    with_symbols = {str(node.target) for node in tracer.graph.nodes if node.op == "get_attr"}
    used.ids |= {id(parameter) for name, parameter in network.named_parameters() if name in with_symbols}
    read = {name for name in wanted if any(id(p) in used.ids for p in network.get_submodule(name).parameters())}
    last = [each.node for each in pytree.tree_leaves(result) if isinstance(each, fx.Proxy)]
    first = [node for node in places if not _next_layers(node.all_input_nodes, places, "all_input_nodes")]
    stems = [places[node][0] for node in first]
    return TracedCalls(met, read, list(dict.fromkeys(stems)), _output_layers(last, places) or met[-1:], places, last)


def _output_layers(last: list[fx.Node], places: dict[fx.Node, list[str]]) -> list[str]:
    """The layers that the last nodes depend on; if possible, only those that feed no other layer."""
    found = _next_layers(last, places, "all_input_nodes")
    pure = [node for node in found if not _next_layers(node.users, places, "users")]
    return list(dict.fromkeys(places[node][-1] for node in sorted(pure or found)))


def _next_layers(
    start: Iterable[fx.Node], places: dict[fx.Node, list[str]], along: Literal["all_input_nodes", "users"]
) -> list[fx.Node]:
    """The first layers on all paths from these nodes."""
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
            left.extend(getattr(node, along))
    return found


class _UsedTensors(DispatchMode):
    """Inside, records the tensors that operations use, also detached, under no_grad or as a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.name().startswith(VALUE_FREE):
            self.ids |= {id(each) for each in pytree.tree_leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))
