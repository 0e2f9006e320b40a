"""Matrix products on CPUs: small ones on Arm processors, and stacked linear layers.

On Arm, calling oneDNN costs more than a small product: 16 × 200 by 200 × 200 takes 0.43 ms with oneDNN and 0.06 ms without
(torch 2.13, one core). With a million weights per layer or more, oneDNN is faster by up to 15 %; convolutions need it.

Under vmap `F.linear` becomes x Wᵀ for every member: one product per member with a transposed operand, which is slow to read,
and a transposed weight gradient, which must be copied. Written as (W xᵀ)ᵀ, the first layer, whose input all members share,
is one large product, and gradients have the layout of the weights. For twenty 784-200-200-200-10 networks at batch 16 on two
cores (`benchmarks/speed.py --cases mlp16`), a step takes 21 ms instead of 33.
"""

import platform
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.utils.torch_private import ConvNd

SMALL = 2**19  # most weights of a linear layer for which oneDNN is avoided


def is_on_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def has_small_products(network: nn.Module) -> bool:
    """Whether to avoid oneDNN: on Arm, for networks that compute only small matrix products."""
    if not is_on_arm() or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    layers = list(network.modules())
    if any(isinstance(layer, ConvNd | nn.RNNBase) for layer in layers):
        return False
    sizes = [layer.in_features * layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    return bool(sizes) and max(sizes) <= SMALL


FEW = 8  # rows up to which x Wᵀ is faster without gradients: 5 times for one row (200 × 200, x86)


class StackedLinear:
    """Gives linear layers with own weights another forward while members are vectorised.

    `own`: ids of the template's tensors that are stacked. Layers with shared weights keep their forward: vmap makes one wide
    product of it over members × batch. Modulated layers (`surgery.modulated`) are notified that members are vectorised.
    """

    def __init__(self, template: nn.Module, *, own: Set[int]) -> None:
        layers = [layer for layer in template.modules() if type(layer) is nn.Linear and id(layer.weight) in own]
        # Made once, because the compiler recompiles for new objects.
        self.forwards = [(layer, _Transposed(layer)) for layer in layers]
        # Modulated layers apply their factors to activations while vectorised: one kernel serves all members.
        # The layers, not their vars: an unpickled copy has other ones.
        self.modulated = [layer for layer in template.modules() if "members_at_once" in vars(layer)]

    @contextmanager
    def use_stacked_forwards(self, device: torch.device) -> Iterator[None]:
        """Inside, the layers compute (W xᵀ)ᵀ + b; only on a CPU, since GPUs gain nothing."""
        changed = [pair for pair in self.forwards if device.type == "cpu" and "forward" not in vars(pair[0])]
        for layer, forward in changed:
            vars(layer)["forward"] = forward  # avoids nn.Module.__setattr__, which is slow
        for each in self.modulated:
            vars(each)["members_at_once"] = True
        try:
            yield
        finally:
            for layer, _ in changed:
                del vars(layer)["forward"]
            for each in self.modulated:
                vars(each)["members_at_once"] = False


def has_own_convolution(template: nn.Module, own: Set[int]) -> bool:
    """Whether members have their own tensor in a convolution, which is slower under vmap than in a loop.

    Under vmap stacked kernels become slow grouped convolutions. Own factors are cheaper on a kernel than on activations.
    """
    layers = (module for module in template.modules() if isinstance(module, ConvNd))
    return any(id(tensor) in own for layer in layers for tensor in chain(layer.parameters(), layer.buffers()))


class _Transposed:
    """The forward of one linear layer, (W xᵀ)ᵀ + b."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if input.ndim != 2:
            return F.linear(input, weight, bias)
        # Compilers and exporters would fix the number of rows.
        few = not torch.is_grad_enabled() and not torch.compiler.is_compiling() and input.shape[0] <= FEW
        product = input @ weight.mT if few else (weight @ input.mT).mT  # (B, O)
        return product if bias is None else product + bias
