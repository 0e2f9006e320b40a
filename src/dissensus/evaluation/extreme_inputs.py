"""Inputs to look at: the most certain, the least certain, and the most certain mistakes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

GROUPS = ("most", "least", "mistakes")


@dataclass
class Extremes:
    """Keeps `count` inputs of each group over all batches; other inputs are not stored."""

    count: int = 8
    best_by_group: dict[str, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict
    )  # rank, index, inputs; first is best

    def update(self, score: Tensor, correct: Tensor, index: Tensor, inputs: Tensor) -> None:
        """Adds a batch. score (B,): higher = less certain; correct (B,) boolean; index (B,) positions; inputs (B, ...)."""
        every = torch.ones_like(correct)
        for group, rank, among in (("most", -score, every), ("least", score, every), ("mistakes", -score, ~correct)):
            found = (rank[among], index[among], inputs[among])
            if group in self.best_by_group:
                found = tuple(torch.cat(pair) for pair in zip(self.best_by_group[group], found, strict=True))  # type: ignore[assignment]
            best = torch.argsort(found[0], descending=True, stable=True)[: self.count]
            self.best_by_group[group] = (found[0][best], found[1][best], found[2][best])

    def arrays(self) -> dict[str, Tensor]:
        """`examples/GROUP/index` (K,) and `examples/GROUP/inputs` (K, ...) of every group."""
        return {
            f"examples/{group}/{name}": tensor
            for group, (_, index, inputs) in self.best_by_group.items()
            for name, tensor in (("index", index), ("inputs", inputs))
        }
