"""Stacked linear layers the way a CPU likes them.

Under vmap `F.linear` becomes x Wᵀ for every member: a product per member whose transposed operand is slow to read, and a
weight gradient that comes out transposed and must be copied. Written as (W xᵀ)ᵀ the first layer, whose input all members
share, is one large product, and gradients come out as the weights lie. Measured for twenty 784-200-200-200-10 networks
at batch 16 on two cores (`benchmarks/speed.py --cases mlp16`): 33 ms a step became 21.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def stacked_linear(template: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the template's linear layers compute (W xᵀ)ᵀ + b; on a CPU only, GPUs do well without."""
    layers = [m for m in template.modules() if type(m) is nn.Linear] if device.type == "cpu" else []
    layers = [layer for layer in layers if "forward" not in vars(layer)]
    for layer in layers:
        layer.forward = _Transposed(layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Transposed:
    """The forward of one linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        if input.ndim != 2:
            return F.linear(input, self.layer.weight, self.layer.bias)
        product = (self.layer.weight @ input.mT).mT  # (B, O)
        return product if self.layer.bias is None else product + self.layer.bias
