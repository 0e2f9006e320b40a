"""The order in which a network calls its layers, found without an input.

The network is run on symbols (torch.fx), every layer of torch's own taken as one step. Not by torch.fx's tracer, which changes
`nn.Module` for the whole process meanwhile: here layers of a copy get a forward of their own. Networks whose forward
asks for sizes or values cannot be run so; then layers stand in the order in which they are registered.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn


def call_order(network: nn.Module, names: Iterable[str]) -> list[str]:
    """These names of layers in the order of their first call; those never met, or all where there is no telling, as given."""
    wanted = list(names)
    met = calls(network, wanted) or []
    return [*met, *(name for name in wanted if name not in met)]


def calls(network: nn.Module, wanted: Sequence[str]) -> list[str] | None:
    """Those of these layers that a forward pass calls, in the order of their first call; None where there is no telling.

    Looked for in a copy, without the hooks: what a forward leaves behind in its module, or a hook elsewhere, must be no symbol.
    """
    if "" in wanted:  # the network is itself the layer
        return [""]
    met: dict[str, None] = {}
    tracer = fx.Tracer()
    tracer.graph = fx.Graph(tracer_cls=fx.Tracer)

    def step(name: str, inside: list[str]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            met.update(dict.fromkeys(each for each in wanted if each == name or each in inside))
            first = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, fx.Proxy)), None)
            if first is None:
                raise TypeError("no symbol")
            return first

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
        network(*[tracer.create_proxy("placeholder", parameter.name, (), {}) for parameter in plain or needed[:1]])
    except Exception:  # whatever a forward says to symbols
        return None
    return list(met)
