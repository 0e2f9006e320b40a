"""Prediction from CUDA graphs: for a shape of batch that comes again, a graph is captured and replayed, with the same results.

With small batches, launches cost more than arithmetic: ten ResNets on 16 images take 18 ms when called, 2 ms from a graph.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.functions import DrawnFunctions
from dissensus.core.running import first_line
from dissensus.engine.lanes import Lanes, capturing
from dissensus.engine.runner import in_lanes
from dissensus.numerics.randomness import same_random_state

log = logging.getLogger("dissensus")

Function = Callable[[Inputs], tuple[Tensor, ...]]

WARM_UP = 2  # plain calls before a capture
MOST_GRAPHS = 3


class CapturedFunction:
    """A function of a batch that runs drawn members; on a GPU replayed from a graph for batches of a shape seen before.

    `context()`: what the function is called in (evaluation mode, mixed precision). `lanes`: whether members may run on
    streams side by side, for which a compiled function would have to be compiled anew. The members' tensors must stay
    where they are for as long as this object is used. What cannot be captured runs plainly; the log says so once.
    """

    def __init__(
        self,
        function: Function,
        drawn: DrawnFunctions,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        lanes: bool = True,
    ) -> None:
        self.function = function
        self.lanes = lanes
        self.drawn = drawn
        self.context = context
        self.graphs: dict[Any, _Graph] = {}
        self.seen: Counter[Any] = Counter()
        self.failed = False

    def __call__(self, x: Inputs) -> tuple[Tensor, ...]:
        """function(x)."""
        device = _device(x)
        if self.failed or device is None:
            return self._plain(x)
        with torch.cuda.device(device), same_random_state(device):  # graphs and streams belong to the current device
            return self._on_gpu(x)

    def _on_gpu(self, x: Inputs) -> tuple[Tensor, ...]:
        key = tuple((tensor.shape, tensor.dtype) for tensor in batches.tensors(x))
        graph = self.graphs.get(key)
        if graph is None:
            self.seen[key] += 1
            if self.seen[key] > WARM_UP and len(self.graphs) < MOST_GRAPHS:
                graph = self._capture(key, x)
        return self._plain(x) if graph is None else graph.replay(x)

    def _plain(self, x: Inputs) -> tuple[Tensor, ...]:
        with self.context():
            return self.function(x)

    def _capture(self, key: Any, x: Inputs) -> "_Graph | None":
        try:
            with self.context():
                self.graphs[key] = _Graph(self.function, self.drawn, x, lanes=self.lanes)
        except Exception as error:  # whatever a user's network does that a capture refuses
            torch.cuda.synchronize()
            self.failed = True
            self.graphs.clear()
            log.info("prediction is not captured in a CUDA graph: %s", first_line(error))
            return None
        return self.graphs[key]


class _Graph:
    """One captured call, with the memory it reads and writes."""

    def __init__(self, function: Function, drawn: DrawnFunctions, x: Inputs, *, lanes: bool) -> None:
        self.x = batches.apply(x, torch.clone)
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        runner, members = drawn.particles.runner, drawn.members
        with capturing(self.graph), in_lanes(runner, *Lanes().for_members(members)) if lanes else nullcontext():
            self.results = function(self.x)

    def replay(self, x: Inputs) -> tuple[Tensor, ...]:
        for mine, given in zip(batches.tensors(self.x), batches.tensors(x), strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)


def _device(x: Inputs) -> torch.device | None:
    """The GPU that all of x is on, if there is one."""
    devices = {tensor.device for tensor in batches.tensors(x)}
    return devices.pop() if len(devices) == 1 and all(device.type == "cuda" for device in devices) else None
