"""The plain training step: zero gradients, backward, clip, step, observe."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dissensus.core.batch import Inputs
from dissensus.core.clipping import clip_members
from dissensus.core.posterior import Posterior


class EagerStep:
    """One optimiser step of all members per `accumulate` batches."""

    def __init__(
        self,
        posterior: Posterior,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None = None,
        precision: torch.dtype | None = None,
        accumulate: int = 1,
    ) -> None:
        self.posterior = posterior
        self.optimizer = optimizer
        self.clip = clip
        self.precision = precision
        self.accumulate = accumulate
        self.pending = 0  # batches whose gradients wait for a step

    def __call__(self, x: Inputs, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """(M,) losses on the batch; steps once `accumulate` batches are in."""
        if self.pending == 0:
            # Zeroed before backward, not after the step: trackers read gradients in observe.
            self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.posterior.device, self.precision):
            losses = self.posterior.backward(x, y, weight)
        self.pending += 1
        if self.pending == self.accumulate:
            self.finish()
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
        if self.clip is not None:
            clip_members(self.posterior.particles, self.clip)
        self.optimizer.step()
        self.posterior.observe(self.optimizer)
        self.pending = 0


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """Mixed precision on the device, or nothing."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision)
