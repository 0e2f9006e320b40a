"""The numbers of weights and of nodes of a network, which are the sizes of posteriors over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from dissensus.layers.conversion import convertible_layers
from dissensus.layers.nodes import MODES, Mode, sites_of
from dissensus.utils.checks import one_of


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
    parameters: int  # all parameters of the network, including biases and norm layers
    left: dict[str, str] = field(default_factory=dict)  # layers with parameters but without nodes, and the reason

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

    A node is an input of a linear layer or an input channel of a convolution. No values are read, so the network may be
    on the meta device.

    Args:
        network: any module.
        mode, layers: as in NodeBNN; latents on biases are not counted.

    Returns:
        A `Capacity` with `weights`, `nodes` and `ratio`, in total and by layer.
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
