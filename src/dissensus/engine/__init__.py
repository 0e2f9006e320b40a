"""How members run: loop, vectorised or streamed, compiled or not, captured in a CUDA graph or not."""

import logging
from dataclasses import replace

import torch

from dissensus.core.batch import Batch
from dissensus.core.posterior import Posterior
from dissensus.engine.fast_optimisers import use_channels_last
from dissensus.engine.memory import Memory
from dissensus.engine.strategies import Plan, make_plan, make_strategy
from dissensus.engine.training_step import CapturedStep, EagerStep

log = logging.getLogger("dissensus")

Step = EagerStep | CapturedStep


def build_step(
    engine: str,
    posterior: Posterior,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    steps: int,
    memory: Memory | None = None,
    clip: float | None = None,
    precision: torch.dtype | None = None,
    accumulate: int = 1,
) -> tuple[Step, Plan]:
    """(a training step, its plan) for batches like this one and a run of this many steps."""
    use_channels_last(posterior)  # first: the optimiser's states follow
    if memory is not None and engine == "auto" and not memory.fits_at_once(posterior.device):
        log.info("members run one after the other: there is not enough memory for all at once")
        engine = "loop"
    chosen = make_plan(engine, posterior, batch, precision=precision, steps=steps)
    if memory is not None:
        log.info("training needs %s", replace(memory, taken=chosen.taken))
    strategy = chosen.tried or make_strategy(chosen.kind, compiled=chosen.compiled)
    step = EagerStep(posterior, optimizer, strategy=strategy, clip=clip, precision=precision, accumulate=accumulate)
    return (CapturedStep(step) if chosen.captured else step), chosen


__all__ = ["CapturedStep", "EagerStep", "Plan", "Step", "build_step", "make_plan"]
