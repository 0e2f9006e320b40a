"""How many weights a network has, and how many nodes: what a posterior over the one or over the other has to hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from dissensus.numerics.checks import one_of
from dissensus.surgery.conversion import convertible_layers
from dissensus.surgery.nodes import MODES, Mode, sites_of


class LayerCapacity(NamedTuple):
    weights: int  # without biases; of a tied weight only where it is met first
    nodes: int


@dataclass(frozen=True)
class Capacity:
    """Weights and nodes of a network, layer by layer; `str()` is a table."""

    layers: dict[str, LayerCapacity]
    parameters: int  # all of the network's, biases and norm layers too
    left: dict[str, str] = field(default_factory=dict)  # layers with parameters that have no nodes, and why

    @property
    def weights(self) -> int:
        """Of all layers with nodes."""
        return sum(layer.weights for layer in self.layers.values())

    @property
    def nodes(self) -> int:
        return sum(layer.nodes for layer in self.layers.values())

    @property
    def ratio(self) -> float:
        """Weights for every node."""
        return self.weights / self.nodes

    def __str__(self) -> str:
        rows = {**self.layers, "all": LayerCapacity(self.weights, self.nodes)}
        width = max(len(name) for name in (*rows, "layer"))
        lines = [f"{name or '(itself)':<{width}}  {row.weights:>13,}  {row.nodes:>9,}" for name, row in rows.items()]
        lines += [f"{name or '(itself)':<{width}}  left out: {reason}" for name, reason in self.left.items()]
        return "\n".join([f"{'layer':<{width}}  {'weights':>13}  {'nodes':>9}", *lines])


def capacity(network: nn.Module, *, mode: Mode = "in", layers: Sequence[str] | None = None) -> Capacity:
    """Weights and nodes of a network, by the rule that NodeBNN has for its latents.

    A node is an input of a linear layer or an input channel of a convolution. No values are read: a network on the meta
    device will do.

    Args:
        mode, layers: as NodeBNN's, whose latents without those on biases these nodes are.
    """
    one_of("mode", mode, MODES)
    found, account = convertible_layers(network, layers=layers)
    counted, seen = {}, set[int]()
    for name, layer in found.items():
        weight = layer.weight
        weights = 0 if id(weight) in seen else weight.numel()  # type: ignore[operator]
        seen.add(id(weight))
        counted[name] = LayerCapacity(weights, sum(site.width for site in sites_of(name, layer, mode)))
    return Capacity(counted, sum(parameter.numel() for parameter in network.parameters()), account.left)
