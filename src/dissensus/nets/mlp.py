"""Multilayer perceptrons for vectors and flattened images."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


class MLP(nn.Module):
    """(B, ...) -> (B, outputs): inputs flattened, then Linear [+ BatchNorm] + activation [+ Dropout] per hidden width."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        hidden: Sequence[int] = (100, 100),
        activation: Literal["relu", "tanh", "gelu", "silu"] = "relu",
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.config = {
            "inputs": inputs,
            "outputs": outputs,
            "hidden": list(hidden),
            "activation": activation,
            "batch_norm": batch_norm,
            "dropout": dropout,
        }
        layers: list[nn.Module] = []
        width = inputs
        for units in hidden:
            layers.append(nn.Linear(width, units))
            if batch_norm:
                layers.append(nn.BatchNorm1d(units))
            layers.append(ACTIVATIONS[activation]())
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = units
        layers.append(nn.Linear(width, outputs))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x.flatten(1))
        return outputs
