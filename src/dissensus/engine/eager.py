"""The plain training step: zero gradients, backward, clip, step, observe."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dissensus.core import seam
from dissensus.core.batch import Inputs
from dissensus.core.clipping import clip_members
from dissensus.core.gradients import Strategy
from dissensus.core.posterior import Posterior
from dissensus.engine.optimisers import fuse


class EagerStep:
    """One optimiser step of all members per `accumulate` batches, with gradients found by any strategy."""

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
        self._restore = fuse(optimizer)

    def __call__(self, x: Inputs, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """(M,) losses on the batch; steps once `accumulate` batches are in."""
        if self.pending == 0:
            # Zeroed before backward, not after the step: trackers read gradients in observe. All of them, not only those
            # the optimiser holds: what it does not hold would grow from step to step, and clipping measures it.
            self.posterior.zero_grad(set_to_none=True)
        losses = self._backward(x, y, weight)
        self.pending += 1
        if self.pending == self.accumulate:
            self.finish()
        return losses

    def gradients_and_update(self, x: Inputs, y: Tensor, weight: Tensor | None, *, observe: bool) -> Tensor:
        """(M,) losses of one whole step from gradients that are None: the part that a CUDA graph can hold."""
        losses = self._backward(x, y, weight)
        self._update()
        if observe:
            self.posterior.observe(self.optimizer)
        return losses

    def finish(self) -> None:
        """Steps on whatever is pending: the mean gradient over the batches gathered."""
        if self.pending == 0:
            return
        if self.pending > 1:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(self.pending)
        self._update()
        self.posterior.observe(self.optimizer)
        self.pending = 0

    def close(self) -> None:
        """Gives the optimiser its settings back."""
        self._restore()

    def _backward(self, x: Inputs, y: Tensor, weight: Tensor | None) -> Tensor:
        with autocast(self.posterior.device, self.precision):
            return seam.backward(self.posterior, x, y, weight, self.strategy)

    def _update(self) -> None:
        if self.clip is not None:
            clip_members(self.posterior.particles, self.clip)
        self.optimizer.step()


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """Mixed precision on the device, or nothing."""
    if precision is None:
        return nullcontext()
    # Without a cache of cast weights: members on other streams would read a copy that is still being written.
    return torch.autocast(device.type, dtype=precision, cache_enabled=False)
