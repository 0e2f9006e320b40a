"""Weights that a network uses past the layers that have them, found by running it on inputs.

`order.follow` finds them without any, on symbols; networks whose forward asks for sizes or values cannot be run so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.turns import turn
from dissensus.surgery.conversion import Cut


def noting_reads(network: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """run(), outputs of the network; cut layers of which it is not known learn whether others use their weights."""
    with turn(network):
        outputs = run()
        unknown = [part for part in network.modules() if isinstance(part, Cut) and part.read_past is None]
        some = bool(unknown) and _used(network, unknown, run, outputs)
        for layer in unknown:
            layer.read_past = some and _used(network, [layer], run, outputs)
    return outputs


def _used(network: nn.Module, layers: Sequence[nn.Module], run: Callable[[], Tensor], outputs: Tensor) -> bool:
    """Whether outputs are others where all but the layers themselves find NaN in place of the layers' weights and biases."""
    held: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def withhold(layer: nn.Module, *_: Any) -> None:
        held[layer] = {name: layer._parameters[name] for name in ("weight", "bias")}
        for name, tensor in held[layer].items():
            layer._parameters[name] = None if tensor is None else torch.full_like(tensor, math.nan)  # type: ignore[assignment]

    def give(layer: nn.Module, *_: Any) -> None:
        layer._parameters.update(held[layer])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(network.register_forward_pre_hook(lambda *_, layer=layer: withhold(layer)))
            hooks.enter_context(layer.register_forward_pre_hook(give))
            hooks.enter_context(layer.register_forward_hook(withhold, prepend=True, always_call=True))
            hooks.enter_context(network.register_forward_hook(lambda *_, layer=layer: give(layer), always_call=True))
        try:
            return not torch.equal(run(), outputs)
        except Exception:  # whoever looks at the numbers uses them
            return True
