"""A part of an epoch that SIGTERM interrupted, from which a resumed run continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.numerics.randomness import preserve_random_state
from dissensus.training.loader_state import loader_state
from dissensus.utils.progress import Progress


@dataclass
class PartialEpoch:
    """The first batches of an epoch: number, examples, summed losses (M,), seconds; and the state at the epoch's beginning."""

    random: Tensor | None = None  # torch's random state at the beginning, on the host and on the GPU
    cuda: Tensor | None = None
    loader: dict[str, Any] | None = None
    batches: int = 0
    examples: int = 0
    total: Tensor | None = None
    seconds: float = 0.0

    @classmethod
    def start_epoch(cls, loader: Iterable[Any], device: torch.device) -> PartialEpoch:
        """An empty part of an epoch that begins now."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, loader_state(loader))

    def remaining_batches(self, loader: Iterable[Any], device: torch.device, bar: Progress) -> Iterator[Any]:
        """The loader's batches after this part; the loader is in its state at the beginning of the epoch."""
        if self.random is None or not self.batches:
            return iter(loader)
        with preserve_random_state(device):  # later draws are those that would have followed the last of these batches
            torch.set_rng_state(self.random.cpu())
            if self.cuda is not None and device.type == "cuda":
                torch.cuda.set_rng_state(self.cuda.cpu(), device)
            batches = iter(loader)
            for _ in range(self.batches):
                next(batches)
                bar.step()
        return batches
