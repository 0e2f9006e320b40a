"""Tangent kernels of networks as they are: Θ(x, x') = ∂f(x)/∂θ · (∂f(x')/∂θ)ᵀ for all pairs of inputs and of outputs.

Three ways to one answer (Novak et al. 2022); N inputs, O outputs, P parameters, W units in L layers, F a forward pass's cost:

    structured   N O F + N² O² L W     dense networks: ⟨δ, δ'⟩ (⟨h, h'⟩ + 1) layer by layer, no gradient is ever formed
    jacobian     N O F + N² O² P       gradients of all outputs, contracted parameter by parameter
    products     N² O F                a product of the kernel with a unit vector is one backward and one forward derivative
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dissensus.core import batch as batches
from dissensus.numerics.checks import one_of
from dissensus.theory.inputs import checked_pair
from dissensus.theory.jacobians import contraction, products, trained
from dissensus.theory.structured import by_layers

Method = Literal["auto", "structured", "jacobian", "products"]
Way = Callable[..., Tensor]
PLAIN = partial(contraction, plain=True)
WAYS: dict[str, list[Way]] = {"structured": [by_layers], "jacobian": [contraction, PLAIN], "products": [products]}
_MIXES = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def empirical_ntk(
    module: nn.Module, x1: Tensor, x2: Tensor | None = None, *, method: Method = "auto", memory: int = 2**30
) -> Tensor:
    """(N1, N2, O, O) tangent kernel of a module whose outputs for one input do not depend on the others in the batch.

    Over parameters that require gradients, in their own dtype.

    Args:
        x1, x2: inputs (N1, …) and (N2, …); None is x1.
        method: "structured", "jacobian" or "products" (see the module's docstring), or "auto", the cheapest by count.
            Each is checked against plain autograd on up to four inputs, which does the work where all others fail.
        memory: bytes that may be taken besides the module, the inputs and that check, the result among them.
    """
    one_of("method", method, ("auto", *WAYS), hint="'auto' chooses")
    x1, second = checked_pair(x1, x2)
    if not trained(module):
        raise ValueError("expected parameters that require gradients, got none; the kernel is over those")
    mixing = [each for each in module.modules() if isinstance(each, _MIXES)]
    if any(each.training or getattr(each, "running_mean", each) is None for each in mixing):
        raise ValueError(
            "expected batch norm and dropout in eval mode, with running statistics, got others; call module.eval(): "
            "a tangent kernel is of one function, input by input"
        )
    network, some = Flat(module), torch.cat([x1[:2], second[-2:]])
    with exact_convolutions():
        outputs = check_rows(network, some)
        result = len(x1) * len(second) * outputs**2 * next(iter(trained(module).values())).element_size()
        for name in ("structured", *by_cost(network, x1, len(second), outputs)) if method == "auto" else (method,):
            for way in WAYS[name]:
                if way is PLAIN or agrees(way, network, some, outputs):
                    return way(network, x1, second, outputs=outputs, result=result, memory=memory)
    raise ValueError(
        f"expected a network whose gradients method={method!r} finds, got one where it fails or plain autograd finds "
        "others; pass method='auto'"
    )


class Flat(nn.Module):
    """A network's outputs as rows (N, O), or along one direction of theirs (N, 1)."""

    def __init__(self, network: nn.Module, direction: Tensor | None = None) -> None:
        super().__init__()
        self.network, self.direction = network, direction

    def forward(self, x: Tensor) -> Tensor:
        found = batches.call(self.network, x)
        flat = found.reshape(len(found) if found.ndim else 1, -1)
        return flat if self.direction is None else flat @ self.direction[:, None]


def check_rows(network: Flat, x: Tensor) -> int:
    """O; raises where an input's outputs are others alone than beside other inputs."""
    with torch.no_grad():
        together, alone = network(x), torch.cat([network(row) for row in x[:, None]])
    atol = 10 * torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    if together.shape != alone.shape or not torch.allclose(together, alone, rtol=0, atol=atol, equal_nan=True):
        raise ValueError(
            "expected outputs for an input that do not depend on the others of its batch, got others alone than together; a "
            "kernel is of two inputs: put the batch axis first, and leave out statistics of batches and random numbers"
        )
    return alone.shape[1]


def agrees(way: Way, network: Flat, x: Tensor, outputs: int) -> bool:
    """Whether Σ_ij vᵀ Θ(x_i, x_j) v is what plain autograd gives, ‖∂ Σ_i v·f(x_i)/∂θ‖², for a random v."""
    params = list(trained(network).values())
    along = Flat(network.network, torch.randn(outputs, generator=torch.Generator().manual_seed(0)).to(params[0]))
    with torch.enable_grad():
        total = torch.cat([along(row) for row in x[:, None]]).sum()
    found = torch.autograd.grad(total, params, materialize_grads=True) if total.requires_grad else ()
    expected = sum(float(each.double().square().sum()) for each in found)
    try:
        theta = way(along, x, x, outputs=1, result=0, memory=2**62).detach().double()
    except Exception:  # autograd has just run the network: it is this way that cannot
        return False
    tolerance = 10 * torch.finfo(params[0].dtype).eps ** 0.5 * float(theta.abs().sum())
    return bool(abs(float(theta.sum()) - expected) <= tolerance)


def exact_convolutions() -> AbstractContextManager[object]:
    """Inside, convolutions on a GPU have all of float32's bits; torch's default is ten, too few for small eigenvalues."""
    return torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled,
        benchmark=torch.backends.cudnn.benchmark,
        deterministic=torch.backends.cudnn.deterministic,
        allow_tf32=False,
    )


def by_cost(network: nn.Module, x1: Tensor, count: int, outputs: int) -> list[str]:
    """The two ways that take any module, the one of fewer multiplications first."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x1[:1])
    forward = counter.get_total_flops() / 2
    size = sum(p.numel() for p in trained(network).values())
    rows, pairs = (len(x1) + count) * outputs, len(x1) * count * outputs
    by_jacobian = 3 * rows * forward + pairs * outputs * size
    by_products = pairs * 2 * forward + count * outputs * 3 * forward
    return ["jacobian", "products"] if by_jacobian <= by_products else ["products", "jacobian"]
