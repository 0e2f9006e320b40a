"""Counts the weights and nodes of networks, for `dissensus capacity`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dissensus.bench.run.build import make_network
from dissensus.bench.task.config import parse_value
from dissensus.bench.task.objects import NetworkMaker, network_maker
from dissensus.bench.task.schema import AnyKey, Fields, check_value, parameter_fields
from dissensus.layers.nodes import Capacity, capacity
from dissensus.utils.checks import one_of

# The networks of the talk on node noise, with the numbers of outputs of their published weights.
TALK: dict[str, tuple[str, dict[str, Any]]] = {
    "LeNet, 28×28": ("LeNet", {}),
    "AlexNet": ("AlexNet", {}),
    "VGG16, small head": ("VGG16", {"batch_norm": False}),
    "VGG16, large head": ("VGG16", {"batch_norm": False, "head": "large", "outputs": 1000}),
    "ResNet-50": ("ResNet50", {}),
    "WRN-28-10": ("WideResNet", {}),
}

LENET = (
    "The talk has 42 K weights and 23 nodes for LeNet: the 41,640 weights of its dense layers, and its 1 + 6 + 16 channels. "
    "Here all layers count."
)


def capacities(names: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, Capacity]:
    """Name -> capacity of networks (by default those of the talk); `overrides`: "network.key=value" where known."""
    settings = dict(_parse_override(each) for each in overrides)
    asked: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in names} or TALK
    fields = {name: _setting_fields(network_maker(network)) for name, (network, _) in asked.items()}
    for key, value in settings.items():
        if not any(key in mine for mine in fields.values()):
            one_of("a setting of these networks", key, {each for mine in fields.values() for each in mine})
        for mine in fields.values():
            if key in mine:
                check_value(f"network.{key}", value, mine.get(key, Any))
    return {
        name: capacity(_build_on_meta(network, given | {k: v for k, v in settings.items() if k in fields[name]}))
        for name, (network, given) in asked.items()
    }


def _setting_fields(make: NetworkMaker) -> Fields:
    """The settings of a network; any setting if it takes **keywords."""
    kinds = {each.kind for each in inspect.signature(make).parameters.values()}
    return AnyKey(parameter_fields(make)) if inspect.Parameter.VAR_KEYWORD in kinds else parameter_fields(make)


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    section, _, name = key.strip().partition(".")
    if section != "network" or not name or not equals:
        raise ValueError(f"expected network.key=value for --set, got {override!r}; write for example network.depth=18")
    return name, parse_value(value.strip())


def _build_on_meta(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """The network on the meta device (shapes only); with values if it cannot be built there."""
    try:
        with torch.device("meta"):
            return make_network(name, network_maker(name), settings, {})
    except ValueError:  # `built` turns every exception of a constructor into one
        return make_network(name, network_maker(name), settings, {})
