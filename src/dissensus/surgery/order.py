"""The order in which a network calls its layers, found without an input.

The network is run on symbols (torch.fx), every layer of torch's own taken as one step. Not by torch.fx's tracer, which changes
`nn.Module` for the whole process meanwhile: here layers of one copy get a forward of their own. Networks whose forward
asks for sizes or values cannot be run so; then layers stand in the order in which they are registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import fx, nn


def call_order(network: nn.Module, names: Iterable[str]) -> list[str]:
    """These names of layers in the order of their first call; those never met, or all where there is no telling, as given.

    Changes forwards of the network's layers while it looks, so let no one else run it.
    """
    wanted = list(names)
    met: dict[str, None] = {}
    tracer = fx.Tracer()
    tracer.root, tracer.graph = network, fx.Graph(tracer_cls=fx.Tracer)

    def step(name: str, inside: list[str]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            met.update(dict.fromkeys(each for each in wanted if each == name or each in inside))
            first = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, fx.Proxy)), None)
            if first is None:
                raise TypeError("no symbol")
            return first

        return forward

    taken: list[nn.Module] = []
    try:
        for name, part in network.named_modules():
            leaf = type(part).__module__.startswith("torch.nn") and not isinstance(part, nn.Sequential)
            if name and "forward" not in vars(part) and (leaf or name in wanted):
                vars(part)["forward"] = step(name, [f"{name}.{each}" for each, _ in part.named_modules() if each])
                taken.append(part)
        needed = [p for p in inspect.signature(network.forward).parameters.values() if p.default is p.empty]
        plain = [p for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.POSITIONAL_ONLY]
        network(*[tracer.create_proxy("placeholder", parameter.name, (), {}) for parameter in plain or needed[:1]])
    except Exception:  # whatever a forward says to symbols
        met = {}
    finally:
        for part in taken:
            vars(part).pop("forward", None)
    return [*met, *(name for name in wanted if name not in met)]
