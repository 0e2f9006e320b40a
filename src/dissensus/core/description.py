"""The description of a model: all that it is besides the values of its tensors, as JSON values with defaults spelled out.

Saved folders, states, checkpoints and exported files hold it. It is compared from both sides: what only one of two models
has is a difference.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from dissensus.core.likelihood import Likelihood
from dissensus.utils.json_values import to_json_values
from dissensus.utils.module_state import original_class, saved_attributes

NOTHING = "nothing"  # in place of what only the other model has
LEFT = ("Tensor (", f"{NOTHING}Tensor (")  # a plain tensor that only one has: a forward has kept it there


def describe_network(network: nn.Module) -> dict[str, Any]:
    """Classes and settings of the layers, and the network's own plain attributes. Call it before a forward can write any."""
    # An attribute that is None may as well be missing: classes have such defaults.
    attributes = {name: each for name, each in saved_attributes(network).items() if each != "None"}
    return {"layers": [_layer_settings(*named) for named in network.named_modules()], "attributes": attributes}


def describe_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """Class and arguments, the scale of targets among them, but not their unit, which is only a name."""
    try:
        arguments = to_json_values(likelihood.config())
    except (TypeError, NotImplementedError):  # a user's class that cannot be saved
        arguments = {}
    return {"name": type(likelihood).__name__, "arguments": {k: v for k, v in arguments.items() if k != "unit"}}


def differences(theirs: Any, mine: Any, where: str = "") -> Iterator[str]:
    """ "where theirs, not mine" for all places in which two descriptions differ."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in {**mine, **theirs}:
            within = f"{where}.{key}" if where else key
            yield from differences(theirs.get(key, NOTHING), mine.get(key, NOTHING), within)
    elif isinstance(theirs, list) and isinstance(mine, list):
        for a, b in itertools.zip_longest(theirs, mine, fillvalue=NOTHING):
            yield from differences(a, b, where)
    elif theirs != mine and not (NOTHING in (theirs, mine) and f"{theirs}{mine}".startswith(LEFT)):
        yield f"{where} {theirs}, not {mine}"


def layer_lines(network: nn.Module) -> list[str]:
    """One line per layer with its settings; two networks must agree in it to exchange tensors."""
    named = network.named_modules()
    return [short_layer_line(f"{name}: {type(layer).__name__}({layer.extra_repr()})") for name, layer in named]


def short_layer_line(line: str) -> str:
    """A layer's line without text that only newer torch versions add (that a norm layer has a bias, which all had before)."""
    return line.replace(", bias=True", "") if "affine=" in line else line


def _layer_settings(name: str, layer: nn.Module) -> str:
    # Only of torch's own layers: what others print may depend on the values or the device of their tensors.
    kind = original_class(layer)
    settings = kind.__module__.startswith("torch.nn.modules.") and not kind.__module__.endswith(".container")
    return short_layer_line(f"{name}: {kind.__name__}({layer.extra_repr() if settings else ''})")
