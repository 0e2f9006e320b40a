"""Batches of tensors that already lie in memory, without a Python step per example."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class Batches:
    """Iterable of (x, y) batches, started anew by every loop; len() is the number of batches.

    shuffle: a new order every epoch. With a seed the orders come from a generator of this object that goes on from
    epoch to epoch, so a run repeats exactly; without one every epoch draws its seed from the global generator, as a
    DataLoader does. Batches lie where x and y lie; unshuffled ones are views of them. augment: a function of a batch of
    inputs, applied where they lie (`dissensus.data.Augmentation`); put small image sets on the GPU as a whole.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if len(x) != len(y):
            raise ValueError(f"expected as many targets as inputs, got {len(y)} and {len(x)}; pass matching rows")
        if batch_size < 1:
            raise ValueError(f"expected batch_size of 1 or more, got {batch_size}; choose a positive number")
        if seed is not None and not shuffle:
            raise ValueError(
                f"expected no seed without shuffle, got seed={seed}; pass shuffle=True or leave the seed out"
            )
        self.x, self.y = x, y
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.augment = augment
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        full, rest = divmod(len(self.x), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Not a generator function: the order is drawn when the loop starts, not when its first batch is taken.
        return self._run(self._order())

    def _order(self) -> Tensor | None:
        if not self.shuffle:
            return None
        generator = self._generator
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return torch.randperm(len(self.x), generator=generator).to(self.x.device)  # one transfer an epoch, not a batch

    def _run(self, order: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            rows = slice(start, start + self.batch_size)
            if order is None:
                x, y = self.x[rows], self.y[rows]
            else:
                x, y = self.x[order[rows]], self.y[order[rows].to(self.y.device)]
            yield (x if self.augment is None else self.augment(x)), y
