"""Weights that a network uses past the layers that have them, found by running it on inputs.

`order.follow` finds them without any, on symbols; networks whose forward asks for sizes or values cannot be run so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.turns import turn
from dissensus.surgery.conversion import CONVERTIBLE, Cut


def noting_reads(network: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """run(), outputs of the network; cut layers of which it is not known learn whether others use their weights.

    All that were asked for a weight count where one of them is used: a layer that is left unfolded computes the same.
    """
    with turn(network):
        outputs = run()
        unknown = [part for part in network.modules() if isinstance(part, Cut) and part.read_past is None]
        layers = [layer for layer in unknown if isinstance(layer, CONVERTIBLE)]
        used = _used(layers, run) if layers and not bool(outputs.isnan().any()) else []
        for layer in unknown:
            layer.read_past = any(layer is each for each in used)
    return outputs


def _used(layers: Sequence[nn.Module], run: Callable[[], Tensor]) -> Sequence[nn.Module]:
    """The layers that are asked for weights by others, who get NaN, where that is seen in the outputs; else none."""
    asked: list[nn.Module] = []
    with _withheld(layers, asked):
        try:
            return asked if bool(run().isnan().any()) else []
        except Exception:  # whoever looks at the numbers uses them; of which layers, there is no telling
            return layers


@contextmanager
def _withheld(layers: Sequence[nn.Module], asked: list[nn.Module]) -> Iterator[None]:
    kinds = [type(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        layer.__class__ = _withholding(kind, asked)
    try:
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
            vars(layer).pop("inside", None)


def _withholding(kind: type[nn.Module], asked: list[nn.Module]) -> type[nn.Module]:
    """The class, whose instances give their weights to their own forward alone."""

    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        vars(self)["inside"] = True
        try:
            return kind.forward(self, *args, **keywords)
        finally:
            vars(self)["inside"] = False

    def noting(self: nn.Module, name: str) -> Any:
        found = kind.__getattr__(self, name)
        own = name not in ("weight", "bias") or vars(self).get("inside", False)
        if own or not isinstance(found, Tensor):
            return found
        asked.append(self)
        return torch.full_like(found, math.nan)

    return type(kind.__name__, (kind,), {"forward": forward, "__getattr__": noting})
