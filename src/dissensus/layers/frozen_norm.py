"""Batch norm with frozen statistics and trained scale and shift, in one pass over the activations each way."""

from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.member import Member
from dissensus.layers import channel_launch as kernels
from dissensus.layers.conversion import ConvertedLayer, convert_layer
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.torch_private import is_transformed

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class FrozenNorm(ConvertedLayer):
    """A batch norm that uses one kernel each way in eval mode on a GPU with gradients; otherwise torch's forward."""

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        tensors = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        wanted = torch.is_grad_enabled() and not self.training and not torch.compiler.is_compiling()
        if not wanted or kernels.channel_layout(input) is None or any(each is None for each in tensors):
            return super().forward(input)  # type: ignore[no-any-return]
        if is_transformed(*tensors) or input.shape[1] != len(layer.weight):  # a kernel would read past the end
            return super().forward(input)  # type: ignore[no-any-return]
        layer._check_input_dim(input)
        normed: Tensor = _NormaliseFunction.apply(input, *tensors, layer.eps)  # type: ignore[no-untyped-call]
        return normed


def freeze_norms(member: Member) -> None:
    """Freezes the statistics of the member's norm layers in training; torch's batch norms are converted."""
    layers = statistics_layers(member)
    member.always_eval = sorted({*member.always_eval, *layers})
    for layer in layers.values():
        if type(layer) in NORMS and "forward" not in vars(layer):
            convert_layer(layer, FrozenNorm)


class _NormaliseFunction(torch.autograd.Function):
    """y = (x − μ) / √(σ² + ε) · w + b, with μ and σ² constant."""

    @staticmethod
    def forward(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        at = kernels.channel_layout(x)
        assert at is not None
        return kernels.normalise_channels(x, mean, var, weight, bias, eps, at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mean, var, weight, _, eps = inputs
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, mean, var, weight) = gradients, ctx.saved_tensors
        at = kernels.channel_layout(x)
        if at is not None and not torch.is_grad_enabled():
            for_x, *others = kernels.normalise_backward(kernels.match_layout(g, x), x, mean, var, weight, ctx.eps, at)
            return for_x, None, None, *others, None
        shape = (-1, *[1] * (x.ndim - 2))  # written out, for second derivatives
        inverse = torch.rsqrt(var + ctx.eps).reshape(shape)
        places = [axis for axis in range(x.ndim) if axis != 1]
        for_weight = (g * (x - mean.reshape(shape)) * inverse).sum(places)
        return g * weight.reshape(shape) * inverse, None, None, for_weight, g.sum(places), None
