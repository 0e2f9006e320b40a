"""A hand-written LoRA: low-rank adapters beside the frozen linear layers of a base, as peft adds them."""

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """base(x) + x AᵀBᵀ; at the start B = 0, as in the paper."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.a.T @ self.b.T


def add_adapters(base: nn.Sequential) -> nn.Sequential:
    """The base with an adapter beside each linear layer; changes the module that is passed, as peft does."""
    base.requires_grad_(False)
    for i, layer in enumerate(base):
        if isinstance(layer, nn.Linear):
            base[i] = LowRank(layer)
    return base


def small_base(width: int = 16, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers = (
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, 3),
    )  # fmt: skip
    return nn.Sequential(*layers).to(dtype)


def storage_bytes(*holders: object) -> int:
    """Bytes of all tensors of these modules, each storage counted once."""
    tensors = [t for h in holders for t in ([h] if isinstance(h, Tensor) else [*h.parameters(), *h.buffers()])]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
