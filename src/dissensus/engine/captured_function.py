"""Prediction from CUDA graphs: for a batch shape that recurs, a graph is captured and replayed, with the same results.

For small batches, kernel launches cost more than arithmetic: ten ResNets on 16 images take 18 ms, and 2 ms from a graph.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.functions import DrawnFunctions
from dissensus.engine.graphs import Captured, Lanes, shapes
from dissensus.numerics.randomness import same_random_state


class CapturedFunction(Captured):
    """A function of a batch that runs drawn members; on a GPU it is replayed from a graph for shapes seen before.

    `context()`: the context in which the function is called (eval mode, mixed precision). `lanes`: whether members may run
    in parallel on streams, for which a compiled function would be compiled again. The members' tensors must not be moved
    while this object is in use.
    """

    what = "prediction"
    warm_up = 2

    def __init__(
        self,
        function: Callable[[Inputs], tuple[Tensor, ...]],
        drawn: DrawnFunctions,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        lanes: bool = True,
    ) -> None:
        super().__init__()
        self.function = function
        self.lanes = lanes
        self.compiled = not lanes
        self.drawn = drawn
        self.context = context

    def __call__(self, x: Inputs) -> tuple[Tensor, ...]:
        """function(x)."""
        tensors = batches.tensors(x)
        devices = {tensor.device for tensor in tensors}
        if self.failed or len(devices) != 1 or (device := devices.pop()).type != "cuda":
            return self._plain(x)
        key = shapes(tensors)
        with torch.cuda.device(device), same_random_state(device):  # graphs and streams belong to the current device
            graph = self.graphs.get(key)
            if graph is None and self.due(key):
                with self.context():
                    held = batches.apply(x, torch.clone)
                    graph = self.capture(key, lambda: self._beside(held), batches.tensors(held))
                if graph is None:
                    self.graphs.clear()
            if graph is not None:
                return tuple(result.clone() for result in graph.replay(tensors))
            with self.watching(key):
                return self._plain(x)

    def _plain(self, x: Inputs) -> tuple[Tensor, ...]:
        with self.context():
            return self.function(x)

    def _beside(self, x: Inputs) -> tuple[Tensor, ...]:
        """function(x) with members in parallel on streams, if `lanes` allows it."""
        if not self.lanes:
            return self.function(x)
        with self.drawn.particles.runner.in_lanes(Lanes().for_members(self.drawn.members)):
            return self.function(x)
