"""Tangent kernels of dense networks from activations and backpropagated signals only.

For a layer z = s·W h + b the gradient of f with respect to W is s·δ hᵀ, with δ = ∂f/∂z. The inner product of two gradients is
s² ⟨δ, δ'⟩ ⟨h, h'⟩, and with the bias ⟨δ, δ'⟩ (s² ⟨h, h'⟩ + 1). No tensor of the size of the parameters is formed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dissensus.nets.blocks import NTKLinear
from dissensus.theory.kernel_inputs import check_budget

Layer = tuple[
    Tensor, Tensor, float, float
]  # inputs h (N, D), signals δ (N, O, W), what the weights' and bias' terms count
BLOCK = 1280  # rows per block: few enough to skip half of a symmetric kernel, many enough for fast matrix products
Dense = nn.Linear | NTKLinear


def layerwise_kernel(network: nn.Module, x1: Tensor, x2: Tensor, *, outputs: int, result: int, memory: int) -> Tensor:
    """(N1, N2, O, O) from the layers' inputs and signals, block by block; of a symmetric kernel one half is computed.

    Raises, or gives a wrong kernel (which `empirical_ntk` detects), if a parameter is used outside one call of its Linear.
    """
    linear: list[Dense] = [each for each in network.modules() if isinstance(each, nn.Linear | NTKLinear)]
    width = sum(each.out_features * each.weight.element_size() for each in linear)
    needed = result + (len(x1) + len(x2)) * outputs * width
    check_budget(needed, memory, "a kernel and backpropagated signals", "pass fewer inputs at a time")
    symmetric = x2 is x1
    first = _layer_signals(network, x1, linear)
    second = first if symmetric else _layer_signals(network, x2, linear)
    theta = first[0][1].new_empty(len(x1), outputs, len(x2), outputs)
    step = max(1, min(BLOCK, int(((memory - result) / (3 * theta.element_size())) ** 0.5)) // outputs)
    for i in range(0, len(x1), step):
        for j in range(i if symmetric else 0, len(x2), step):
            rows, columns = slice(i, i + step), slice(j, j + step)
            block = torch.zeros_like(theta[rows, :, columns])
            for (h, delta, weight, bias), (other_h, other_delta, *_) in zip(first, second, strict=True):
                gram = (weight * (h[rows] @ other_h[columns].T)).add_(bias)[:, None, :, None]
                signals = delta[rows].flatten(0, 1) @ other_delta[columns].flatten(0, 1).T
                block.addcmul_(signals.view(block.shape), gram)
            theta[rows, :, columns] = block
            if symmetric and i != j:
                theta[columns, :, rows] = block.permute(2, 3, 0, 1)
    return theta.permute(0, 2, 1, 3)


def _layer_signals(network: nn.Module, x: Tensor, linear: list[Dense]) -> list[Layer]:
    """Every trained Linear's inputs and signals for x."""
    held = [id(p) for each in linear for p in (each._parameters.get("weight"), each.bias) if p is not None]
    other = any(p.requires_grad and id(p) not in held for p in network.parameters())
    if other or len(held) != len(set(held)) or any(each._forward_hooks or each._forward_pre_hooks for each in linear):
        raise ValueError("expected plain Linear layers, got hooks, shared weights, or parameters of other layers")
    seen: dict[Dense, tuple[Tensor, Tensor]] = {}

    def keep(layer: Dense, given: tuple[Any, ...], named: dict[str, Any], z: Tensor) -> Tensor:
        (h,) = (*given, *named.values())
        if layer in seen or h.ndim != 2:
            raise ValueError("expected layers called once, on one vector of an input, got another use")
        seen[layer] = (h.detach().clone(), z)
        return z.clone()  # an in-place activation then changes only the copy

    hooks = [each.register_forward_hook(keep, with_kwargs=True) for each in linear]
    try:
        with torch.enable_grad():
            out = network(x)  # (N, O)
    finally:
        for hook in hooks:
            hook.remove()
    trained = [layer for layer in seen if any(p.requires_grad for p in layer.parameters(recurse=False))]
    ends = [seen[layer][1] for layer in trained]
    # One backward pass for all outputs: their unit vectors are a batch.
    units = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)[:, None].expand(-1, *out.shape)
    found = torch.autograd.grad(out, ends, units, is_grads_batched=True, materialize_grads=True)
    scales = [1.0 if type(layer).forward is nn.Linear.forward else layer.in_features**-0.5 for layer in trained]
    return [
        (
            seen[layer][0],
            delta.transpose(0, 1).contiguous(),
            scale**2 * layer.weight.requires_grad,
            float(layer.bias is not None and layer.bias.requires_grad),
        )
        for layer, delta, scale in zip(trained, found, scales, strict=True)
    ]
