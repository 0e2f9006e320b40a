"""A part of an epoch: where SIGTERM broke one off, and how a resumed run comes back to its middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.core.progress import Progress
from dissensus.numerics.randomness import same_random_state
from dissensus.training.loaderstate import loader_state


@dataclass
class Part:
    """The first batches of an epoch: their number, examples, losses summed (M,), seconds; and how the epoch began."""

    random: Tensor | None = None  # torch's streams at its beginning, on the host and on the GPU
    cuda: Tensor | None = None
    loader: dict[str, Any] | None = None
    batches: int = 0
    examples: int = 0
    total: Tensor | None = None
    seconds: float = 0.0

    @classmethod
    def beginning(cls, loader: Iterable[Any], device: torch.device) -> Part:
        """Of an epoch that begins now."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, loader_state(loader))

    def rest(self, loader: Iterable[Any], device: torch.device, bar: Progress) -> Iterator[Any]:
        """What the loader gives after these batches; it stands where it stood when the epoch began."""
        if self.random is None or not self.batches:
            return iter(loader)
        with same_random_state(device):  # what follows draws as it would have after the last of these batches
            torch.set_rng_state(self.random.cpu())
            if self.cuda is not None and device.type == "cuda":
                torch.cuda.set_rng_state(self.cuda.cpu(), device)
            batches = iter(loader)
            for _ in range(self.batches):
                next(batches)
                bar.step()
        return batches
