"""Small modules that torch lacks: a residual connection and the error function; the initialisation of convolutions."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Residual connection: x + branch(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.branch(x)
        return outputs


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
