"""Modulated layers: s ∘ (W (r ∘ x) + b), a factor for each input and each output, for each channel of a convolution."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.surgery.conversion import DENSE, TRANSPOSED, Cut, cut
from dissensus.surgery.nodes import Kernel, Nodes, folded_tensors


class Modulated(Cut):
    """A linear or convolutional layer with factors r of its inputs and s of its outputs; None where there are none.

    s multiplies the bias too: so Wen et al.'s r, s are the talk's u, v, whose v acts on z = xW + b.

    Where all members run in one product (`members_at_once`, set by those who vectorise), the factors act on activations:
    the kernel stays one for all. Where members run one after the other, a dense layer still does so, and a convolution
    modulates its kernel, which is smaller than what passes it. The two agree to rounding.
    """

    added = ("r", "s", "members_at_once")
    members_at_once: bool
    weight: Tensor
    bias: Tensor | None
    r: Tensor | None
    s: Tensor | None

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.members_at_once or isinstance(self, DENSE):
            outputs: Tensor = super().forward(self._times(input, self.r), *args, **kwargs)
            return self._times(outputs, self.s)
        weight, bias = self.kernel()
        if isinstance(self, TRANSPOSED):
            return self._transposed(input, weight, bias, *args, **kwargs)
        return self._conv_forward(input, weight, bias)  # type: ignore[no-any-return, operator]

    def kernel(self) -> Kernel:
        return folded_tensors(self, self.weight, self.bias, Nodes(before=self.r, behind=self.s))

    def done(self) -> str:
        kind = "channel" if self.weight.ndim > 2 else "unit"
        factors = [f"{name} ({len(f)})" for name, f in (("r", self.r), ("s", self.s)) if f is not None]
        return f"{' and '.join(factors)}, one for each {kind}" if factors else "nothing"

    def _times(self, x: Tensor, factor: Tensor | None) -> Tensor:
        if factor is None:
            return x
        return x * factor.to(x.dtype).view(-1, *[1] * (self.weight.ndim - 2))

    def _transposed(self, input: Tensor, weight: Tensor, bias: Tensor | None, output_size: Any = None) -> Tensor:
        places = weight.ndim - 2
        layer: Any = self
        padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, places, layer.dilation
        )
        function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[places - 1]
        return function(  # type: ignore[no-any-return]
            input, weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation
        )


def modulated(layer: nn.Module, *, inputs: bool, outputs: bool, trained: bool) -> Modulated:
    """The layer itself, cut, with neutral factors (1): of its inputs, of its outputs; parameters if trained, else buffers."""
    sizes = features(layer)
    layer = cut(layer, Modulated)
    assert isinstance(layer, Modulated)
    for name, wanted, size in zip(("r", "s"), (inputs, outputs), sizes, strict=True):
        factor = layer.weight.detach().new_ones(size) if wanted else None
        if trained:
            layer.register_parameter(name, None if factor is None else nn.Parameter(factor))
        else:
            layer.register_buffer(name, factor)
    vars(layer)["members_at_once"] = False
    return layer


def features(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer, channels of a convolution."""
    kinds = ("in_features", "out_features") if isinstance(layer, DENSE) else ("in_channels", "out_channels")
    return getattr(layer, kinds[0]), getattr(layer, kinds[1])
