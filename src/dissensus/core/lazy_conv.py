"""Convolutions that wait for what follows: without gradients, bias, batch norm, addition and ReLU become part of their kernel.

Running statistics make batch norm a scale and a shift of channels, which weights and bias take over:

    w r (W ∗ x − m) + b = (w r W) ∗ x + (b − w r m),    r = 1 / √(var + ε).
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.core.kept import derived
from dissensus.core.pending import Pending, settled


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.conv2d`, but waiting on a GPU if no gradients are recorded."""
    x = settled(input)
    plain = x.ndim == weight.ndim == 4 and not isinstance(padding, str) and weight.dtype in KINDS
    if torch.is_grad_enabled() or not plain or x.device.type != "cuda" or not torch.backends.cudnn.is_available():
        x, weight = widened(x, weight) if groups == 1 else (x, weight)
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or kind not in KINDS or (x.dtype != kind and not torch.is_autocast_enabled("cuda")):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    how = [
        [each, each] if isinstance(each, int) else list(each) * (2 // len(each)) for each in (stride, padding, dilation)
    ]
    return PendingConvolution(x, weight, bias, kind, *how, groups)


def widened(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same convolution with channels of zeros, if x has few: in half precision, GPUs are twice as fast with eight."""
    if x.ndim != 4 or x.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return x, weight
    return wide(x), wide(weight)


def wide(tensor: Tensor) -> Tensor:
    """With channels of zeros, if it has few."""
    few = WIDE - tensor.shape[1]
    return F.pad(tensor, (0, 0, 0, 0, 0, few)) if few > 0 else tensor


KINDS = (torch.float32, torch.bfloat16)
WIDE = 8


class PendingConvolution(Pending):
    """The result of a 2-D convolution without gradients."""

    parts: tuple[Tensor, Tensor, Tensor | None]  # x, weight, bias
    how: tuple[Any, ...]  # stride, padding, dilation, groups

    @staticmethod
    def __new__(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype, stride: list[int], padding: list[int],
        dilation: list[int], groups: int,
    ) -> "PendingConvolution":  # fmt: skip
        sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        axes = [(size + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, reach in sizes]
        self = cast(PendingConvolution, Pending.__new__(cls, torch.Size([len(x), len(weight), *axes]), kind, x.device))
        self.parts, self.how = (x, weight, bias), (stride, padding, dilation, groups)
        return self

    def computed(self, *, relu: bool) -> Tensor:
        x, weight, bias = self.parts
        if not relu:
            return torch.conv2d(x, weight, bias, *self.how)
        kind = self.facts[1]

        def packed() -> tuple[Tensor, Tensor]:
            shift = weight.new_zeros(len(weight)) if bias is None else bias
            return self._packed(weight.to(kind)), shift.to(kind)

        found = derived(("packed", kind), (weight, bias), packed)
        return self._rectified(*found, None)

    def normalised(
        self, added: Tensor | None, mean: Tensor, variance: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> Tensor:
        """ReLU of the batch norm of this convolution, with a tensor added before ReLU."""
        from dissensus.numerics import norm_kernels

        _, weight, bias = self.parts
        others, kind = (bias, mean, variance, scale, shift), self.facts[1]

        def folded() -> tuple[Tensor, Tensor]:
            return norm_kernels.folded(self._packed(weight), *others, eps, kind)

        return self._rectified(*derived(("folded", eps, kind), (weight, *others), folded), added)

    def _packed(self, tensor: Tensor) -> Tensor:
        """As cuDNN's fast kernels read it; for those of few channels it would choose slow ones."""
        tensor = wide(tensor) if self.how[-1] == 1 else tensor
        return tensor.contiguous(memory_format=torch.channels_last)

    def _rectified(self, weight: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
        x = self._packed(self.parts[0].to(self.facts[1]))
        if added is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *self.how)
        return torch.cudnn_convolution_add_relu(x, weight, added, 1.0, bias, *self.how)
