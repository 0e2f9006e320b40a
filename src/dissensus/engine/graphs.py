"""CUDA streams and graphs.

Members take streams in turn, so that the small kernels of several run together. A call's kernels are captured for a shape of
batch that comes again, and replayed, with the same results.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from dissensus.core.running import MemberLanes, first_line
from dissensus.core.turns import PROCESS

log = logging.getLogger("dissensus")

MOST_GRAPHS = 3


class Graph:
    """One captured call of `function`, with the memory that it reads (`inputs`) and writes (`results`).

    `generators`: those that it draws from beside torch's own; each replay takes new numbers from them.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        inputs: Sequence[Tensor] = (),
        *,
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.inputs = inputs
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        torch.cuda.synchronize()
        with PROCESS, warnings.catch_warnings():
            # Of an empty graph the error that emptied it says more.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.results = function()

    def replay(self, given: Sequence[Tensor] = ()) -> Any:
        """What the function gives for these inputs; the next replay overwrites it."""
        for mine, new in zip(self.inputs, given, strict=True):
            mine.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.results


class Captured:
    """Base class of what is replayed from graphs, one for each of the first few shapes that come often enough.

    What cannot be captured runs plainly; the log says so once.
    """

    what: ClassVar[str]  # for the log
    warm_up: ClassVar[int]  # plain calls before a capture

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Graph] = {}
        self.seen: Counter[Hashable] = Counter()
        self.failed = False

    def due(self, key: Hashable) -> bool:
        """Whether shapes without a graph, which have come once more, get one now."""
        if self.failed or len(self.graphs) == MOST_GRAPHS:
            return False
        self.seen[key] += 1
        return self.seen[key] > self.warm_up

    def capture(
        self,
        key: Hashable,
        function: Callable[[], Any],
        inputs: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> Graph | None:
        """A graph for these shapes, in the memory of those before; None where there can be none."""
        pool = next((graph.graph.pool() for graph in self.graphs.values()), None)
        try:
            self.graphs[key] = Graph(function, inputs, pool=pool, generators=generators)
        except Exception as error:  # whatever a user's network does that a capture refuses
            torch.cuda.synchronize()
            self.give_up(first_line(error))
        return self.graphs.get(key)

    def give_up(self, reason: str) -> None:
        """Captures nothing from now on."""
        if not self.failed:
            log.info("%s is not captured in a CUDA graph: %s", self.what, reason)
        self.failed = True


def shapes(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """What tensors must have in common with those that a graph was captured for."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


class Lanes:
    """A fixed number of streams that members take in turn."""

    def __init__(self, most: int = 10) -> None:
        self.most = most
        self.streams: list[torch.cuda.Stream] = []

    def for_members(self, count: int) -> MemberLanes:
        """(lane, join): lane(i) is the context that member i runs in; join() makes the current stream wait for all."""
        while len(self.streams) < min(self.most, count):
            self.streams.append(torch.cuda.Stream())
        main = torch.cuda.current_stream()

        def lane(index: int) -> AbstractContextManager[object]:
            stream = self.streams[index % len(self.streams)]
            stream.wait_stream(main)  # what the member reads was written there
            return torch.cuda.stream(stream)

        def join() -> None:
            for stream in self.streams:
                main.wait_stream(stream)

        return lane, join
