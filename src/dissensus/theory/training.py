"""Plain gradient descent of an embedded network on the squared error: what the predictions are held against."""

from __future__ import annotations

from dataclasses import replace

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

    dw = −η (γ/M) Σ_α ∂L_α/∂w for what is shared, du_α = −η ∂L_α/∂u_α for what is a member's own, L_α = (1/2B) Σ_b (f_α − y)².
    """
    rates = dict.fromkeys(network.shared, learning_rate * gamma / network.members)
    rates |= {name: learning_rate for name in network.own if train_modulations}
    tensors = {**network.shared, **network.own}
    outputs = []
    for step in range(steps + 1):
        leaves = {name: t.detach().requires_grad_(name in rates) for name, t in tensors.items()}
        f = network.outputs({k: leaves[k] for k in network.shared}, {k: leaves[k] for k in network.own}, x)
        outputs.append(f.detach())
        if step == steps:
            break
        loss = (f - y).square().sum() / (2 * len(x))
        gradients = torch.autograd.grad(loss, [leaves[name] for name in rates])
        tensors = {name: t.detach() for name, t in tensors.items()}
        for name, gradient in zip(rates, gradients, strict=True):
            tensors[name] = tensors[name] - rates[name] * gradient
    trained = replace(
        network,
        shared={name: tensors[name] for name in network.shared},
        own={name: tensors[name] for name in network.own},
    )
    return torch.stack(outputs), trained
