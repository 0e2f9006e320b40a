"""The plain training step: zero gradients, find new ones, check that all is finite, clip, step, observe."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dissensus.core import seam
from dissensus.core.batch import Batch
from dissensus.core.gradients import Strategy
from dissensus.core.likelihood import spread
from dissensus.core.posterior import Posterior
from dissensus.engine.clipping import clip_members
from dissensus.engine.guard import Guard
from dissensus.engine.optimisers import fuse


class EagerStep:
    """One optimiser step of all members per `accumulate` batches, as on one large one; gradients by any strategy."""

    def __init__(
        self,
        posterior: Posterior,
        optimizer: torch.optim.Optimizer,
        *,
        strategy: Strategy = seam.automatic,
        clip: float | None = None,
        precision: torch.dtype | None = None,
        accumulate: int = 1,
    ) -> None:
        self.posterior = posterior
        self.optimizer = optimizer
        self.strategy = strategy
        self.clip = clip
        self.precision = precision
        self.accumulate = accumulate
        self.pending = 0  # batches whose gradients wait for a step
        self.gathered = torch.zeros(())  # the weight of what counts in them
        self._restore = fuse(optimizer)
        self.guard = Guard(posterior, optimizer, host=posterior.device.type == "cpu")

    def __call__(self, batch: Batch, *, observe: bool = True) -> Tensor:
        """(M,) losses on the batch; every `accumulate` batches the optimiser steps. Raises Diverged before a bad step.

        A CUDA graph can hold it where one batch is a step. `observe`: whether the method may look at the weights afterwards.
        """
        if self.pending == 0:
            # Zeroed before backward, not after the step: trackers read gradients in observe. All of them, not only those
            # that the optimiser holds: the others would grow from step to step, and they count in the norm for clipping.
            self.posterior.zero_grad(set_to_none=True)
            self.guard.begin(several=self.accumulate > 1)
        number, self.pending = self.pending + 1, 0  # where the batch raises, those before it are dropped
        losses = self._batch(batch, number)
        if number < self.accumulate:
            self.pending = number
        else:
            self._update(observe=observe)
        return losses

    def finish(self) -> None:
        """Steps with the gradient of the batches that wait for a step, if any do."""
        if self.pending == 0:
            return
        self.pending = 0
        self.guard.look(None, complete=True)
        if not self.guard.reads:
            self.guard.undo()
        self._update()

    @property
    def way(self) -> str:
        """How members run, such as "loop+compiled"."""
        return str(getattr(self.strategy, "name", "auto"))

    def check(self) -> None:
        """Raises Diverged for bad steps that a GPU has skipped since, and where weights are not finite."""
        self.guard.check()

    def close(self) -> None:
        """Gives the optimiser its settings back."""
        self._restore()

    def _batch(self, batch: Batch, number: int) -> Tensor:
        """(M,) losses of a step's batch `number` (from 1); gradients go to `.grad`, statistics where all is finite."""
        with autocast(self.posterior.device, self.precision):
            found = seam.find(self.posterior, batch, self.strategy, self.guard.look_unmixed)
        seam.add_gradients(self.posterior, found.gradients, share=self._share(batch, number, found.losses.dtype))
        self.guard.look(found.losses, complete=number == self.accumulate)
        self.guard.write(found.buffers)
        return found.losses

    def _share(self, batch: Batch, number: int, dtype: torch.dtype) -> Tensor | None:
        """() how much of the step so far the batch is, by the weights of entries that count; None for a step of one batch.

        Each batch's loss is a mean, Σ w ℓ / Σ w. Their mean by these shares is the loss of one large batch.
        """
        if self.accumulate == 1:
            return None
        counted = self.posterior.likelihood.training_weight(batch.y)
        w = torch.ones(len(batch.y), device=batch.y.device) if batch.weight is None else batch.weight
        if counted is not None:
            w = spread(w, counted.to(w.dtype)) * counted
        counts = self.posterior.particles.exchange.counted(w.sum(dtype=dtype))
        self.gathered = counts if number == 1 else self.gathered + counts
        return torch.where(self.gathered > 0, counts / self.gathered, 1 / number)

    def _update(self, *, observe: bool = True) -> None:
        if self.clip is not None:
            clip_members(self.posterior.particles, self.clip)
        with self.guard.skipping():
            self.optimizer.step()
        if observe:
            self.guard.observe()
        self.guard.join()


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """The context of mixed precision on the device; an empty one where precision is None."""
    if precision is None:
        return nullcontext()
    # Without a cache of cast weights: members on other streams would read a copy that is still being written.
    return torch.autocast(device.type, dtype=precision, cache_enabled=False)
