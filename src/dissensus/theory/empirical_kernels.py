"""Empirical tangent kernels: Θ(x, x') = ∂f(x)/∂θ · (∂f(x')/∂θ)ᵀ for all pairs of inputs and outputs of a network.

Three methods give the same result (Novak et al. 2022). Costs with N inputs, O outputs, P parameters, W units in L layers and
cost F of a forward pass:

    structured   N O F + N² O² L W     dense networks: ⟨δ, δ'⟩ (⟨h, h'⟩ + 1) layer by layer, without forming gradients
    jacobian     N O F + N² O² P       gradients of all outputs, contracted parameter by parameter
    products     N² O F                kernel times unit vector, by one backward and one forward derivative
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dissensus.core import batch as batches
from dissensus.theory.dense_kernels import layerwise_kernel
from dissensus.theory.jacobians import contraction, products, trainable_parameters
from dissensus.theory.kernel_inputs import checked_pair
from dissensus.utils.checks import one_of

Method = Literal["auto", "structured", "jacobian", "products"]
Way = Callable[..., Tensor]
PLAIN = partial(contraction, plain=True)
WAYS: dict[str, list[Way]] = {
    "structured": [layerwise_kernel],
    "jacobian": [contraction, PLAIN],
    "products": [products],
}
_MIXES = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def empirical_ntk(
    module: nn.Module, x1: Tensor, x2: Tensor | None = None, *, method: Method = "auto", memory: int = 2**30
) -> Tensor:
    """Measures the tangent kernel (N1, N2, O, O) of a network, over its parameters that require gradients.

    A network's outputs for one input must not depend on other inputs of the batch. The result has the parameters' dtype.

    Args:
        x1, x2: inputs (N1, …) and (N2, …); x2 = None means x1.
        method: "structured", "jacobian" or "products" (see the module's docstring), or "auto" for the cheapest. Each is
            checked against plain autograd on up to four inputs; if all fail, plain autograd computes the kernel.
        memory: most bytes for the computation, including the result, besides module, inputs and that check.
    """
    one_of("method", method, ("auto", *WAYS), hint="'auto' chooses")
    x1, second = checked_pair(x1, x2)
    if not trainable_parameters(module):
        raise ValueError("expected parameters that require gradients, got none; call module.requires_grad_()")
    mixing = [each for each in module.modules() if isinstance(each, _MIXES)]
    if any(each.training or getattr(each, "running_mean", each) is None for each in mixing):
        got = "others; call module.eval(), so that each input's outputs depend on this input only"
        raise ValueError(f"expected batch norm and dropout in eval mode, with running statistics, got {got}")
    network, some = FlatOutputs(module), torch.cat([x1[:2], second[-2:]])
    with exact_convolutions():
        outputs = check_rows(network, some)
        result = len(x1) * len(second) * outputs**2 * next(iter(trainable_parameters(module).values())).element_size()
        auto = method == "auto"
        for name in ("structured", *methods_by_cost(network, x1, len(second), outputs)) if auto else (method,):
            for way in WAYS[name]:
                if way is PLAIN or is_consistent(way, network, some, outputs):
                    return way(network, x1, second, outputs=outputs, result=result, memory=memory)
    got = "one where it fails or disagrees with plain autograd"
    raise ValueError(f"expected a network for which method={method!r} works, got {got}; pass method='auto'")


class FlatOutputs(nn.Module):
    """A network with outputs flattened to rows (N, O), or projected on one direction (N, 1)."""

    def __init__(self, network: nn.Module, direction: Tensor | None = None) -> None:
        super().__init__()
        self.network, self.direction = network, direction

    def forward(self, x: Tensor) -> Tensor:
        found = batches.call_network(self.network, x)
        flat = found.reshape(len(found) if found.ndim else 1, -1)
        return flat if self.direction is None else flat @ self.direction[:, None]


def check_rows(network: FlatOutputs, x: Tensor) -> int:
    """The number of outputs O; raises if an input's outputs change when it is alone in the batch."""
    with torch.no_grad():
        together, alone = network(x), torch.cat([network(row) for row in x[:, None]])
    atol = 10 * torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    if together.shape != alone.shape or not torch.allclose(together, alone, rtol=0, atol=atol, equal_nan=True):
        advice = "put the batch axis first, and remove batch statistics and random numbers"
        raise ValueError(f"expected the same outputs for an input alone and in a batch, got different ones; {advice}")
    return alone.shape[1]


def is_consistent(way: Way, network: FlatOutputs, x: Tensor, outputs: int) -> bool:
    """Whether Σ_ij vᵀ Θ(x_i, x_j) v equals plain autograd's ‖∂ Σ_i v·f(x_i)/∂θ‖², for a random v."""
    params = list(trainable_parameters(network).values())
    along = FlatOutputs(network.network, torch.randn(outputs, generator=torch.Generator().manual_seed(0)).to(params[0]))
    with torch.enable_grad():
        total = torch.cat([along(row) for row in x[:, None]]).sum()
    found = torch.autograd.grad(total, params, materialize_grads=True) if total.requires_grad else ()
    expected = sum(float(each.double().square().sum()) for each in found)
    try:
        theta = way(along, x, x, outputs=1, result=0, memory=2**62).detach().double()
    except Exception:  # autograd has just run the network, so this method fails, not the network
        return False
    tolerance = 10 * torch.finfo(params[0].dtype).eps ** 0.5 * float(theta.abs().sum())
    return bool(abs(float(theta.sum()) - expected) <= tolerance)


def exact_convolutions() -> AbstractContextManager[object]:
    """Context in which GPU convolutions use full float32 precision; torch's default, ten bits, is too coarse for small
    eigenvalues."""
    return torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled,
        benchmark=torch.backends.cudnn.benchmark,
        deterministic=torch.backends.cudnn.deterministic,
        allow_tf32=False,
    )


def methods_by_cost(network: nn.Module, x1: Tensor, count: int, outputs: int) -> list[str]:
    """The two methods that work for any module, the one with fewer multiplications first."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x1[:1])
    forward = counter.get_total_flops() / 2
    size = sum(p.numel() for p in trainable_parameters(network).values())
    rows, pairs = (len(x1) + count) * outputs, len(x1) * count * outputs
    by_jacobian = 3 * rows * forward + pairs * outputs * size
    by_products = pairs * 2 * forward + count * outputs * 3 * forward
    return ["jacobian", "products"] if by_jacobian <= by_products else ["products", "jacobian"]
