"""Checks that networks have one architecture, and different weights, to be members of one ensemble."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dissensus.numerics.divided import is_divided, joined


def check_same_architecture(networks: Sequence[nn.Module]) -> None:
    """Raises if the networks do not have one architecture."""
    first = _signature(networks[0])
    for i, network in enumerate(networks[1:], start=1):
        if (other := _signature(network)) != first:
            difference = next(
                (f"{name}: {first.get(name, 'absent')} in member 0, {other.get(name, 'absent')} in member {i}")
                for name in {**first, **other}
                if first.get(name) != other.get(name)
            )
            raise ValueError(f"expected members of one architecture, got {difference}; build all members the same way")


def _signature(network: nn.Module) -> dict[str, str]:
    """What must be equal in all members: layers with their settings, tensors with shape, dtype, ties and requires_grad."""
    described = {f"layer '{name}'": f"{type(m).__name__}({m.extra_repr()})" for name, m in network.named_modules()}
    first_name: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        tied = first_name.setdefault(id(parameter), name)
        described[f"parameter '{name}'"] = (
            f"{tuple(parameter.shape)} {parameter.dtype}"
            + ("" if parameter.requires_grad else " frozen")
            + ("" if tied == name else f" tied to {tied}")
        )
    for name, buffer in network.named_buffers():
        described[f"buffer '{name}'"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    return described


def check_distinct_weights(networks: Sequence[nn.Module]) -> None:
    """Raises if two members start at exactly the same trainable weights, because they would stay equal."""
    flat = [
        torch.cat([_numbers(p.detach()) for p in n.parameters() if p.requires_grad] or [torch.empty(0)])
        for n in networks
    ]
    alike: dict[complex, list[int]] = {}  # by sums, which are equal for equal vectors, so that few pairs are compared
    for i, vector in enumerate(flat):
        others = alike.setdefault(vector.sum().item(), [])
        for j in others:
            if vector.numel() and torch.equal(vector, flat[j]):
                raise ValueError(
                    f"expected members that start at different weights, got members {j} and {i} equal; "
                    "initialise each one separately, [make() for _ in range(M)], instead of copying one"
                )
        others.append(i)


def _numbers(parameter: Tensor) -> Tensor:
    """(K,) its entries; where processes have parts of it, their sum: networks are never whole together."""
    return joined(parameter).sum()[None] if is_divided(parameter) else parameter.flatten()
