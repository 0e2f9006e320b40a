"""How members run: loop, vectorised or streamed, compiled or not, captured in a CUDA graph or not."""

import logging

import torch

from dissensus.core.batch import Batch
from dissensus.core.posterior import Posterior
from dissensus.engine.adaptive_step import AdaptiveStep
from dissensus.engine.fast_optimisers import use_channels_last
from dissensus.engine.memory import Memory
from dissensus.engine.strategies import Plan, make_plan, make_strategy
from dissensus.engine.training_step import CapturedStep, EagerStep

log = logging.getLogger("dissensus")


def build_step(
    engine: str,
    posterior: Posterior,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    count: int | None,
    memory: Memory | None = None,
    clip: float | None = None,
    precision: torch.dtype | None = None,
    accumulate: int = 1,
) -> AdaptiveStep:
    """A training step for batches like this one, of which `count` will come; None if nobody knows."""
    use_channels_last(posterior.particles)  # first: the optimiser's states follow
    if memory is not None and engine == "auto" and not memory.fits_at_once(posterior.device):
        log.info("members run one after the other: there is not enough memory for all at once")
        engine = "loop"
    if memory is not None:
        log.info("training needs %s", memory)
    step = EagerStep(posterior, optimizer, clip=clip, precision=precision, accumulate=accumulate)
    return AdaptiveStep(step, engine, batch, count=count)


__all__ = ["AdaptiveStep", "CapturedStep", "EagerStep", "Plan", "build_step", "make_plan", "make_strategy"]
