"""Convolutions that wait for what follows: without gradients, bias, batch norm, addition and ReLU become part of their kernel.

Running statistics make batch norm a scale and a shift of channels, which weights and bias take over:

    w r (W ∗ x − m) + b = (w r W) ∗ x + (b − w r m),    r = 1 / √(var + ε).
"""

from typing import Any, cast

import torch
from torch import Tensor

from dissensus.kernels.lazy_tensor import PendingTensor, materialise
from dissensus.kernels.multi_tensor import can_run_kernels
from dissensus.kernels.weight_cache import compute_cached
from dissensus.utils.torch_private import in_function_transform

DEVICE = "cuda"  # "cpu" in tests that interpret the kernels


def lazy_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.conv2d`, but on a GPU waiting if no gradients are recorded, and by own kernels for few channels."""
    x = materialise(input)
    narrow = has_narrow_kernel(x, weight, bias, stride, padding, dilation, groups)
    if narrow and torch.is_grad_enabled():
        return _NarrowConvolution.apply(x, weight, bias, *_per_axis(stride, padding, dilation))  # type: ignore[no-untyped-call]
    plain = x.ndim == weight.ndim == 4 and not isinstance(padding, str) and weight.dtype in KINDS
    plain = plain and not (x.is_inference() or weight.is_inference())  # whether they change could not be told
    usable = torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() or not plain or x.device.type != "cuda" or not usable:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    transformed = in_function_transform()
    if transformed or kind not in KINDS or (x.dtype != kind and not torch.is_autocast_enabled("cuda")):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if x.shape[1] < WIDE and not narrow:
        x = x.contiguous(memory_format=torch.channels_last)  # the layers after it follow
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return PendingConvolution(x, weight, bias, kind, (*_per_axis(stride, padding, dilation), groups), narrow=narrow)


KINDS = (torch.float32, torch.bfloat16)
WIDE = 8  # channels; for fewer cuDNN's kernels are slow
MOST = 128  # numbers under a kernel, for own kernels
LEAST = 2**18  # numbers of the output, for own kernels


def _per_axis(*settings: Any) -> list[list[int]]:
    return [[each, each] if isinstance(each, int) else list(each) * (2 // len(each)) for each in settings]


def has_narrow_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Whether a convolution has kernels of its own: few channels, in mixed precision, no derivative by x."""
    if x.ndim != 4 or weight.ndim != 4 or groups != 1 or x.shape[1] >= WIDE or x.shape[1] != weight.shape[1]:
        return False
    plain = not (isinstance(padding, str) or x.requires_grad or x.is_inference() or weight.is_inference())
    given = [each for each in (x, weight, bias) if each is not None]
    alike = all(each.device == x.device and each.dtype in KINDS for each in given)
    alike = alike and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    fits = weight.shape[1:].numel() <= MOST and x.numel() // x.shape[1] * len(weight) >= LEAST
    if not (plain and alike and fits and x.device.type == DEVICE and torch.is_autocast_enabled(DEVICE)):
        return False
    how = zip(x.shape[2:], weight.shape[2:], *_per_axis(stride, padding, dilation), strict=True)
    # What cannot be computed is for torch to refuse.
    if any(min(step, pad + 1, size + 2 * pad - reach * (kernel - 1)) < 1 for size, kernel, step, pad, reach in how):
        return False
    bf16 = torch.get_autocast_dtype(DEVICE) == torch.bfloat16
    return bf16 and not in_function_transform() and can_run_kernels(x.device)


class _NarrowConvolution(torch.autograd.Function):
    """A convolution by `kernels/triton_first_conv.py`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: list[int]) -> Tensor:
        from dissensus.kernels import triton_first_conv

        ctx.how, ctx.bias = how, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        return triton_first_conv.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from dissensus.kernels import triton_first_conv

        (g,), (x, weight) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():
            raise NotImplementedError("a convolution of few channels has no second derivative")
        g = g.contiguous(memory_format=torch.channels_last)
        by_weight = triton_first_conv.weight_gradient(g, x, weight, *ctx.how).to(weight.dtype)
        by_bias = None if ctx.bias is None else g.sum((0, 2, 3), dtype=torch.float32).to(ctx.bias)
        return None, by_weight, by_bias, None, None, None


class PendingConvolution(PendingTensor):
    """The result of a 2-D convolution without gradients."""

    parts: tuple[Tensor, Tensor, Tensor | None]  # x, weight, bias
    how: tuple[Any, ...]  # stride, padding, dilation, groups
    own_kernel: bool  # whether it is one of few channels

    @staticmethod
    def __new__(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype, how: tuple[Any, ...], *,
        narrow: bool = False,
    ) -> "PendingConvolution":  # fmt: skip
        sizes = zip(x.shape[2:], weight.shape[2:], *how[:3], strict=True)
        axes = [(size + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, reach in sizes]
        shape = torch.Size([len(x), len(weight), *axes])
        self = cast(PendingConvolution, PendingTensor.__new__(cls, shape, kind, x.device, (x, weight, bias)))
        self.parts, self.how, self.own_kernel = (x, weight, bias), how, narrow
        return self

    def compute_result(self, *, relu: bool) -> Tensor:
        x, weight, bias = self.parts
        if not relu:
            return torch.conv2d(x, weight, bias, *self.how)
        kind = self.facts[1]

        def pack_weights(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            shift = weight.new_zeros(len(weight)) if bias is None else bias
            return self._channels_last(weight.to(kind)), shift.to(kind)

        found = compute_cached(("packed", kind), (weight, bias), pack_weights, by_rows=True)
        return self._convolve_relu(*found, None)

    def fold_norm(self, *norm: Any) -> tuple[Tensor, Tensor]:
        """(kernel, bias) that include a batch norm: mean, variance, scale, shift and ε."""
        from dissensus.kernels import norm_launch

        self.check_unchanged()
        (_, weight, bias), (*layer, eps), kind = self.parts, norm, self.facts[1]

        def fold_weights(weight: Tensor, bias: Tensor | None, *layer: Tensor) -> tuple[Tensor, Tensor]:
            mean, variance, scale, shift = layer
            kernel = self._channels_last(weight)
            return norm_launch.fold_norm(kernel, bias, mean, variance, scale, shift, eps, dtype=kind)

        return compute_cached(("folded", eps, kind), (weight, bias, *layer), fold_weights, by_rows=True)

    def compute_norm_relu(self, added: Tensor | None, *norm: Any) -> Tensor:
        """ReLU of the batch norm of this convolution, with a tensor added before ReLU."""
        kernel, shift = self.fold_norm(*norm)
        if isinstance(added, PendingTensor):
            added, more = cast(Any, added).norm_and_shift()
            shift = shift + more
        return self._convolve_relu(kernel, shift, added)

    def norm_and_shift(self, *norm: Any) -> tuple[Tensor, Tensor]:
        """(the batch norm of this convolution without its shift, the shift (C,))."""
        kernel, shift = self.fold_norm(*norm)
        return torch.conv2d(self._packed_input(), kernel, None, *self.how), shift

    def _channels_last(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last)  # as cuDNN's fast kernels read it

    def _packed_input(self) -> Tensor:
        return self._channels_last(self.parts[0].to(self.facts[1]))

    def _convolve_relu(self, weight: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
        if self.own_kernel and added is None:
            from dissensus.kernels import triton_first_conv

            return triton_first_conv.convolution(self.parts[0], weight, bias, *self.how[:3], relu=True)
        if added is None:
            return torch.cudnn_convolution_relu(self._packed_input(), weight, bias, *self.how)
        return torch.cudnn_convolution_add_relu(self._packed_input(), weight, added, 1.0, bias, *self.how)
