"""The plain training step: zero gradients, compute new ones, check that they are finite, clip, step, observe."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dissensus.core import objective
from dissensus.core.batch import Batch
from dissensus.core.gradients import Strategy
from dissensus.core.likelihood import expand_weight
from dissensus.core.member_runner import NOTHING
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.engine.fast_optimisers import use_fused_kernels
from dissensus.engine.step_guard import Guard
from dissensus.utils.dtensor import gather_full_tensor, is_divided, local_part


def clip_members(particles: Particles, largest: float) -> Tensor:
    """Scales gradients in place, each member's own ones separately, to norms of at most `largest`; (M,) norms before."""
    own = [p.grad for p in particles.own_parameters().values() if p.grad is not None]
    shared = [p.grad for p in particles.shared_parameters().values() if p.grad is not None]
    if not own and not shared:
        return torch.zeros(particles.members)
    found = []
    for gradients in (own, [g.unsqueeze(0) for g in shared]):  # (M, ...), (1, ...)
        if gradients:
            norms = _squared_norms(gradients).sum(0).sqrt()
            factor = (largest / norms.clamp(min=1e-12)).clamp(max=1.0)
            for gradient in map(local_part, gradients):
                gradient.mul_(factor.to(gradient.dtype).reshape(-1, *[1] * (gradient.ndim - 1)))
            found.append(norms)
    return found[0]


def _squared_norms(gradients: list[Tensor]) -> Tensor:
    """(T, M) squares of each tensor's norm, member by member."""
    # In float32 at least: a norm that overflows in float16 would clip every gradient to zero.
    full = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    return torch.stack(
        [
            gather_full_tensor(each.square().sum(tuple(range(1, each.ndim))))
            if is_divided(each)
            else each.reshape(len(each), -1).square().sum(1)
            for each in full
        ]
    )


class EagerStep:
    """One optimiser step of all members per `accumulate` batches, equal to a step on one large batch."""

    def __init__(
        self,
        posterior: Posterior,
        optimizer: torch.optim.Optimizer,
        *,
        strategy: Strategy = objective.automatic_gradients,
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
        self.pending = 0  # batches accumulated since the last step
        self.accumulated_weight = torch.zeros(())  # total weight of their examples
        self._restore = use_fused_kernels(optimizer)
        self._parameters = list(posterior.parameters())  # found once: it takes as long as a small layer
        self.guard = Guard(posterior, optimizer, host=posterior.device.type == "cpu")

    def __call__(self, batch: Batch, *, observe: bool = True) -> Tensor:
        """(M,) losses on the batch; every `accumulate` batches the optimiser steps. Raises Diverged before a bad step.

        It can be captured in a CUDA graph if one batch is a step. `observe`: whether to call the method's `observe` afterwards.
        """
        if self.pending == 0:
            # Zeroed before backward, not after the step, because recorders read gradients in observe. All gradients, not only
            # those of the optimiser: the others would grow from step to step, and they count in the norm for clipping.
            for parameter in self._parameters:
                parameter.grad = None
            self.guard.begin(several=self.accumulate > 1)
        number, self.pending = self.pending + 1, 0  # if this batch raises, the accumulated ones are dropped
        losses = self._run_batch(batch, number)
        if number < self.accumulate:
            self.pending = number
        else:
            self._update(observe=observe)
        return losses

    def finish(self) -> None:
        """Steps with the gradients accumulated so far, if there are any."""
        if self.pending == 0:
            return
        self.pending = 0
        self.guard.check_values(None, complete=True)
        if not self.guard.checks_at_once:
            self.guard.restore_buffers()
        self._update()

    @property
    def engine_name(self) -> str:
        """How members run, such as "loop+compiled"."""
        return str(getattr(self.strategy, "name", "auto"))

    def check(self) -> None:
        """Raises Diverged if a GPU has skipped bad steps, or if weights are not finite."""
        self.guard.check()

    def close(self) -> None:
        """Restores the optimiser's settings."""
        self._restore()

    def _run_batch(self, batch: Batch, number: int) -> Tensor:
        """(M,) losses of a step's batch `number` (from 1); sets `.grad`, and batch statistics if all is finite."""
        with NOTHING if self.precision is None else autocast(self.posterior.device, self.precision):
            found = objective.compute_gradients(self.posterior, batch, self.strategy, self.guard.check_unmixed)
        share = self._weight_fraction(batch, number, found.losses.dtype)
        objective.add_gradients(self.guard.weights, found.gradients, share=share)
        # Of the only batch of a step, what was found on the way is what is in `.grad`.
        known = found.largest if self.accumulate == 1 else None
        self.guard.check_values(found.losses, complete=number == self.accumulate, known=known)
        self.guard.write_buffers(found.buffers)
        return found.losses

    def _weight_fraction(self, batch: Batch, number: int, dtype: torch.dtype) -> Tensor | None:
        """() the batch's share of the weight accumulated so far; None for a step of one batch.

        Each batch's loss is a mean, Σ w ℓ / Σ w. Their mean, weighted by these shares, is the loss of one large batch.
        """
        if self.accumulate == 1:
            return None
        counted = self.posterior.likelihood.training_weight(batch.y)
        w = torch.ones(len(batch.y), device=batch.y.device) if batch.weight is None else batch.weight
        if counted is not None:
            w = expand_weight(w, counted.to(w.dtype)) * counted
        counts = self.posterior.particles.exchange.total_batch_weight(w.sum(dtype=dtype))
        self.accumulated_weight = counts if number == 1 else self.accumulated_weight + counts
        return torch.where(self.accumulated_weight > 0, counts / self.accumulated_weight, 1 / number)

    def _update(self, *, observe: bool = True) -> None:
        if self.clip is not None:
            clip_members(self.posterior.particles, self.clip)
        with self.guard.skip_bad_step():
            self.optimizer.step()
        if observe:
            self.guard.observe()
        self.guard.join_side_stream()


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """The context of mixed precision on the device; an empty one if precision is None."""
    if precision is None:
        return nullcontext()
    # Without a cache of cast weights: members on other streams could read a copy that is still being written.
    return torch.autocast(device.type, dtype=precision, cache_enabled=False)
