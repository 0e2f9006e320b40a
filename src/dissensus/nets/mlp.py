"""Multilayer perceptrons for vectors and flattened images."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from dissensus.nets.blocks import NTKLinear, Residual
from dissensus.utils.checks import integer, one_of

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


def _he(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)


def _normal(layer: nn.Module) -> None:
    for parameter in layer.parameters(recurse=False):
        nn.init.normal_(parameter)


INITIALISERS: dict[str, Callable[[nn.Module], Any]] = {"torch": lambda layer: None, "he": _he, "normal": _normal}


class MLP(nn.Module):
    """Multilayer perceptron: (B, ...) -> (B, outputs); flattens inputs, then Linear [+ BatchNorm] + activation [+ Dropout].

    Args:
        inputs, outputs: numbers per example.
        hidden: widths of the hidden layers, or one width for one layer.
        batch_norm: adds batch normalisation to each hidden layer.
        dropout: one rate for all hidden layers, or one for each.
        init: "torch" for torch's default; "he" for weights N(0, 2/fan_in) and biases 0; "normal" for N(0, 1), the usual prior.
        parameterization: "standard", or "ntk" for layers Wx/√fan_in + b. `init` applies to "standard" only.
        weight_variance, bias_variance: variances of W and b with "ntk"; None means 2 and 0.
        skip: adds residual connections around hidden layers whose width equals that of the layer before.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        hidden: int | Sequence[int] = (100, 100),
        activation: Literal["relu", "tanh", "gelu", "silu"] = "relu",
        batch_norm: bool = False,
        dropout: float | Sequence[float] = 0.0,
        init: Literal["torch", "he", "normal"] = "torch",
        parameterization: Literal["standard", "ntk"] = "standard",
        weight_variance: float | None = None,
        bias_variance: float | None = None,
        skip: bool = False,
    ) -> None:
        super().__init__()
        hidden = [integer("hidden", width) for width in (hidden if isinstance(hidden, Iterable) else [hidden])]
        one_of("activation", activation, ACTIVATIONS)
        one_of("init", init, INITIALISERS, hint='"torch" is torch\'s default')
        ntk = one_of("parameterization", parameterization, ("standard", "ntk")) == "ntk"
        if ntk and init != "torch":
            raise ValueError(f'expected no init with parameterization="ntk", got {init!r}; pass weight_variance=')
        variances = {"weight_variance": weight_variance, "bias_variance": bias_variance}
        if not ntk and any(variance is not None for variance in variances.values()):
            raise ValueError('expected variances with parameterization="ntk" only, got some; pass "ntk", or init=')
        per_layer = [dropout] * len(hidden) if isinstance(dropout, int | float) else dropout
        rates = [float(rate) for rate in per_layer]
        if len(rates) != len(hidden):
            raise ValueError(f"expected one dropout rate or {len(hidden)}, got {len(rates)}; pass one per hidden layer")
        self.config = {
            "inputs": inputs, "outputs": outputs, "hidden": hidden, "activation": activation, "batch_norm": batch_norm,
            "dropout": dropout if isinstance(dropout, int | float) else rates, "init": init, "skip": skip,
            "parameterization": parameterization, **variances,
        }  # fmt: skip
        given: dict[str, Any] = {name: variance for name, variance in variances.items() if variance is not None}
        linear: Callable[[int, int], nn.Module] = partial(NTKLinear, **given) if ntk else nn.Linear
        layers: list[nn.Module] = []
        for width, units, rate in zip([inputs, *hidden], hidden, rates, strict=False):
            norm = [nn.BatchNorm1d(units)] if batch_norm else []
            block = [linear(width, units), *norm, ACTIVATIONS[activation](), *([nn.Dropout(rate)] if rate else [])]
            layers += [Residual(nn.Sequential(*block))] if skip and layers and width == units else block
        self.layers = nn.Sequential(*layers, linear([inputs, *hidden][-1], outputs))
        self.layers.apply(INITIALISERS[init])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))
