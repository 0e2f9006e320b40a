"""Layers with latents on their nodes: factors on inputs and outputs that a posterior sets from outside.

In a convolution a node is a channel. In training, latents differ between examples. `capacity` counts nodes and weights.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dissensus.layers import conversion
from dissensus.layers.call_order import trace_calls
from dissensus.layers.factored import FactoredLayer, Factors, Kernel, features
from dissensus.utils.checks import one_of
from dissensus.utils.torch_private import in_backward_pass, version_of

Mode = Literal["in", "out", "both"]
MODES = get_args(Mode)
WORDS = {"before": "input nodes", "bias": "the bias", "behind": "output nodes"}


class NodeLayer(FactoredLayer):
    """A layer that multiplies its nodes by given latents; without latents it is plain."""

    added = ("nodes", "known_as", "seen", "rewritten")
    nodes: Factors | Kernel | None = None
    seen: list[tuple[Tensor, int]] | None = None  # outputs and their versions, inside `record_outputs`

    def factors(self) -> Factors | Kernel | None:
        return self.nodes

    def forward(self, input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        # In a backward pass, activation checkpointing would run the layer again without its latents.
        if self.nodes is None and torch.is_grad_enabled() and not torch.compiler.is_compiling() and in_backward_pass():
            got = f"{self.known_as!r} run again in the backward pass, without its noise"
            hint = "remove activation checkpointing, or exclude this layer with layers=[...], if possible"
            raise ValueError(f"expected a layer that runs only in the forward pass, got {got}; {hint}")
        outputs = super().forward(input, *args, **keywords)
        if self.seen is not None:
            self.seen.append((outputs, _count_writes(outputs)))
        return outputs


@dataclass(frozen=True)
class Site:
    """The place of latents in a layer, and their number."""

    layer: str
    part: str  # a field of Factors
    width: int


class NodeNetwork(NamedTuple):
    """A copy of a network whose layers take latents, the sites of these latents, and the account."""

    network: nn.Module
    sites: tuple[Site, ...]
    account: conversion.ConversionReport

    @property
    def latents(self) -> int:
        return sum(site.width for site in self.sites)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of latents of each layer."""
        found: Counter[str] = Counter()
        for site in self.sites:
            found[site.layer] += site.width
        return tuple(found.values())


def add_node_latents(
    network: nn.Module, mode: Mode, *, bias: bool = False, layers: Sequence[str] | None = None
) -> NodeNetwork:
    """The network with latents on the nodes of its linear and convolutional layers; arguments as in `NodeBNN`."""
    one_of("mode", mode, MODES)
    copied, found, account = conversion.convertible_copy(network, layers=layers)
    followed = trace_calls(copied, list(found))
    sites: list[Site] = []
    for name, layer in found.items():
        mine = sites_of(name, layer, mode, bias=bias)
        sites += mine
        noded = conversion.convert_layer(layer, NodeLayer)
        noded.known_as = name
        words = ", ".join(f"{site.width} on {WORDS[site.part]}" for site in mine)
        account.converted[name] = f"latents: {words}{conversion.note_direct_reads(name, noded, followed)}"
    return NodeNetwork(copied, tuple(sites), account)


def sites_of(name: str, layer: nn.Module, mode: Mode, *, bias: bool = False) -> list[Site]:
    """The sites of latents in one layer; arguments as in `add_node_latents`."""
    inputs, outputs = features(layer)
    return [
        *([Site(name, "before", inputs)] if mode != "out" else []),
        *([Site(name, "bias", 1)] if bias and layer.bias is not None else []),
        *([Site(name, "behind", outputs)] if mode != "in" else []),
    ]


def split_by_layer(sites: Sequence[Site], latents: Tensor) -> dict[str, Factors]:
    """Layer -> its part of the latents (..., D)."""
    found: dict[str, Factors] = {}
    for site, part in zip(sites, latents.split_with_sizes([site.width for site in sites], dim=-1), strict=True):
        found[site.layer] = found.get(site.layer, Factors())._replace(**{site.part: part})
    return found


def use_latents(network: nn.Module, nodes: Mapping[str, Factors | Kernel]) -> AbstractContextManager[None]:
    """Inside, these layers multiply by these latents."""
    return set_temporarily([network.get_submodule(name) for name in nodes], "nodes", nodes.values())


def record_outputs(layers: Sequence[NodeLayer]) -> AbstractContextManager[None]:
    """Inside, the layers collect their outputs for batches with latents per example in `seen`, empty at first."""
    return set_temporarily(layers, "seen", [[] for _ in layers])


@contextmanager
def set_temporarily(layers: Sequence[nn.Module], attribute: str, values: Iterable[Any]) -> Iterator[None]:
    """Inside, the layers have these values of an attribute; afterwards that of their class."""
    for layer, value in zip(layers, values, strict=True):
        vars(layer)[attribute] = value  # avoids nn.Module.__setattr__, which costs as much as a kernel launch
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop(attribute, None)


def has_changed_output(layer: NodeLayer) -> bool:
    """Whether the output of a watched layer was modified in place."""
    return any(_count_writes(outputs) != version for outputs, version in layer.seen or ())


def _count_writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)  # inference tensors count no versions


class LayerCapacity(NamedTuple):
    weights: int  # without biases; a tied weight counts in its first layer only
    nodes: int


@dataclass(frozen=True)
class Capacity:
    """Weights and nodes of a network, layer by layer; made by `capacity`. `str()` is a table.

    Args:
        layers: name of a layer -> its numbers of weights and nodes.
        parameters: number of all parameters of the network, including biases and norm layers.
        left: name of a layer with parameters but without nodes -> the reason.
    """

    layers: dict[str, LayerCapacity]
    parameters: int
    left: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """Number of weights of all layers with nodes."""
        return sum(layer.weights for layer in self.layers.values())

    @property
    def nodes(self) -> int:
        return sum(layer.nodes for layer in self.layers.values())

    @property
    def ratio(self) -> float:
        """Weights per node."""
        return self.weights / self.nodes

    def __str__(self) -> str:
        rows = {**self.layers, "all": LayerCapacity(self.weights, self.nodes)}
        width = max(len(name) for name in (*rows, "layer"))
        lines = [f"{name or '(itself)':<{width}}  {row.weights:>13,}  {row.nodes:>9,}" for name, row in rows.items()]
        lines += [f"{name or '(itself)':<{width}}  left out: {reason}" for name, reason in self.left.items()]
        return "\n".join([f"{'layer':<{width}}  {'weights':>13}  {'nodes':>9}", *lines])


def capacity(network: nn.Module, *, mode: Mode = "in", layers: Sequence[str] | None = None) -> Capacity:
    """Counts weights and nodes of a network; the nodes are those on which NodeBNN puts its latents.

    A node is an input of a linear layer or an input channel of a convolution. The network may be on the meta device.

    Args:
        network: any module.
        mode, layers: as in NodeBNN; latents on biases are not counted.
    """
    one_of("mode", mode, MODES)
    found, account = conversion.convertible_layers(network, layers=layers)
    counted, seen = {}, set[int]()
    for name, layer in found.items():
        weight = layer.weight
        weights = 0 if id(weight) in seen else weight.numel()  # type: ignore[operator]
        seen.add(id(weight))
        counted[name] = LayerCapacity(weights, sum(site.width for site in sites_of(name, layer, mode)))
    return Capacity(counted, sum(parameter.numel() for parameter in network.parameters()), account.left)
