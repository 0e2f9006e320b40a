"""Networks drawn at random as `kernel` describes them: the finite counterpart of the infinitely wide one."""

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.nets.ntk import NTKLinear
from dissensus.numerics.checks import one_of
from dissensus.theory.inputs import variance_of


class ScaledLinear(nn.Linear):
    """W x/√fan_in + b."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.in_features**0.5, self.bias)


class ScaledConv2d(nn.Conv2d):
    """W ∗ x/√fan_in + b."""

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
    """A copy of the network with weights and biases drawn anew, its layers in NTK form unless "standard" is asked for.

    Its `empirical_ntk` tends to `kernel(network, …).ntk` as it gets wider. Arguments as in `kernel`; random numbers
    come from the generator, None is torch's own stream.
    """
    one_of("parameterization", parameterization, ("ntk", "standard"))
    weight, bias = variance_of("weight_variance", weight_variance), variance_of("bias_variance", bias_variance)
    drawn = copy.deepcopy(network)
    for layer in drawn.modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d | NTKLinear):
            continue
        if isinstance(layer, NTKLinear) and parameterization != "ntk":
            raise ValueError("expected parameterization='ntk' for NTKLinear layers, got another; pass that")
        scale = 1.0 if parameterization == "ntk" else layer.weight[0].numel() ** -0.5
        if parameterization == "ntk" and not isinstance(layer, NTKLinear):
            # Same tensors and attributes, another forward.
            layer.__class__ = ScaledLinear if isinstance(layer, nn.Linear) else ScaledConv2d
        with torch.no_grad():
            layer.weight.normal_(0, weight**0.5 * scale, generator=generator)
            if layer.bias is not None:
                layer.bias.normal_(0, bias**0.5, generator=generator)
    return drawn
