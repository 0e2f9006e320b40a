"""Layers with random weights and separate noise for every example of a batch.

If examples share one draw of the weights, their gradients share its noise. If every example passes a layer once, the layer
can give each its own draw, with two products instead of one:

    a dense layer, one row per example    N(Wx + b, σ_W² x² + σ_b²): the outputs are drawn (local reparametrisation; Kingma,
                                          Salimans & Welling, NeurIPS 2015)
    positions that share weights          Wx + b + s ∘ (ΔW (r ∘ x) + Δb), ΔW one draw and r, s random signs per example
                                          (flipout; Wen, Vicol, Ba, Tran & Grosse, ICLR 2018)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.layers.conversion import convert_layer, convertible_copy
from dissensus.layers.conversion_report import ConversionReport
from dissensus.layers.factored import Kernel, can_take_kernel, features
from dissensus.layers.nodes import NodeLayer


class WeightSpread(NamedTuple):
    """Means, standard deviations and one draw of the noise for weight and bias of a layer; None is no noise."""

    mean: Kernel
    std: tuple[Tensor | None, Tensor | None]
    drawn: tuple[Tensor | None, Tensor | None]


class PerturbedLayer(NodeLayer):
    """A layer that gives every example its own draw of the weights if `nodes` is a `Spread`; else it is plain."""

    nodes: WeightSpread | None = None  # type: ignore[assignment]

    def forward(self, input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if self.nodes is None:
            return super().forward(input, *args, **keywords)
        (mean, std, drawn), plain = self.nodes, nn.Linear
        outputs = self._with_kernel(mean, input, *args, **keywords)
        if isinstance(self, plain) and input.ndim == 2:
            weight, bias = (None if each is None else each.square() for each in std)
            square = input.square()
            variance = F.linear(square, torch.zeros_like(mean.weight) if weight is None else weight, bias)
            # Inputs that are all 0 have variance 0, where the square root has no derivative.
            deviation = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
            return outputs + deviation * torch.randn_like(deviation)
        r, s = (_signs(len(input), count, input) for count in features(self))
        weight, bias = drawn
        added = Kernel(torch.zeros_like(mean.weight) if weight is None else weight, bias)
        more = self._with_kernel(added, input * self._broadcast_factors(r, input), *args, **keywords)
        return outputs + more * self._broadcast_factors(s, more)


def perturbed_copy(network: nn.Module) -> tuple[nn.Module, ConversionReport]:
    """(a copy of the network whose layers can take noise for every example, the account)."""
    copied, found, account = convertible_copy(network, needed=False)
    for name, layer in found.items():
        if can_take_kernel(layer):
            convert_layer(layer, PerturbedLayer).known_as = name
            kind = "local reparametrisation, over positions flipout" if isinstance(layer, nn.Linear) else "flipout"
            account.converted[name] = f"noise for each example ({kind})"
        else:
            account.left[name] = f"{type(layer).__name__} has its own computation"
    account.left = {name: f"one weight draw per batch: {reason}" for name, reason in account.left.items()}
    return copied, account


def _signs(examples: int, count: int, like: Tensor) -> Tensor:
    """(examples, count) of −1 and 1."""
    return torch.randint(0, 2, (examples, count), device=like.device).to(like.dtype) * 2 - 1
