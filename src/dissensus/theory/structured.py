"""Tangent kernels of dense networks from activations and backpropagated signals alone.

For a layer z = s·W h + b the gradient of f with respect to W is s·δ hᵀ, δ = ∂f/∂z, so that two gradients' inner product is
s² ⟨δ, δ'⟩ ⟨h, h'⟩ and, with the bias, ⟨δ, δ'⟩ (s² ⟨h, h'⟩ + 1): nothing of the size of the parameters is ever formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.nets.ntk import NTKLinear
from dissensus.theory.budget import check_budget

BLOCK = 1280  # rows of a block: few enough to halve a symmetric kernel, many enough for a fast matrix product
Layers = list["Layer"]
Dense = nn.Linear | NTKLinear


@dataclass(frozen=True)
class Layer:
    """One Linear for N inputs: h (N, D), δ (N, O, W), and by how much the weights' and the bias' terms count."""

    inputs: Tensor
    signals: Tensor
    weight: float  # s², 0 where frozen
    bias: float  # 1, 0 where there is none or it is frozen


def dense_layers(module: nn.Module, x1: Tensor, x2: Tensor, *, outputs: int, room: int) -> tuple[Layers, Layers] | str:
    """Layers of both sides, or why the network is not one that has them."""
    linear = [each for each in module.modules() if isinstance(each, nn.Linear | NTKLinear)]
    held = [p for each in linear for p in each.parameters(recurse=False)]
    if len({id(p) for p in held}) != len(held):
        return "layers share weights"
    if any(p.requires_grad and not any(p is each for each in held) for p in module.parameters()):
        return "other layers have parameters that require gradients"
    scales: list[float] = []
    for each in linear:
        scale = _scale(each)
        if scale is None:
            return f"{type(each).__name__} is not a multiple of a Linear"
        scales.append(scale)
    size = held[0].element_size()
    needed = (len(x1) + len(x2)) * outputs * sum(each.out_features for each in linear) * size
    check_budget(needed, room, "backpropagated signals beside the kernel", "pass fewer inputs at a time")
    first = _layers(module, x1, linear, scales)
    if isinstance(first, str) or x2 is x1:
        return first if isinstance(first, str) else (first, first)
    second = _layers(module, x2, linear, scales)
    return second if isinstance(second, str) else (first, second)


def contracted(first: Layers, second: Layers, *, outputs: int, symmetric: bool, room: int) -> Tensor:
    """(N1, N2, O, O) from both sides' layers, block by block; of a symmetric kernel one half is computed."""
    n, m = len(first[0].inputs), len(second[0].inputs)
    theta = first[0].signals.new_empty(n, outputs, m, outputs)
    step = max(1, min(BLOCK, int((room / (3 * theta.element_size())) ** 0.5)) // outputs)
    for i in range(0, n, step):
        for j in range(i if symmetric else 0, m, step):
            rows, columns = slice(i, i + step), slice(j, j + step)
            block = theta.new_zeros(min(step, n - i), outputs, min(step, m - j), outputs)
            for one, two in zip(first, second, strict=True):
                left, right = one.inputs[rows], two.inputs[columns]
                gram = (one.weight * (left @ right.T)).add_(one.bias)[:, None, :, None]
                signals = one.signals[rows].flatten(0, 1) @ two.signals[columns].flatten(0, 1).T
                block.addcmul_(signals.view(block.shape), gram)
            theta[rows, :, columns] = block
            if symmetric and i != j:
                theta[columns, :, rows] = block.permute(2, 3, 0, 1)
    return theta.permute(0, 2, 1, 3)


def _layers(module: nn.Module, x: Tensor, linear: list[Dense], scales: list[float]) -> Layers | str:
    """Every trained Linear's inputs and signals for x, or why they cannot be had."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    trouble: list[str] = []

    def keep(layer: nn.Module, given: tuple[Any, ...], z: Tensor) -> Tensor:
        h = given[0]
        if id(layer) in seen:
            trouble.append("a layer is called twice")
        if h.ndim != 2 or len(h) != len(x):
            trouble.append("a layer acts on more than one vector of an input")
        seen[id(layer)] = (h.detach().clone(), z)
        return z.clone()  # an activation that works in place changes the copy

    with torch.no_grad():
        alone = module(x[:1])
    hooks = [each.register_forward_hook(keep) for each in linear]
    try:
        with torch.enable_grad():
            out = module(x.detach()).flatten(1) if alone.ndim > 1 else module(x.detach())[:, None]
    finally:
        for hook in hooks:
            hook.remove()
    if trouble:
        return trouble[0]
    if not torch.allclose(out[0].detach(), alone.flatten(), rtol=1e-3, atol=1e-5):
        return "inputs of a batch see one another"
    trained = [
        (scale, layer, *seen[id(layer)])
        for scale, layer in zip(scales, linear, strict=True)
        if id(layer) in seen and any(p.requires_grad for p in layer.parameters(recurse=False))
    ]
    ends = [z for *_, z in trained]
    # One backward pass for all outputs: their unit vectors are a batch.
    units = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)[:, None].expand(-1, *out.shape)
    found = torch.autograd.grad(out, ends, units, allow_unused=True, is_grads_batched=True)
    signals = [
        z.new_zeros(len(x), out.shape[1], z.shape[1]) if delta is None else delta.transpose(0, 1).contiguous()
        for z, delta in zip(ends, found, strict=True)
    ]
    return [
        Layer(
            inputs,
            delta,
            weight=scale**2 if layer.weight.requires_grad else 0.0,
            bias=float(layer.bias is not None and layer.bias.requires_grad),
        )
        for (scale, layer, inputs, _), delta in zip(trained, signals, strict=True)
    ]


def _scale(layer: Dense) -> float | None:
    """s of a layer s·W h + b: 1 for a Linear, 1/√fan_in in NTK form; None where it is not one."""
    if type(layer) is nn.Linear:
        return 1.0
    with torch.no_grad():
        h = torch.linspace(-1, 1, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)[None]
        plain = nn.functional.linear(h, layer.weight)
        found = layer(h) - (0 if layer.bias is None else layer.bias)
        scale = float((found * plain).sum() / plain.square().sum())
        return scale if torch.allclose(found, scale * plain, rtol=1e-3, atol=1e-6) else None
