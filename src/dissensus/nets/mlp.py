"""Multilayer perceptrons for vectors and flattened images."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


class MLP(nn.Module):
    """(B, ...) -> (B, outputs): inputs flattened, then Linear [+ BatchNorm] + activation [+ Dropout] per hidden width.

    `dropout`: one rate for all hidden layers, or one for each. `init`: "torch", its default; "he", weights
    N(0, 2/fan_in) and biases 0; "normal", all of them N(0, 1), a draw from the prior that is often taken.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        hidden: Sequence[int] = (100, 100),
        activation: Literal["relu", "tanh", "gelu", "silu"] = "relu",
        batch_norm: bool = False,
        dropout: float | Sequence[float] = 0.0,
        init: Literal["torch", "he", "normal"] = "torch",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}; name one of them"
            )
        if init not in ("torch", "he", "normal"):
            raise ValueError(f"expected init of torch, he, normal, got {init!r}; torch is torch's own default")
        rates = (
            [float(dropout)] * len(hidden) if isinstance(dropout, int | float) else [float(rate) for rate in dropout]
        )
        if len(rates) != len(hidden):
            raise ValueError(
                f"expected one dropout rate or {len(hidden)}, got {len(rates)}; give one for each hidden layer"
            )
        self.config = {
            "inputs": inputs,
            "outputs": outputs,
            "hidden": list(hidden),
            "activation": activation,
            "batch_norm": batch_norm,
            "dropout": dropout if isinstance(dropout, int | float) else rates,
            "init": init,
        }
        layers: list[nn.Module] = []
        width = inputs
        for units, rate in zip(hidden, rates, strict=True):
            layers.append(nn.Linear(width, units))
            if batch_norm:
                layers.append(nn.BatchNorm1d(units))
            layers.append(ACTIVATIONS[activation]())
            if rate:
                layers.append(nn.Dropout(rate))
            width = units
        layers.append(nn.Linear(width, outputs))
        self.layers = nn.Sequential(*layers)
        if init == "he":
            for layer in layers:
                if isinstance(layer, nn.Linear):
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                    nn.init.zeros_(layer.bias)
        elif init == "normal":
            for parameter in self.layers.parameters():
                nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x.flatten(1))
        return outputs
