"""Which layers all that becomes of a network's inputs passes: the links of a chain, and not of a way beside another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from dissensus.surgery.order import Followed


def passed(network: nn.Module, layers: Sequence[str], followed: Followed | None) -> set[str]:
    """Those of these layers through which every way from the inputs to the outputs leads; none where there is no telling.

    Layers that give the network's outputs count as one.
    """
    if followed is None or "" in layers:  # "": the network is itself the layer
        return {name for name in layers if followed is not None}

    def places(name: str) -> set[fx.Node]:
        return {node for node, called in followed.places.items() if name in called}

    heads = {node for name in followed.outputs for node in places(name)}
    cuts = {name: heads if name in followed.outputs else places(name) for name in layers if _looked_into(network, name)}
    return {name for name, nodes in cuts.items() if nodes and not _reaches_inputs(followed.last, nodes)}


def _looked_into(network: nn.Module, name: str) -> bool:
    """Whether the layer is called by a forward that is followed, not inside a layer of torch's own."""
    while name:
        name = name.rpartition(".")[0]
        part = network.get_submodule(name)
        opened = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if type(part).__module__.startswith("torch.nn") and not opened:
            return False
    return True


def _reaches_inputs(outputs: list[fx.Node], without: set[fx.Node]) -> bool:
    left, seen = list(outputs), set(without)
    while left:
        node = left.pop()
        if node in seen:
            continue
        if node.op == "placeholder":
            return True
        seen.add(node)
        left.extend(node.all_input_nodes)
    return False
