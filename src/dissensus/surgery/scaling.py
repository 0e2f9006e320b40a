"""Activations times factors per channel and example, with a backward pass that keeps few tensors."""

from typing import Any

import torch
from torch import Tensor

from dissensus.surgery import channel_kernels as kernels


def scaled(x: Tensor, factors: Tensor, *, alone: bool) -> Tensor:
    """x times factors that broadcast with it. `alone`: only one layer uses the product, so its gradient may be overwritten."""
    # Compiled code fuses this by itself; and dividing by factors as large as x costs as much as keeping x.
    if torch.compiler.is_compiling() or factors.shape == x.shape or not torch.is_grad_enabled():
        return x * factors
    product: Tensor = _Scaled.apply(x, factors, alone)  # type: ignore[no-untyped-call]
    return product


class _Scaled(torch.autograd.Function):
    """y = x ∘ s that saves y, which the next layer saves as well, while autograd would also save x.

    With g = ∂L/∂y:  ∂L/∂x = g ∘ s,  ∂L/∂s = Σ g ∘ x = (Σ g ∘ y) / s.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factors: Tensor, alone: bool) -> Tensor:
        at = _layout(x, factors)
        return x * factors if at is None else kernels.times(x, factors.flatten(1), at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.alone = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g,), (y, factors) = gradients, ctx.saved_tensors
        at = _layout(y, factors)
        if at is not None and not torch.is_grad_enabled():
            product, total = kernels.times_backward(kernels.like(g, y), y, factors.flatten(1), at)
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
    if factors.ndim != x.ndim or len(factors) != len(x) or kernels.in_transform(factors):
        return None
    last = factors.shape[1:] != (x.shape[1], *[1] * (x.ndim - 2))
    if last and factors.shape[1:] != (*[1] * (x.ndim - 2), x.shape[-1]):
        return None
    return kernels.layout(x, channels_last=last)
