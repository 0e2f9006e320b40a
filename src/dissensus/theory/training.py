"""Plain gradient descent of an embedded network on the squared error: what the predictions are held against."""

from __future__ import annotations

import torch
from torch import Tensor

from dissensus.theory.embedded_network import EmbeddedNetwork


def train_embedded(
    network: EmbeddedNetwork,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    learning_rate: float,
    gamma: float,
    train_modulations: bool = True,
) -> tuple[Tensor, EmbeddedNetwork]:
    """((steps + 1, M, B, O) outputs on x before every step and after the last, the trained network); y is (B, O).

    dw = −η (γ/M) Σ_α ∂L_α/∂w for what is shared, du_α = −η ∂L_α/∂u_α for what is a member's own, with the loss L_α =
    (1/2B) Σ_b (f_α − y)²: plain gradient descent on full batches, for comparison with `ensemble_dynamics`.

    Args:
        learning_rate: η.
        gamma: γ: M for the independent regime, 1 for the collective one.
        train_modulations: whether u and v train too.
    """
    rates = dict.fromkeys(network.shared, learning_rate * gamma / network.members)
    rates |= {name: learning_rate for name in network.own if train_modulations}
    outputs = []

    def loss(moving: dict[str, Tensor], now: EmbeddedNetwork) -> tuple[Tensor, Tensor]:
        f = now.replaced(moving)(x)
        return (f - y).square().sum() / (2 * len(x)), f

    for _ in range(steps):
        tensors = {**network.shared, **network.own}
        gradients, f = torch.func.grad(loss, has_aux=True)({name: tensors[name] for name in rates}, network)
        outputs.append(f)
        network = network.replaced({name: tensors[name] - rates[name] * g for name, g in gradients.items()})
    return torch.stack([*outputs, network(x)]), network
