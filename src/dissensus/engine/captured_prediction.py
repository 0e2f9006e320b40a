"""Prediction from CUDA graphs: for a batch shape that recurs, a graph is captured and replayed, with the same results.

For small batches, kernel launches cost more than arithmetic: ten ResNets on 16 images take 18 ms, and 2 ms from a graph.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.member_runner import ONE_LANE, FallbackChain, first_line
from dissensus.engine.cuda_graphs import CapturedCalls, Lanes, shape_key
from dissensus.engine.cudnn_timing import timed_convolutions
from dissensus.kernels.fused_norm import fuse_layers
from dissensus.kernels.weight_cache import WeightCache, use_weight_cache
from dissensus.numerics.randomness import preserve_random_state

log = logging.getLogger("dissensus")

DEVICE = "cuda"  # "cpu" in tests with graphs that are none
FEW = 5  # batches for which a graph does not pay
MANY = 500  # batches for which cuDNN may try its algorithms first, which takes about a second


class CapturedFunction(CapturedCalls):
    """A function of a batch that runs drawn members; on a GPU it is replayed from a graph for shapes seen before.

    Args:
        context: the context in which the function is called (eval mode, mixed precision).
        plain: whether the function is Python code, not compiled: its members may run in parallel on streams, and its layers in
            fewer kernels (`kernels/fused_norm.py`).
        keeps: whether weights stay the same for all calls: what follows from them alone is then computed once. Leave it
            False if the user's code runs in between.
        half: whether the context casts weights.
        count: of the batches to come, where it is known: for few a capture does not pay, for very many cuDNN chooses algorithms
            by timing, and in between the first batch is already replayed, if kernels can be loaded without it.
    """

    log_name = "prediction"
    warm_up = 1
    relaxed = True

    def __init__(
        self,
        function: Callable[[Inputs], tuple[Tensor, ...]],
        drawn: DrawnFunctions,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        plain: bool = True,
        keeps: bool = False,
        half: bool = False,
        count: int | None = None,
    ) -> None:
        super().__init__()
        self.failed = count is not None and count < FEW
        self.timed = count is not None and count >= MANY
        self.at_once = count is not None and not self.timed and plain
        self.function, self.plain = function, plain
        self.compiled = not plain
        self.drawn, self.context, self.half = drawn, context, half
        held = chain(drawn.parameters(), drawn.buffers())
        self.tensors = [each for each in held if type(each) in (Tensor, nn.Parameter)]
        self.places: list[int] = []  # of these tensors in memory, where graphs read them
        self.caches_weights = keeps and plain
        self.weight_cache: WeightCache | None = None
        # whether weights have been written to, and whether casts were looked for
        self.has_dropped_cache = self.has_checked_casts = False
        self.implementations = FallbackChain(_note_unfused, fused=self._run_fused, unfused=function)
        self.side_stream: torch.cuda.Stream | None = None  # where what is kept is computed during a capture

    def __call__(self, x: Inputs) -> tuple[Tensor, ...]:
        """function(x)."""
        tensors = batches.input_tensors(x)
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or (device := devices.pop()).type != DEVICE:
            with self.context():
                return self.function(x)
        key = shape_key(tensors)
        # graphs and streams belong to the current device
        with torch.cuda.device(device), preserve_random_state(device):
            self._drop_if_changed()
            graph = self.graphs.get(key)
            if graph is None and (self._can_capture_first() or self.should_capture(key)):
                with self.context():
                    held = batches.map_tensors(x, torch.clone)
                    self._load_kernels(held)
                    graph = self.capture(key, lambda: self._run_for_capture(held), batches.input_tensors(held))
                if graph is None:
                    self.graphs.clear()
                elif self.side_stream is not None:
                    torch.cuda.current_stream().wait_stream(self.side_stream)
            if graph is not None:
                return tuple(result.clone() for result in graph.replay(tensors))
            timing = timed_convolutions(device) if self.timed else nullcontext()
            with self.context(), self.record_constants(key), timing:
                return self.function(x)

    def _can_capture_first(self) -> bool:
        """Whether this is the first batch of several and can be captured before any has run."""
        at_once, self.at_once = self.at_once, False
        return at_once and not self.failed and self._loads_kernels

    @property
    def _loads_kernels(self) -> bool:
        fused = "fused" in self.implementations.implementations
        return self.plain and self.drawn.particles.how != "vectorised" and fused

    def _drop_if_changed(self) -> None:
        """Begins anew if weights have been moved, or written to since something of them was kept.

        At the second time, as with a network that writes to them itself, nothing is kept any more.
        """
        places = [tensor.data_ptr() for tensor in self.tensors]
        written = self.weight_cache is not None and not self.weight_cache.is_fresh()
        if places == self.places and not written:
            return
        self.places = places
        self.graphs.clear()
        self.occurrences.clear()
        self.caches_weights = self.caches_weights and not (written and self.has_dropped_cache)
        self.has_dropped_cache |= written
        self.weight_cache = WeightCache(self.tensors) if self.caches_weights else None
        self.has_checked_casts = False

    def _load_kernels(self, x: Inputs) -> None:
        """Runs the first member as a graph will: libraries load their kernels, which they cannot do in a capture."""
        if not self._loads_kernels:
            return

        def lane(index: int) -> AbstractContextManager[object]:
            if index > 0:
                raise _FirstMemberDone
            return nullcontext()

        try:
            with self._cache_context(), self.drawn.particles.runner.use_lanes((lane, lambda: None)):
                self._run_fused(x)
        except _FirstMemberDone:
            pass
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a user's network may do anything
            del self.implementations.implementations["fused"]
            _note_unfused("fused", first_line(error))

    def _run(self, x: Inputs) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.implementations(x) if self.plain else self.function(x)
        return found

    def _run_fused(self, x: Inputs) -> tuple[Tensor, ...]:
        with fuse_layers():
            return self.function(x)

    @contextmanager
    def _cache_context(self, beside: torch.cuda.Stream | None = None) -> Iterator[None]:
        if self.weight_cache is None:
            yield
            return
        # To look at casts costs time at every operation: done once, and then only if there are some to be answered.
        casts = self.half and (self.weight_cache.has_casts or not self.has_checked_casts)
        self.has_checked_casts = True
        with use_weight_cache(self.weight_cache, casts=casts, beside=beside):
            yield

    def _run_for_capture(self, x: Inputs) -> tuple[Tensor, ...]:
        """function(x) as a graph holds it: members in parallel on streams, and what is kept is read."""
        self.side_stream = self.side_stream or (torch.cuda.Stream() if DEVICE == "cuda" else None)
        lanes = Lanes().for_members(self.drawn.members) if self.plain else ONE_LANE
        with self._cache_context(self.side_stream), self.drawn.particles.runner.use_lanes(lanes):
            found = self._run(x)
        if self.weight_cache is not None and not self.weight_cache.is_fresh():
            raise RuntimeError("the network changes its weights")
        return found


class _FirstMemberDone(Exception):
    """The first member has run."""


def _note_unfused(_: str, reason: str, *args: object) -> None:
    log.info("prediction runs layer by layer: fused kernels fail for this network (%s)", reason)
