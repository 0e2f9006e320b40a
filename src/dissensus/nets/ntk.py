"""A linear layer in the NTK parameterization (Jacot, Gabriel & Hongler, NeurIPS 2018): 1/√fan_in outside the weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.utils.checks import number


class NTKLinear(nn.Module):
    """Linear layer in NTK parameterization: x Wᵀ / √inputs + b, W ~ N(0, weight_variance), b ~ N(0, bias_variance).

    Maps (..., inputs) to (..., outputs). At initialisation it is a linear layer with W ~ N(0, weight_variance / inputs). In
    training the factor 1/√inputs makes good learning rates independent of the width. It is not an `nn.Linear`: code that
    replaces linear layers, or puts priors on them, would ignore the factor.
    """

    def __init__(self, inputs: int, outputs: int, *, weight_variance: float = 2.0, bias_variance: float = 0.0) -> None:
        super().__init__()
        number("weight_variance", weight_variance, above=0, hint="2 keeps the size of ReLU activations")
        number("bias_variance", bias_variance, least=0)
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(weight_variance**0.5 * torch.randn(outputs, inputs))
        self.bias = nn.Parameter(bias_variance**0.5 * torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x / math.sqrt(self.in_features), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
