"""Tangent kernels of networks as they are: Θ(x, x') = ∂f(x)/∂θ · (∂f(x')/∂θ)ᵀ for all pairs of inputs and of outputs.

Three ways to one answer (Novak et al. 2022); N inputs, O outputs, P parameters, W units in L layers, F a forward pass's cost:

    structured   N O F + N² O² L W     dense networks: ⟨δ, δ'⟩ (⟨h, h'⟩ + 1) layer by layer, no gradient is ever formed
    jacobian     N O F + N² O² P       gradients of all outputs, contracted parameter by parameter
    products     N² O F                a product of the kernel with a unit vector is one backward and one forward derivative
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dissensus.numerics.tree import call_with
from dissensus.theory import jacobians
from dissensus.theory.budget import check_budget
from dissensus.theory.structured import contracted, dense_layers

Method = Literal["auto", "structured", "jacobian", "products"]
METHODS = ("auto", "structured", "jacobian", "products")
_MIXES = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def empirical_ntk(
    module: nn.Module, x1: Tensor, x2: Tensor | None = None, *, method: Method = "auto", memory: int = 2**30
) -> Tensor:
    """(N1, N2, O, O) of any module whose outputs for one input do not depend on the others in the batch.

    Over parameters that require gradients, in their own dtype. `method`: one of the module's docstring, the cheapest by count
    where "auto". `memory`: bytes that may be taken besides the module and the inputs, the result among them.
    """
    if method not in METHODS:
        raise ValueError(f"expected a method of {', '.join(METHODS)}, got {method!r}; 'auto' chooses")
    second = x1 if x2 is None else x2
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("expected parameters that require gradients, got none; the kernel is over those")
    if any(isinstance(each, _MIXES) and each.training for each in module.modules()):
        raise ValueError(
            "expected batch norm and dropout in eval mode, got training mode; call module.eval(): "
            "a tangent kernel is of one function, input by input"
        )
    if x1.shape[1:] != second.shape[1:]:
        raise ValueError(
            f"expected examples of one shape, got {tuple(x1.shape[1:])} and {tuple(second.shape[1:])}; "
            "pass inputs of the same width"
        )
    dtype = next(iter(params.values())).dtype
    with torch.no_grad():
        outputs = module(x1[:1]).numel()
    size = dtype.itemsize
    result = len(x1) * len(second) * outputs**2 * size
    check_budget(result, memory, "a kernel of all inputs and outputs", "pass fewer inputs at a time")
    room = memory - result
    if method in ("auto", "structured"):
        symmetric = x2 is None
        layers = dense_layers(module, x1, second, outputs=outputs, room=room)
        if isinstance(layers, str):
            if method == "structured":
                raise ValueError(
                    f"expected a network of Linear layers for 'structured', got one where {layers}; pass method='auto'"
                )
        else:
            return contracted(*layers, outputs=outputs, symmetric=symmetric, room=room)
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    rest = frozen | dict(module.named_buffers())

    def function(params: jacobians.Params, x: Tensor) -> Tensor:
        found: Tensor = call_with(module, {**rest, **params}, x[None])
        return found.reshape(-1)  # (O,)

    if method == "auto":
        method = cheapest(module, params, x1, len(second), outputs)
    way = jacobians.contraction if method == "jacobian" else jacobians.products
    with full_precision():
        return way(function, params, x1, second, outputs=outputs, room=room, symmetric=x2 is None)


def full_precision() -> AbstractContextManager[object]:
    """Inside, convolutions on a GPU have all of float32's bits; torch's default is ten, too few for small eigenvalues."""
    return torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled,
        benchmark=torch.backends.cudnn.benchmark,
        deterministic=torch.backends.cudnn.deterministic,
        allow_tf32=False,
    )


def cheapest(
    module: nn.Module, params: jacobians.Params, x1: Tensor, count: int, outputs: int
) -> Literal["jacobian", "products"]:
    """The cheaper of the two ways that take any module, by multiplications."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x1[:1])
    forward = counter.get_total_flops() / 2
    size = sum(p.numel() for p in params.values())
    rows, pairs = (len(x1) + count) * outputs, len(x1) * count * outputs
    by_jacobian = 3 * rows * forward + pairs * outputs * size
    by_products = pairs * 2 * forward + count * outputs * 3 * forward
    return "jacobian" if by_jacobian <= by_products else "products"
