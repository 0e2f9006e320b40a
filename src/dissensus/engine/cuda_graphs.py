"""CUDA streams and graphs, the constants that a forward makes on the host, and prediction from graphs.

Members run over several streams. For a batch shape that recurs, the kernels of a call are captured and replayed. A graph cannot
hold the copy of a tensor to the device, as in `x.new_tensor([0.1, 0.2])`: it is made in the calls before, where it must always
have had the same value, and the graph copies it from there. Graphs of training steps compare again in every epoch.
"""

import contextlib
import functools
import logging
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
from dissensus.core.member_runner import ONE_LANE, PROCESS, FallbackChain, MemberLanes, first_line
from dissensus.engine.break_even import FUSED_PREDICTIONS, BreakEven, is_deterministic, known_pace
from dissensus.kernels.fused_norm import can_fuse_layers, fuse_layers
from dissensus.kernels.weight_cache import WeightCache, use_weight_cache
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.torch_modes import convolution_timing, set_attributes, thread
from dissensus.utils.torch_private import is_transformed, outside_transforms

log = logging.getLogger("dissensus")

MOST_GRAPHS = 3
_capture_stream = functools.cache(torch.cuda.Stream)  # of a device: only captures on one stream share memory


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
        constants: "Constants | None" = None,
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
    """As `torch.cuda.graph`, but a small cache is not emptied, which can take as long as the capture."""
    held = torch.cuda.memory_stats_as_nested_dict()
    reserved, used = (held[f"{name}_bytes"]["all"]["current"] for name in ("reserved", "allocated"))
    if reserved - used > torch.cuda.mem_get_info()[0] / 16:  # earlier graphs leave what only this frees
        torch.cuda.empty_cache()
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed" if relaxed else "thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def _new_graph(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


def for_graph() -> AbstractContextManager[None]:
    """Inside, members run as a graph will hold them: before a capture, to load kernels, and in it."""
    return set_attributes(thread, for_graph=True)


class CapturedCalls:
    """Base class of calls replayed from graphs, one for each of the first frequent shapes; others run as plain calls."""

    log_name: ClassVar[str]  # name in the log
    warm_up: int  # calls before a capture, as a graph will hold them
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
        self, key: Hashable, run: Callable[[], Any], inputs: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> Graph | None:
        """A graph for these shapes, in the memory pool of the earlier ones; None if the capture fails."""
        # If it fails, it is tried once more after plain calls in which the constants that the function makes are kept.
        pool, constants = next((graph.graph.pool() for graph in self.graphs.values()), None), self.constants.get(key)
        try:
            self.graphs[key] = Graph(
                run, inputs, pool=pool, generators=generators, constants=constants, relaxed=self.relaxed
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


FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as)
TORCH, LIBRARY = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


class NotConstant(RuntimeError):
    """What a forward sends to the device changes from call to call."""

    def __init__(self, where: str | None) -> None:
        super().__init__(f"tensors made on the host change from call to call ({where})")


class HostConstant(NamedTuple):
    """One call that made a tensor from the host's data: the data, and the tensor if it is on the device."""

    function: Any
    data: Tensor
    made: Tensor | None
    needs_grad: bool


class Constants(TorchFunctionMode):
    """Keeps the tensors that a forward makes from the host's data, and hands out copies of them; `on`: the kind of device."""

    def __init__(self, on: str = "cuda") -> None:
        super().__init__()
        self.device_type = on
        self.entries: list[HostConstant] = []
        self.varying: str | None = None  # the first line of code whose tensor differed between calls
        self._position = 0
        self._reuses = False

    @contextlib.contextmanager
    def record_constants(self) -> Iterator[None]:
        """A call before the capture, or one that looks whether constants are still the same (`varying`)."""
        first = not self.entries
        self._position, self._reuses = 0, False
        with self:
            yield
        if not first and self._position != len(self.entries):
            self.varying = self.varying or "a number of them that varies"

    @contextlib.contextmanager
    def reuse_constants(self) -> Iterator[None]:
        """The call that is captured."""
        self._position, self._reuses = 0, True
        if self.varying is not None:
            raise NotConstant(self.varying)
        with self:
            yield
        if self._position != len(self.entries):
            raise NotConstant("a number of them that varies")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if function is Tensor.__getitem__ and args[0].device.type == self.device_type:
            several = isinstance(args[1], tuple)
            index = [self._device_index(each, args[0].device) for each in (args[1] if several else (args[1],))]
            return function(args[0], tuple(index) if several else index[0])
        data = _host_data(function, args, kwargs)
        if data is None:
            return function(*args, **kwargs)
        return self._reuse_or_make(function, data, lambda: function(*args, **kwargs))

    def _device_index(self, index: Any, device: torch.device) -> Any:
        """An index on the device, if it is a list or an array of integers."""
        data = _as_tensor(index) if isinstance(index, list | np.ndarray | Tensor) else None
        if data is None or data.dtype == torch.bool or data.ndim == 0 or data.is_floating_point():
            return index
        return self._reuse_or_make(Tensor.__getitem__, data, lambda: data.to(device))

    def _reuse_or_make(self, function: Any, data: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """make(), or a copy of what it made before."""
        number, self._position = self._position, self._position + 1
        if number < len(self.entries):
            before = self.entries[number]
            if before.function is not function or (before.made is not None and not _has_same_bits(before.data, data)):
                self.varying = self.varying or user_line()
                if self._reuses:
                    raise NotConstant(self.varying)
            if not self._reuses or before.made is None:
                return make()
            copy = before.made.clone()
            return copy.requires_grad_() if before.needs_grad else copy
        if self._reuses:
            raise NotConstant(user_line())
        made = make()
        with outside_transforms():  # what is kept outlives the function transforms that the call is in
            plain = data.clone()
            there = plain.to(made.device, made.dtype, copy=True) if made.device.type == self.device_type else None
        self.entries.append(HostConstant(function, plain, there, made.requires_grad))
        return made


def failure_reason(error: Exception) -> str:
    """Why a call could not be captured, with the line of the user's code."""
    line = None if isinstance(error, NotConstant) else user_line(error)
    return first_line(error) + (f" ({line})" if line else "")


def user_line(error: BaseException | None = None) -> str | None:
    """ "file.py:12: code" of the innermost line outside of torch and this library: of an error, or of this call."""
    if error is None:
        return _innermost_line(traceback.extract_stack())
    found = None
    while error is not None:  # leaving a failed capture raises another error: the line of the first one counts
        found = _innermost_line(traceback.extract_tb(error.__traceback__)) or found
        error = error.__context__
    return found


def _innermost_line(outer_first: traceback.StackSummary) -> str | None:
    for each in reversed(outer_first):
        if not each.filename.startswith((TORCH, LIBRARY, contextlib.__file__)):
            return f"{Path(each.filename).name}:{each.lineno}: {each.line}"
    return None


def _host_data(function: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The host's data that a call would send to a device, as a tensor; None for all other calls."""
    if function in MOVES:
        return _as_tensor(args[0])
    if function in FROM_DATA:
        return _as_tensor(args[0] if args else kwargs.get("data", kwargs.get("obj")))
    if function is Tensor.new_tensor:
        return _as_tensor(args[1] if len(args) > 1 else kwargs.get("data"))
    return None


def _as_tensor(data: Any) -> Tensor | None:
    """The host's data as a tensor without a gradient; None for a tensor on another device, or one that is trained."""
    if isinstance(data, Tensor):
        wrapped = is_transformed(data)
        return None if data.device.type != "cpu" or data.requires_grad or wrapped else data
    try:
        with outside_transforms():
            return torch.from_numpy(np.array(data))
    except (TypeError, ValueError, RuntimeError):  # no numbers, or tensors of a device among them
        return None


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same bits."""
    with outside_transforms():
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))


def timed_convolutions(device: torch.device) -> AbstractContextManager[None]:
    """Inside, cuDNN times its algorithms on a GPU, if the user wants that or does not want deterministic results."""
    # It keeps the choice, also for graphs and for steps outside. Two runs may choose algorithms that round differently.
    wanted = device.type == "cuda" and not is_deterministic()
    return convolution_timing(wanted or torch.backends.cudnn.benchmark)


DEVICE = "cuda"  # "cpu" in tests with graphs that are none
UNFUSED = "prediction runs layer by layer: fused kernels fail for this network (%s)"


class CapturedFunction(CapturedCalls):
    """A function of a batch that runs drawn members; on a GPU it is replayed from a graph for shapes seen before.

    Args:
        context: the context in which the function is called (eval mode, mixed precision).
        plain: whether the function is not compiled: members may run in parallel on streams, and layers in fewer kernels.
        keeps: whether weights stay the same between calls, as no user's code runs: what follows from them is computed once.
        half: whether the context casts weights.
        count: of the batches to come, where it is known. Graphs are captured once that pays (`break_even`).
    """

    log_name = "prediction"
    warm_up = 0
    relaxed = True

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        drawn: DrawnFunctions,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        plain: bool = True,
        keeps: bool = False,
        half: bool = False,
        count: int | None = None,
    ) -> None:
        super().__init__()
        self.function, self.plain, self.count = function, plain, count
        self.ways: dict[Hashable, BreakEven] = {}  # by shape
        self.compiled = not plain
        self.drawn, self.context, self.half = drawn, context, half
        self.places: list[int] = []  # of these tensors in memory, where graphs read them
        self.caches_weights = keeps and plain
        self.weight_cache: WeightCache | None = None
        # whether weights have been written to, and whether casts were looked for
        self.has_dropped_cache = self.has_checked_casts = False
        self.implementations = FallbackChain(UNFUSED, fused=self._run_fused, unfused=function)
        self.side_stream: torch.cuda.Stream | None = None  # where what is kept is computed during a capture

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """What the functions read."""
        held = chain(self.drawn.parameters(), self.drawn.buffers())
        return [each for each in held if type(each) in (Tensor, nn.Parameter)]

    def __call__(self, *parts: Inputs) -> tuple[Tensor, ...]:
        """function(x) of each part, joined; a function that is not compiled takes several."""
        devices = {tensor.device for tensor in batches.input_tensors(parts[0])}
        if len(devices) != 1 or (device := devices.pop()).type != DEVICE:
            with self.context():
                return self._run_parts(parts)
        # graphs and streams belong to the current device
        with torch.cuda.device(device), preserve_random_state(device):
            keys = [shape_key(batches.input_tensors(x)) for x in parts]
            if not self.graphs and all(self._way(key, device).is_settled for key in dict.fromkeys(keys)):
                with self.context():
                    return self._run_parts(parts)
            self._drop_if_changed()
            return _join_parts(
                [self._run_part(key, x, self._way(key, device)) for key, x in zip(keys, parts, strict=True)]
            )

    def _run_parts(self, parts: Sequence[Inputs]) -> tuple[Tensor, ...]:
        return self.function(*parts) if self.plain else _join_parts([self.function(x) for x in parts])

    def _run_part(self, key: Hashable, x: Inputs, way: BreakEven) -> tuple[Tensor, ...]:
        if way.is_settled:
            return self._run(key, x)
        way.begin_call()
        if way.prepared_at is not None and key not in self.graphs and self.should_capture(key):
            self._capture_graph(key, x, way)
        found = self._run(key, x)
        way.end_call(fast=key in self.graphs)
        if way.is_settled and not (way.by_count or way.pace.saves):
            self.graphs.pop(key, None)
        return found

    def _run(self, key: Hashable, x: Inputs) -> tuple[Tensor, ...]:
        if (graph := self.graphs.get(key)) is not None:
            return tuple(result.clone() for result in graph.replay(batches.input_tensors(x)))
        with self.context(), self.record_constants(key):
            return self.function(x)

    def _way(self, key: Hashable, device: torch.device) -> BreakEven:
        if key not in self.ways:
            how = (self.half, self.compiled, self.caches_weights, str(device))
            plans, fusing = self.drawn.particles.runner.plans, FUSED_PREDICTIONS * self._loads_kernels
            pace = known_pace(plans, ("prediction", *how, key), fusing=fusing)
            count = None if self.ways else self.count  # the first shape's; others, as of a last batch, are rare
            at_once = pace.is_known and isinstance(self.drawn, MemberFunctions)  # others draw in their first call
            self.ways[key] = BreakEven(pace, device, count, first=0 if at_once else 1)
        if self.failed or (len(self.graphs) == MOST_GRAPHS and key not in self.graphs):
            self.ways[key].settle()
        return self.ways[key]

    def _capture_graph(self, key: Hashable, x: Inputs, way: BreakEven) -> None:
        timing = timed_convolutions(torch.device(DEVICE)) if way.times_convolutions else nullcontext()
        if not way.fused:
            self.implementations.implementations.pop("fused", None)
        with self.context():
            held = batches.map_tensors(x, torch.clone)
            with timing:
                self._load_kernels(held)
            graph = self.capture(key, lambda: self._run_for_capture(held), batches.input_tensors(held), ())
        if graph is None:
            self.graphs.clear()
        elif self.side_stream is not None:
            torch.cuda.current_stream().wait_stream(self.side_stream)

    @functools.cached_property
    def _loads_kernels(self) -> bool:
        particles, in_turn = self.drawn.particles, self.drawn.members == 1  # without vmap, in which nothing is fused
        return self.plain and (in_turn or particles.how != "vectorised") and can_fuse_layers(particles.templates)

    def _drop_if_changed(self) -> None:
        """Begins anew if weights have been moved, or written to since something of them was kept."""
        # At the second time, as with a network that writes to them itself, nothing is kept any more.
        places = [tensor.data_ptr() for tensor in self.tensors]
        written = self.weight_cache is not None and not self.weight_cache.is_fresh()
        if places == self.places and not written:
            return
        if self.places:  # how many batches come before the next change, nobody knows
            self.count = None
            self.graphs.clear()
            self.ways.clear()
            self.occurrences.clear()
        self.places = places
        self.caches_weights = self.caches_weights and not (written and self.has_dropped_cache)
        self.has_dropped_cache |= written
        self.weight_cache = WeightCache(self.tensors) if self.caches_weights else None
        self.has_checked_casts = False

    def _load_kernels(self, x: Inputs) -> None:
        """Runs the first member as a graph will: libraries load their kernels, which they cannot do in a capture."""
        if not self._loads_kernels or "fused" not in self.implementations.implementations:
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
            log.info(UNFUSED, first_line(error))

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
            found: tuple[Tensor, ...] = self.implementations(x) if self.plain else self.function(x)
        if self.weight_cache is not None and not self.weight_cache.is_fresh():
            raise RuntimeError("the network changes its weights")
        return found


def _join_parts(found: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return found[0] if len(found) == 1 else tuple(torch.cat(each, 1) for each in zip(*found, strict=True))


class _FirstMemberDone(Exception):
    """The first member has run."""
