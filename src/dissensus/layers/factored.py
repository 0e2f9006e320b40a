"""Layers with factors: s ∘ (W (r ∘ x) + b·c), r for inputs, s for outputs, c a scalar on the bias.

A convolution has one factor per channel. Factors may differ between examples; one set for all examples can be folded into
weight and bias, which gives an ordinary layer.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.kernels import channel_launch as kernels
from dissensus.layers.conversion import CONVOLUTIONS, DENSE, TRANSPOSED, ConvertedLayer, TransposedLinear, convert_layer
from dissensus.utils.torch_private import convolve, is_transformed, output_padding


def scale_channels(x: Tensor, factors: Tensor, *, alone: bool) -> Tensor:
    """x times factors that broadcast with it. `alone`: only one layer uses the product, so its gradient may be overwritten."""
    # Compiled code fuses this by itself; and dividing by factors as large as x costs as much as keeping x.
    if torch.compiler.is_compiling() or factors.shape == x.shape or not torch.is_grad_enabled():
        return x * factors
    return _ScaleChannels.apply(x, factors, alone)  # type: ignore[no-untyped-call]


class _ScaleChannels(torch.autograd.Function):
    """y = x ∘ s that saves y, which the next layer saves as well, while autograd would also save x.

    With g = ∂L/∂y:  ∂L/∂x = g ∘ s,  ∂L/∂s = Σ g ∘ x = (Σ g ∘ y) / s.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factors: Tensor, alone: bool) -> Tensor:
        at = _layout(x, factors)
        return x * factors if at is None else kernels.multiply_channels(x, factors.flatten(1), at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.alone = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g,), (y, factors) = gradients, ctx.saved_tensors
        at = _layout(y, factors)
        if at is not None and not torch.is_grad_enabled():
            product, total = kernels.multiply_backward(kernels.match_layout(g, y), y, factors.flatten(1), at)
            return product, total.reshape(factors.shape), None
        for_x = for_factors = None
        if ctx.needs_input_grad[1]:
            total = (g * y).sum_to_size(factors.shape)
            # 0/0 would occur for at most one number in 2^24.
            for_factors = torch.where(factors == 0, 0.0, total / factors)
        if ctx.needs_input_grad[0]:
            # In place if no other code can hold g: the next layer has just made it, and it needs no graph.
            for_x = g.mul_(factors) if ctx.alone and not torch.is_grad_enabled() else g * factors
        return for_x, for_factors, None


def _layout(x: Tensor, factors: Tensor) -> kernels.Layout | None:
    """Memory layout of x for a kernel, with factors (N, C, 1, ...) or (N, 1, ..., C); None if no kernel can run."""
    if factors.ndim != x.ndim or len(factors) != len(x) or is_transformed(factors):
        return None
    last = factors.shape[1:] != (x.shape[1], *[1] * (x.ndim - 2))
    if last and factors.shape[1:] != (*[1] * (x.ndim - 2), x.shape[-1]):
        return None
    return kernels.channel_layout(x, channels_last=last)


class Factors(NamedTuple):
    """Factors of one layer, each (N, C) for N examples or (C,) for all; None is no factor."""

    before: Tensor | None = None  # r, on inputs
    bias: Tensor | None = None  # c, (N, 1) or (1,)
    behind: Tensor | None = None  # s, on outputs


class Kernel(NamedTuple):
    """Weight and bias of one layer with factors folded in that are the same for all examples."""

    weight: Tensor
    bias: Tensor | None


