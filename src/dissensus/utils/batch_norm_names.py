"""Normalisation layers: names of their parameters, which of them keep running statistics, and the names of these."""

from collections.abc import Collection

from torch import Tensor, nn

from dissensus.utils.torch_private import NormBase

NORM_LAYERS = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.CrossMapLRN2d)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def statistics_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer, for every layer that keeps running statistics and averages them with a `momentum`."""
    moving = ((name, layer) for name, layer in network.named_modules() if hasattr(layer, "momentum"))
    return {name: layer for name, layer in moving if isinstance(getattr(layer, "running_mean", None), Tensor)}


def statistics_names(network: nn.Module) -> list[str]:
    """Names of the buffers that hold running statistics."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in statistics_layers(network).items()
        for name in STATISTICS
        if isinstance(getattr(layer, name, None), Tensor)
    ]


def frozen_norms(network: nn.Module, frozen: Collection[str]) -> dict[str, nn.Module]:
    """Name -> layer that has running statistics and whose parameters are all among the frozen names."""
    # tied ones have one name there
    alike = {id(tensor) for name, tensor in network.named_parameters() if name in frozen}
    layers = statistics_layers(network).items()
    held = ((name, layer, [*map(id, layer.parameters())]) for name, layer in layers)
    return {name: layer for name, layer, ids in held if ids and alike.issuperset(ids)}


def norm_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters of normalisation layers: torch's, and any layer that keeps running statistics."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, NORM_LAYERS) or isinstance(getattr(layer, "running_mean", None), Tensor)
        for name, _ in layer.named_parameters(recurse=False)
    }
