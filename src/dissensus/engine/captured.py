"""The whole training step in one CUDA graph: forward, backward, clipping, optimiser and the method's clock.

A graph is captured for a shape of batch once that shape has come a few times. Other batches (the first ones, a last partial
one) run as plain steps, with the same results. So does all that cannot be captured; the log says so once.
"""

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from dissensus.core.batch import Batch
from dissensus.core.running import first_line
from dissensus.engine.eager import EagerStep
from dissensus.engine.lanes import capturing
from dissensus.engine.optimisers import can_be_captured, make_capturable

log = logging.getLogger("dissensus")

WARM_UP = 3  # plain steps before a capture; they train like any others
MOST_GRAPHS = 3


class CapturedStep:
    """One optimiser step of all members per batch, replayed from the graph of the batch's shape where there is one."""

    def __init__(self, step: EagerStep) -> None:
        self.step = step
        self.posterior = step.posterior
        self.graphs: dict[tuple[Any, ...], _Graph] = {}
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.failed = False
        self.pool: Any = None
        self.side = torch.cuda.Stream()
        self.plain_last = True
        self.restore = (
            make_capturable(step.optimizer, self.posterior.device) if can_be_captured(step.optimizer) else None
        )
        if self.restore is None:
            self._give_up(f"{type(step.optimizer).__name__} has no step that can be captured")
        if not self.posterior.capturable:
            self._give_up(f"{type(self.posterior).__name__} does not do the same at every step")
        if step.accumulate > 1:
            self._give_up("gradients are accumulated over several batches")

    def __call__(self, batch: Batch) -> Tensor:
        """(M,) losses on the batch; the next call overwrites them."""
        shapes = ((tensor.shape, tensor.dtype) for tensor in batch.tensors())
        key = (batch.weight is None, self.posterior.training, *shapes)
        graph = self.graphs.get(key)
        if graph is None and not self.failed and len(self.graphs) < MOST_GRAPHS:
            self.seen[key] += 1
            if self.seen[key] > WARM_UP:
                graph = self._capture(key, batch)
        if graph is None:
            self.plain_last = True
            return self._plain(batch)
        if self.plain_last:  # the plain step has put its own gradients into .grad
            graph.show_gradients()
            self.plain_last = False
        losses = graph.replay(batch)
        if not graph.observes:
            self.step.guard.observe()
        return losses

    def finish(self) -> None:
        self.step.finish()

    def check(self) -> None:
        """Raises Diverged for the first step that was skipped because losses or gradients were not finite."""
        self.step.check()

    def close(self) -> None:
        """Gives the optimiser its settings back and frees the graphs."""
        torch.cuda.synchronize()
        self.graphs.clear()
        if self.restore is not None:
            self.restore()
        self.step.close()

    def _plain(self, batch: Batch) -> Tensor:
        # On a side stream: memory that is allocated before a capture must not be tied to the default stream.
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            losses = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.side)
        return losses

    def _capture(self, key: tuple[Any, ...], batch: Batch) -> "_Graph | None":
        steps = self.posterior.steps.clone()
        try:
            graph = _Graph(self.step, batch, pool=self.pool)
        except Exception as error:  # whatever a user's network does that a capture refuses
            torch.cuda.synchronize()
            self.posterior.steps.copy_(steps)
            self._give_up(first_line(error))
            return None
        self.pool = graph.graph.pool()
        self.graphs[key] = graph
        return graph

    def _give_up(self, reason: str) -> None:
        if not self.failed:
            log.info("the training step is not captured in a CUDA graph: %s", reason)
        self.failed = True


class _Graph:
    """One captured step for one shape of batch, with the memory it reads and writes."""

    def __init__(self, step: EagerStep, batch: Batch, *, pool: Any) -> None:
        self.batch = batch.map(torch.clone)
        # A method's own `observe` may do what a graph cannot hold: then it is called after each replay.
        self.observes = not step.posterior.observes
        self.graph = torch.cuda.CUDAGraph()
        step.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        with capturing(self.graph, pool=pool):
            self.losses = step.gradients_and_update(self.batch, observe=self.observes)
        self.gradients = [(p, p.grad) for group in step.optimizer.param_groups for p in group["params"]]

    def replay(self, batch: Batch) -> Tensor:
        for mine, given in zip(self.batch.tensors(), batch.tensors(), strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.losses

    def show_gradients(self) -> None:
        """Points every `.grad` at the memory this graph writes."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
