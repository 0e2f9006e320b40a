"""The whole training step in one CUDA graph: forward, backward, clipping, optimiser and the method's clock.

A graph is captured for a batch shape once that shape has occurred a few times. Other batches (the first ones, a smaller last
one) run as plain steps, with the same results. So do steps that cannot be captured, which is logged once.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from dissensus.core.batch import Batch
from dissensus.engine.cuda_graphs import CapturedCalls, Graph, shape_key
from dissensus.engine.eager_step import EagerStep
from dissensus.engine.fast_optimisers import can_be_captured, make_capturable
from dissensus.engine.graph_constants import NotConstant
from dissensus.utils.parameter_groups import count_optimizer_step


class CapturedStep(CapturedCalls):
    """One optimiser step of all members per batch, replayed from the graph for the batch's shape if there is one."""

    log_name = "the training step"
    warm_up = 3  # these steps train like any others

    def __init__(self, step: EagerStep) -> None:
        super().__init__()
        self.step = step
        self.finish = step.finish
        self.compiled = "compiled" in step.engine_name
        self.due_to_compare: set[Hashable] = set()  # shapes whose constants are compared in the next step
        self.posterior = step.posterior
        # parameters and the gradients that a graph writes
        self.gradients: dict[Hashable, list[tuple[Tensor, Tensor | None]]] = {}
        self.active_graph: Graph | None = None  # the graph whose gradients are in `.grad`
        self.side_stream = torch.cuda.Stream()
        # A method's own `observe` may do things that cannot be captured; it is then called after each replay.
        self.captures_observe = not (self.posterior.recorders or len(self.posterior.watchers))
        capturable = can_be_captured(step.optimizer)
        self.restore = make_capturable(step.optimizer, self.posterior.device) if capturable else None
        if self.restore is None:
            self.disable_capture(f"{type(step.optimizer).__name__} has no step that can be captured")
        if not self.posterior.capturable:
            self.disable_capture(f"{type(self.posterior).__name__} does different things at different steps")
        if step.accumulate > 1:
            self.disable_capture("gradients are accumulated over several batches")

    def __call__(self, batch: Batch) -> Tensor:
        """(M,) losses on the batch; the next call overwrites them."""
        tensors = batch.tensors()
        key = (batch.weight is None, self.posterior.training, *shape_key(tensors))
        compare = key in self.due_to_compare
        graph = None if compare else self.graphs.get(key)
        if graph is None and not compare and self.should_capture(key):
            graph = self._capture_graph(key, batch)
        if graph is not self.active_graph:  # a plain step, or another graph, has put its own gradients into .grad
            self.active_graph = graph
            for parameter, gradient in () if graph is None else self.gradients[key]:
                parameter.grad = gradient
        if graph is None:
            losses = self._run_plain(key, batch)
            if compare:
                self._compare_constants(key)
        else:
            losses = graph.replay(tensors)
            if not self.captures_observe:
                count_optimizer_step(self.step.optimizer)  # torch counts those that it calls
                self.step.guard.observe()
        return losses

    def check(self) -> None:
        """Raises Diverged if steps were bad; the constants of graphs are compared in the next step of their shape."""
        self.step.check()
        self.due_to_compare = self.graphs.keys() & self.constants.keys()

    @property
    def engine_name(self) -> str:
        """How members run, such as "loop+compiled+captured"."""
        return self.step.engine_name if self.failed else f"{self.step.engine_name}+captured"

    def close(self) -> None:
        """Restores the optimiser's settings and frees the graphs."""
        torch.cuda.synchronize()
        self.graphs.clear()
        self.gradients.clear()
        self.active_graph = None
        if self.restore is not None:
            self.restore()
        self.step.close()

    def _run_plain(self, key: Hashable, batch: Batch) -> Tensor:
        # On a side stream: memory allocated before a capture must not belong to the default stream.
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream), self.record_constants(key):
            losses = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.side_stream)
        return losses

    def _compare_constants(self, key: Hashable) -> None:
        """Drops the graphs if a constant has changed, for example in a callback."""
        self.due_to_compare.discard(key)
        if (line := self.constants[key].varying) is not None:
            torch.cuda.synchronize()
            self.graphs.clear()
            self.disable_capture(str(NotConstant(line)))

    def _capture_graph(self, key: Hashable, batch: Batch) -> Graph | None:
        # Batches are copied into these tensors, which every replay reads: the loader's own tensors may be freed by then.
        steps, held = self.posterior.steps.clone(), batch.map(torch.clone)
        self.posterior.zero_grad(set_to_none=True)  # all gradients: existing ones would be added to at every replay
        generators = getattr(self.step.optimizer, "generators", ())
        graph = self.capture(key, lambda: self.step(held, observe=self.captures_observe), held.tensors(), generators)
        if graph is None:
            self.posterior.steps.copy_(steps)
        else:
            self.gradients[key] = [(p, p.grad) for p in self.posterior.parameters()]
        return graph