class FactoredLayer(ConvertedLayer):
    """A linear or convolutional layer that multiplies its inputs and outputs by factors; without factors it is plain.

    Factors (C,) of a convolution are folded into its kernel at every call, because the kernel is smaller than the
    activations. In dense layers, and if all members run in one product (`members_at_once`, set when members are
    vectorised), factors act on activations, so that one kernel serves all. The two agree up to rounding.
    """

    weight: Tensor
    bias: Tensor | None
    known_as: str = ""  # the layer's name, for errors
    members_at_once: bool = False
    # Whether others modify the outputs in place, as in-place activations do; assumed until checked.
    rewritten: bool = True

    def factors(self) -> Factors | Kernel | None:
        raise NotImplementedError

    def forward(self, input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        factors = self.factors()
        if factors is None:
            return super().forward(input, *args, **keywords)
        if isinstance(factors, Kernel):
            return self._with_kernel(factors, input, *args, **keywords)
        before, scalar, behind = factors
        given = before if before is not None else behind if behind is not None else scalar
        each = given is not None and given.ndim > 1  # whether every example has its own
        if not (each or self.members_at_once or isinstance(self, DENSE)):
            return self._with_kernel(folded_kernel(self, factors), input, *args, **keywords)
        # `scale_channels` has a short backward pass, which reads the unchanged product and has no gradient for a factor of
        # 0: so it is used for factors per example, which are random numbers, and not for factors shared by all examples.
        if before is not None:
            across = self._broadcast_factors(before, input)
            input = scale_channels(input, across, alone=True) if each else input * across
        outputs: Tensor = super().forward(input, *args, **keywords)
        if scalar is not None and self.bias is not None:
            outputs = outputs + self._broadcast_factors(self.bias * (scalar - 1), outputs)
        if behind is not None:
            across = self._broadcast_factors(behind, outputs)
            outputs = scale_channels(outputs, across, alone=False) if each and not self.rewritten else outputs * across
        return outputs

    def fold(self) -> None:
        """Folds the factors into weight and bias, as new parameters: the old ones may be tied to an embedding."""
        factors = self.factors()
        kernel = factors if isinstance(factors, Kernel) else folded_kernel(self, factors or Factors())
        for name, new in kernel._asdict().items():
            if new is not None:
                old = getattr(self, name)
                setattr(self, name, nn.Parameter(new.detach().clone(), requires_grad=old.requires_grad))

    def _with_kernel(self, kernel: Kernel, input: Tensor, output_size: Any = None) -> Tensor:
        """The plain layer's output with this weight and bias in place of its own."""
        layer: Any = self
        if isinstance(self, nn.Linear):
            return F.linear(input, *kernel)
        if not isinstance(self, TRANSPOSED):
            return convolve(layer, input, *kernel)
        places = kernel.weight.ndim - 2
        settings = (layer.stride, layer.padding, layer.kernel_size, places, layer.dilation)
        padding = output_padding(layer, input, output_size, *settings)
        function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[places - 1]
        return function(input, *kernel, layer.stride, layer.padding, padding, layer.groups, layer.dilation)

    def _broadcast_factors(self, factors: Tensor, x: Tensor) -> Tensor:
        """Factors (N, C) in a shape that broadcasts with x (N, C, ...), or (N, ..., C) if features are last."""
        factors, dense = factors.to(x.dtype), isinstance(self, DENSE)
        space = 0 if dense else len(self.kernel_size)  # type: ignore[arg-type]
        if factors.ndim == 1:  # one set for all examples, on any axis
            return factors if dense else factors.view(-1, *[1] * space)
        examples, width = factors.shape
        between = x.ndim - 2
        if between < 0 or len(x) != examples or (not dense and between != space):
            wanted = f"the {examples} examples of the batch on the first axis of layer {self.known_as!r}"
            got, hint = tuple(x.shape), "latents are drawn for each example: exclude this layer with layers=[...]"
            raise ValueError(f"expected {wanted}, got a tensor of shape {got}; {hint}")
        shape = (examples, *[1] * between, width) if dense else (examples, width, *[1] * between)
        return factors.reshape(shape)


def features(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer, channels of a convolution."""
    if isinstance(layer, TransposedLinear):
        return layer.nx, layer.nf
    kind = "features" if isinstance(layer, DENSE) else "channels"
    return getattr(layer, f"in_{kind}"), getattr(layer, f"out_{kind}")


def can_take_kernel(layer: nn.Module) -> bool:
    """Whether the layer can compute with a given `Kernel`."""
    return isinstance(layer, (nn.Linear, *CONVOLUTIONS))


def folded_kernel(layer: Any, factors: Factors) -> Kernel:
    """Weight and bias of a plain layer equal to this layer with these factors, each (C,)."""
    before, scalar, behind = factors
    weight, bias, transposed = layer.weight, layer.bias, isinstance(layer, (*TRANSPOSED, TransposedLinear))
    groups, space = getattr(layer, "groups", 1), [1] * (weight.ndim - 2)
    # Rows are outputs, except in transposed convolutions and Conv1D, where they are inputs; columns count within their group.
    for each, rows in ((before, transposed), (behind, not transposed)):
        if each is not None and rows:
            weight = weight * each.reshape(-1, 1, *space)
        elif each is not None:
            spread = each.reshape(groups, -1, *space)
            weight = weight * (spread if groups == 1 else spread.repeat_interleave(len(weight) // groups, dim=0))
    if bias is not None and scalar is not None:
        bias = bias * scalar
    if bias is not None and behind is not None:
        bias = bias * behind
    return Kernel(weight, bias)


class ModulatedLayer(FactoredLayer):
    """A layer with factors r on its inputs and s on its outputs, the same for all examples; None is no factor.

    s also multiplies the bias: so Wen et al.'s r, s are the talk's u, v, whose v acts on z = xW + b.
    """

    added = ("r", "s", "members_at_once")
    r: Tensor | None
    s: Tensor | None

    def factors(self) -> Factors:
        return Factors(self.r, None, self.s)

    def report_entry(self) -> str:
        kind = "channel" if self.weight.ndim > 2 else "unit"
        factors = [f"{name} ({len(f)})" for name, f in (("r", self.r), ("s", self.s)) if f is not None]
        return f"{' and '.join(factors)}, one for each {kind}" if factors else "nothing"


def modulate_layer(layer: nn.Module, *, inputs: bool, outputs: bool, trained: bool) -> ModulatedLayer:
    """The layer itself, converted, with factors 1 on its inputs and outputs; parameters if trained, else buffers."""
    made = convert_layer(layer, ModulatedLayer)
    for name, wanted, size in zip(("r", "s"), (inputs, outputs), features(layer), strict=True):
        factor = made.weight.detach().new_ones(size) if wanted else None
        if trained:
            made.register_parameter(name, None if factor is None else nn.Parameter(factor))
        else:
            made.register_buffer(name, factor)
    vars(made)["members_at_once"] = False  # the attribute by which vectorising code finds the layer
    return made
