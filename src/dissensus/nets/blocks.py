"""Small modules that torch lacks: a residual connection and the error function; the initialisation of convolutions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.utils.checks import number


class Residual(nn.Module):
    """Residual connection: x + branch(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Erf(nn.Module):
    """The activation erf(x): a sigmoid whose expectations under Gaussian inputs have closed forms."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


def draw_convolutions(network: nn.Module) -> None:
    """Initialises all convolutions: kernels from N(0, 2/fan_out) (He et al., ICCV 2015), biases 0."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class NTKLinear(nn.Module):
    """Linear layer in NTK parameterization: x Wᵀ / √inputs + b, W ~ N(0, weight_variance), b ~ N(0, bias_variance).

    Jacot, Gabriel & Hongler, NeurIPS 2018. Maps (..., inputs) to (..., outputs). At initialisation it is a linear layer
    with W ~ N(0, weight_variance / inputs). In training the factor 1/√inputs makes good learning rates independent of the
    width. It is not an `nn.Linear`: code that replaces linear layers, or puts priors on them, would ignore the factor.
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
