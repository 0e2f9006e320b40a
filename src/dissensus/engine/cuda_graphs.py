"""CUDA streams and graphs.

Members are spread over streams, so that small kernels of several members run together. For a batch shape that recurs, the
kernels of a call are captured and replayed, with the same results.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from dissensus.core.locks import PROCESS
from dissensus.core.member_runner import MemberLanes
from dissensus.engine.graph_constants import Constants, failure_reason

log = logging.getLogger("dissensus")

MOST_GRAPHS = 3


class Graph:
    """One captured call of `function`, with the memory that it reads (`inputs`) and writes (`results`).

    `generators`: generators used besides torch's own; each replay takes new numbers from them. `constants`: those that were
    kept in plain calls. `relaxed`: memory for other streams may be allocated meanwhile.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        inputs: Sequence[Tensor] = (),
        *,
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
        constants: Constants | None = None,
        relaxed: bool = False,
    ) -> None:
        self.inputs = inputs
        self.constants = constants  # every replay reads them
        self.graph = _new_graph(generators)
        torch.cuda.synchronize()
        with PROCESS, warnings.catch_warnings():
            # If the graph is empty, the error that caused it says more.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            try:
                reused = nullcontext() if constants is None else constants.reuse_constants()
                with _capture_into(self.graph, pool, relaxed=relaxed), reused:
                    self.results = function()
            except Exception:
                # torch's random generators stay in the state of a capture that failed, and refuse to draw, until one ends well.
                with suppress(Exception):
                    torch.cuda.synchronize()
                    with _capture_into(_new_graph(generators), None, relaxed=relaxed):
                        torch.zeros((), device="cuda")
                raise

    def replay(self, given: Sequence[Tensor] = ()) -> Any:
        """The function's result for these inputs; the next replay overwrites it."""
        for mine, new in zip(self.inputs, given, strict=True):
            mine.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.results


@contextmanager
def _capture_into(graph: torch.cuda.CUDAGraph, pool: Any, *, relaxed: bool) -> Iterator[None]:
    """As `torch.cuda.graph`; if relaxed and memory is plenty, its cache is not emptied, which takes as long as a capture."""
    mode = "relaxed" if relaxed else "thread_local"
    if not relaxed or torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool, capture_error_mode=mode)
        try:
            yield
        finally:
            graph.capture_end()


def _new_graph(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


class CapturedCalls:
    """Base class of calls replayed from graphs, one graph for each of the first few shapes that occur often enough.

    Calls that cannot be captured run as plain calls, which is logged once.
    """

    log_name: ClassVar[str]  # name in the log
    warm_up: ClassVar[int]  # plain calls before a capture
    relaxed: ClassVar[bool] = False  # whether a capture may allocate memory for other streams
    compiled = False  # then constants are the compiler's: it would compile again to look at them

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Graph] = {}
        self.occurrences: Counter[Hashable] = Counter()
        self.constants: dict[Hashable, Constants] = {}  # of shapes whose capture failed without them
        self.failed = False

    def should_capture(self, key: Hashable) -> bool:
        """Counts an occurrence of shapes without a graph; returns whether to capture one now."""
        if self.failed or len(self.graphs) == MOST_GRAPHS:
            return False
        self.occurrences[key] += 1
        least = 2 if key in self.constants else 0  # two calls show what is constant
        return self.occurrences[key] > max(self.warm_up, least)

    def capture(
        self,
        key: Hashable,
        function: Callable[[], Any],
        inputs: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> Graph | None:
        """A graph for these shapes, in the memory pool of the earlier ones; None if the capture fails.

        If it fails, it is tried once more after plain calls in which the constants that the function makes are kept.
        """
        pool = next((graph.graph.pool() for graph in self.graphs.values()), None)
        constants = self.constants.get(key)
        try:
            self.graphs[key] = Graph(
                function, inputs, pool=pool, generators=generators, constants=constants, relaxed=self.relaxed
            )
        except Exception as error:  # a user's network may do anything that cannot be captured
            torch.cuda.synchronize()
            if constants is None and not self.compiled and not isinstance(error, torch.OutOfMemoryError):
                self.constants[key], self.occurrences[key] = Constants(), 0
            else:
                self.disable_capture(failure_reason(error))
        return self.graphs.get(key)

    def record_constants(self, key: Hashable) -> AbstractContextManager[object]:
        """The context of a plain call: it keeps constants for a capture to come, and compares those of a graph."""
        constants = self.constants.get(key)
        needed = key in self.graphs or not self.failed
        return constants.record_constants() if constants is not None and needed else nullcontext()

    def disable_capture(self, reason: str) -> None:
        """Captures nothing from now on."""
        if not self.failed:
            log.info("%s is not captured in a CUDA graph: %s", self.log_name, reason)
        self.failed = True


def shape_key(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """The properties of tensors that must equal those at capture."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


class Lanes:
    """A fixed number of streams, which members use in turn."""

    def __init__(self, most: int = 5) -> None:
        self.most = most
        self.streams: list[torch.cuda.Stream] = []

    def for_members(self, count: int) -> MemberLanes:
        """(lane, join): lane(i) is the context that member i runs in; join() makes the current stream wait for all."""
        while len(self.streams) < min(self.most, count):
            self.streams.append(torch.cuda.Stream())
        main = torch.cuda.current_stream()

        def lane(index: int) -> AbstractContextManager[object]:
            stream = self.streams[index % len(self.streams)]
            stream.wait_stream(main)  # the member's inputs were written there
            return torch.cuda.stream(stream)

        def join() -> None:
            for stream in self.streams:
                main.wait_stream(stream)

        return lane, join
