"""The description of a model: all that it is besides the values of its tensors, as JSON values with defaults spelled out.

Saved folders, states, checkpoints and exported files hold it. It is compared from both sides: what only one of two models
has is a difference. Constructors name the new name of a setting that had another.
"""

import inspect
import itertools
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import GaussianPrior
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
    arguments = config_as_json(likelihood.config)
    return {"name": type(likelihood).__name__, "arguments": {k: v for k, v in arguments.items() if k != "unit"}}


def describe_settings(posterior: Any) -> dict[str, Any]:
    """The keywords of a method's constructor, as JSON values, from attributes of the same names.

    `members` without such an attribute is the number of members. Left out are a keyword without an attribute, the
    likelihood, which files describe by itself, and the base, which is part of the network.
    """
    values = {name: getattr(posterior, name) for name in _keywords(type(posterior)) if hasattr(posterior, name)}
    if "members" in _keywords(type(posterior)):
        values.setdefault("members", posterior.particles.members)
    if "prior" in values:  # a Gaussian is saved by its standard deviation alone
        gaussian = type(prior := values.pop("prior")) is GaussianPrior
        size = {"data_size": values.pop("data_size")}  # last: differences are named in this order
        values |= {"weight_prior_std": prior.std if gaussian else None, **size}
        values |= {} if prior is None or gaussian else {"prior": prior}
    described = {name: value.config() if hasattr(value, "config") else value for name, value in values.items()}
    return {name: value for name, value in described.items() if name not in ("likelihood", "base")}


def complete_config(posterior: Any) -> dict[str, Any]:
    """config(), which must hold all keywords of the constructor: what is missing would be lost in a file."""
    config, kind = dict[str, Any](posterior.config()), type(posterior).__name__
    for name in _keywords(type(posterior)).keys() - config.keys() - {"likelihood", "prior", "latents", "base"}:
        advice = f"keep it as self.{name}, or return it from config()"
        raise ValueError(f"expected {name!r} of {kind} in its config(), got {', '.join(config)}; {advice}")
    return config


def restore_settings(method: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments from what `describe_settings` returned."""
    # Where the annotation of an argument names a class with `from_config`, that builds the value.
    restored = dict(settings)
    for name, hint in _keywords(method).items():
        built = [each for each in (hint, *typing.get_args(hint)) if hasattr(each, "from_config")]
        if built and isinstance(settings.get(name), dict | list):
            restored[name] = built[0].from_config(settings[name])
    return restored


def _keywords(method: type) -> dict[str, Any]:
    """Keyword -> annotation of a method's constructor; `**keywords` that it passes on are those of its base class."""
    found: dict[str, Any] = {}
    for cls in method.__mro__:
        if "__init__" in vars(cls):
            parameters = inspect.signature(cls).parameters.values()
            try:
                hints = typing.get_type_hints(vars(cls)["__init__"])
            except NameError:  # names that a user's file imports for type checkers only
                hints = {}
            named = [
                each.name for each in [*parameters][1:] if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
            ]
            found = {name: hints.get(name) for name in named} | found
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return found


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


def to_json_values(settings: Any) -> Any:
    """The settings as they will be in a file: lists for tuples, Python numbers for NumPy's."""
    return json.loads(json.dumps(settings, default=_plain_number))


def config_as_json(config: Callable[[], Any]) -> Any:
    """The result of config() as JSON values; {} for a user's class that cannot be saved."""
    try:
        return to_json_values(config())
    except (TypeError, NotImplementedError):
        return {}


def _plain_number(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected settings of text, numbers and lists, got {value!r}, not JSON serializable; use those")


# Method -> former name of a setting -> what to pass now.
RENAMED: dict[str, dict[str, str]] = {
    "dropout_ensemble": {"keep": "rate=1 - keep"},
    "node_bnn": {"gamma": "posterior_temperature=1 + gamma", "rate": "lr=rate"},
    "swag": {"scale": "posterior_temperature=scale"},
}


def rename_hint(method: str, keyword: str) -> str:
    """The advice "pass …" for a former name of a setting, or nothing."""
    found = RENAMED.get(method, {}).get(keyword)
    return "" if found is None else f"pass {found}"
