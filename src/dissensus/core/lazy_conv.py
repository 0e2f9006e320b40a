"""Convolutions that wait for what follows: without gradients, bias, batch norm, addition and ReLU become part of their kernel.

Running statistics make batch norm a scale and a shift of channels, which weights and bias take over:

    w r (W ∗ x − m) + b = (w r W) ∗ x + (b − w r m),    r = 1 / √(var + ε).
"""

from typing import Any, cast

import torch
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
    plain = plain and not (x.is_inference() or weight.is_inference())  # whether they change could not be told
    usable = torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() or not plain or x.device.type != "cuda" or not usable:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or kind not in KINDS or (x.dtype != kind and not torch.is_autocast_enabled("cuda")):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if x.shape[1] < WIDE:
        x = x.contiguous(memory_format=torch.channels_last)  # the layers after it follow
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    how: list[Any] = [
        [each, each] if isinstance(each, int) else list(each) * (2 // len(each)) for each in (stride, padding, dilation)
    ]
    return PendingConvolution(x, weight, bias, kind, (*how, groups))


KINDS = (torch.float32, torch.bfloat16)
WIDE = 8  # channels; for fewer cuDNN's kernels with ReLU are slow


class PendingConvolution(Pending):
    """The result of a 2-D convolution without gradients."""

    parts: tuple[Tensor, Tensor, Tensor | None]  # x, weight, bias
    how: tuple[Any, ...]  # stride, padding, dilation, groups

    @staticmethod
    def __new__(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype, how: tuple[Any, ...]
    ) -> "PendingConvolution":  # fmt: skip
        sizes = zip(x.shape[2:], weight.shape[2:], *how[:3], strict=True)
        axes = [(size + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, reach in sizes]
        self = cast(
            PendingConvolution,
            Pending.__new__(cls, torch.Size([len(x), len(weight), *axes]), kind, x.device, (x, weight, bias)),
        )
        self.parts, self.how = (x, weight, bias), how
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

    def folded(self, *norm: Any) -> tuple[Tensor, Tensor]:
        """(kernel, bias) that include a batch norm: mean, variance, scale, shift and ε."""
        from dissensus.numerics import norms

        self.check_unchanged()
        (_, weight, bias), kind = self.parts, self.facts[1]
        return derived(
            ("folded", norm[-1], kind),
            (weight, bias, *norm[:-1]),
            lambda: norms.folded(self._packed(weight), bias, *norm, dtype=kind),
        )

    def normalised(self, added: Tensor | None, *norm: Any) -> Tensor:
        """ReLU of the batch norm of this convolution, with a tensor added before ReLU."""
        kernel, shift = self.folded(*norm)
        if isinstance(added, Pending):
            added, more = cast(Any, added).branch()
            shift = shift + more
        return self._rectified(kernel, shift, added)

    def scaled(self, *norm: Any) -> tuple[Tensor, Tensor]:
        """(the batch norm of this convolution without its shift, the shift (C,))."""
        kernel, shift = self.folded(*norm)
        return torch.conv2d(self._input(), kernel, None, *self.how), shift

    def _packed(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last)  # as cuDNN's fast kernels read it

    def _input(self) -> Tensor:
        return self._packed(self.parts[0].to(self.facts[1]))

    def _rectified(self, weight: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
        if added is None:
            return torch.cudnn_convolution_relu(self._input(), weight, bias, *self.how)
        return torch.cudnn_convolution_add_relu(self._input(), weight, added, 1.0, bias, *self.how)
