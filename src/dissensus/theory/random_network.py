"""Random networks of finite width with the weight distribution of `kernel`."""

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.nets.blocks import NTKLinear
from dissensus.theory.kernel_inputs import variance_of
from dissensus.utils.checks import one_of


class ScaledLinear(nn.Linear):
    """Linear layer in NTK form: W x/√fan_in + b."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.in_features**0.5, self.bias)


class ScaledConv2d(nn.Conv2d):
    """Convolution in NTK form: W ∗ x/√fan_in + b."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self._conv_forward(x, self.weight / self.weight[0].numel() ** 0.5, self.bias)
        return outputs


def random_network(
    network: nn.Module,
    *,
    weight_variance: float,
    bias_variance: float = 0.0,
    parameterization: Literal["ntk", "standard"] = "ntk",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A copy of the network with new random weights, in NTK form unless parameterization="standard".

    As it gets wider, its `empirical_ntk` tends to `kernel(network, …).ntk`. Arguments as in `kernel`; `generator` is the
    source of random numbers, None means torch's global generator.
    """
    one_of("parameterization", parameterization, ("ntk", "standard"))
    weight, bias = variance_of("weight_variance", weight_variance), variance_of("bias_variance", bias_variance)
    drawn = copy.deepcopy(network)
    for layer in drawn.modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d | NTKLinear):
            continue
        if isinstance(layer, NTKLinear) and parameterization != "ntk":
            raise ValueError("expected parameterization='ntk' for NTKLinear layers, got another; pass 'ntk'")
        scale = 1.0 if parameterization == "ntk" else layer.weight[0].numel() ** -0.5
        if parameterization == "ntk" and not isinstance(layer, NTKLinear):
            # The tensors and attributes stay; only the forward changes.
            layer.__class__ = ScaledLinear if isinstance(layer, nn.Linear) else ScaledConv2d
        with torch.no_grad():
            layer.weight.normal_(0, weight**0.5 * scale, generator=generator)
            if layer.bias is not None:
                layer.bias.normal_(0, bias**0.5, generator=generator)
    return drawn
