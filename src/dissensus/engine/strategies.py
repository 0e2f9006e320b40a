"""Strategies: how the gradients of all members on one batch are computed. All give the same results up to rounding.

    loop         one member after the other
    vectorised   all at once, `vmap` over stacked tensors
    streamed     one member after the other, spread over CUDA streams so that small kernels of several run together

each of them plain or compiled. If a gradient is 0 up to rounding (a bias before batch norm), Adam scales the rounding errors
to full steps, and these differ. A strategy changes only the random state, so that it can be timed on a real batch: `make_plan`
chooses the fast one by the kind of network and, on a GPU, by timing candidates once.
"""

from __future__ import annotations  # compilers cannot evaluate the types of inner functions

import functools
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.core.collectives import ALONE
from dissensus.core.gradients import Gradients, Objective, State, Strategy
from dissensus.core.member import run_compiled
from dissensus.core.member_runner import FallbackChain
from dissensus.core.posterior import Posterior
from dissensus.engine.cuda_graphs import Constants, Graph, Lanes, failure_reason, for_graph, timed_convolutions
from dissensus.engine.memory import UNMEASURED, PeakMemory, measure_peak, reset_peak
from dissensus.engine.training_step import autocast, request_key
from dissensus.kernels.fused_norm import fuse_layers
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import thread
from dissensus.utils.torch_private import ConvNd, free_cublas_workspaces, raise_at_recompile_limit

log = logging.getLogger("dissensus")

Kind = Literal["loop", "vectorised", "streamed"]
KEEPING, KEPT = "loop, graphs kept", 2**31  # a way to run members, and how many bytes of graphs it may keep
UNFUSED = "batch norm runs apart from the layers after it: fused kernels fail for this network (%s)"


def make_strategy(kind: Kind, *, compiled: bool = False, fused: bool = True, keeps: bool = False) -> FallbackChain:
    """The strategy of this kind; it falls back to a simpler one if it fails. `name` is the one in use: "loop+compiled".

    `fused`: whether graphs may hold layers fused; `keeps`: whether a loop may keep the graphs of members that interact.
    """
    loop = functools.partial(LoopStrategy, streamed=kind == "streamed", fused=fused)
    make, ways = _make_vectorised if kind == "vectorised" else loop, dict[str, Strategy]()
    if compiled:
        ways[f"{kind}+compiled"] = functools.partial(_run_compiled, make(compiled=True))
    ways |= {KEEPING: gradients.looped_keeping_graphs} if keeps and not compiled else {}
    ways[kind] = make(compiled=False)
    if kind == "vectorised":
        ways["loop"] = gradients.looped_gradients
    return FallbackChain(_note_fallback, **ways)


def _note_fallback(name: str, reason: str, posterior: Objective, batch: Batch) -> None:
    if name == "vectorised":
        posterior.particles.runner.note_fallback(name, reason)
    else:
        kept = "members that interact run twice: their graphs cannot be kept (%s)"
        log.info(kept if name == KEEPING else "members run uncompiled: the compiler failed (%s)", reason)


def _run_compiled(run: Strategy, posterior: Objective, batch: Batch) -> Gradients:
    """Runs the strategy, but raises at dynamo's limit of recompilations, where it would silently run plain code."""
    with raise_at_recompile_limit():
        return run_compiled(posterior.particles, lambda: run(posterior, batch))


def _make_vectorised(*, compiled: bool) -> Strategy:
    if not compiled:
        return gradients.vectorised_gradients
    function = _compile(functional_gradients)

    def run(posterior: Objective, batch: Batch) -> Gradients:
        with posterior.particles.vmap_context():
            found: Gradients = function(posterior, gradients.detached_state(posterior), batch)
        return found

    return run


class LoopStrategy:
    """One member after the other; `streamed`: over CUDA streams, so that small kernels of several run together."""

    def __init__(self, *, streamed: bool, compiled: bool, fused: bool = True) -> None:
        self.compiled, self.fused = compiled, fused and not compiled
        self.member = _compile(functional_member_gradients) if compiled else None  # None: as `looped_gradients` does
        self.forward: Callable[..., Any] | None = None
        self.lanes = Lanes() if streamed else None
        self.implementations = FallbackChain(UNFUSED, fused=self.run_fused, plain=self.run)

    def __call__(self, posterior: Objective, batch: Batch) -> Gradients:
        # Launched one by one, fused layers take longer than torch's own: their arguments are prepared in Python.
        if not self.fused or not thread.for_graph:
            return self.run(posterior, batch)
        return self.implementations(posterior, batch)

    def run_fused(self, posterior: Objective, batch: Batch) -> Gradients:
        """As `run`, with batch norm and the layers after it in one kernel."""
        with fuse_layers():
            return self.run(posterior, batch)

    def run(self, posterior: Objective, batch: Batch) -> Gradients:
        if self.lanes is None:
            # A graph cannot hold the caller's own leaves: they may be on another stream.
            own = gradients.member_gradients if thread.for_graph else None
            return gradients.looped_gradients(posterior, batch, member=self.member or own)
        lanes = self.lanes.for_members(posterior.particles.members)
        if posterior.interaction != "couple":
            return gradients.looped_gradients(posterior, batch, member=self.member, lanes=lanes)
        # All members use memory at once anyway, so their graphs are kept and no member runs twice.
        if self.forward is None:
            self.forward = _compile(posterior.member_loss) if self.compiled else posterior.member_loss
        return gradients.looped_keeping_graphs(posterior, batch, forward=self.forward, lanes=lanes)


def functional_member_gradients(posterior: Objective, state: State, batch: Batch, cotangent: Any) -> Gradients:
    """As `gradients.member_gradients`, but with function transforms, which can be compiled."""

    def objective(own: Tensors, shared: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        params = {**shared, **state.shared_frozen, **own, **state.own_frozen}
        value, z, buffers = posterior.member_loss(params, {**state.shared_buffers, **state.own_buffers}, batch)
        return value if cotangent is None else value + gradients.inner_product(z, cotangent), (value, buffers)

    return _gradients_by_transforms(objective, state)


def functional_gradients(posterior: Objective, state: State, batch: Batch) -> Gradients:
    """As `gradients.vectorised`, but with function transforms; call it within `particles.vmap_context()`."""

    def objective(own: Tensors, shared: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        frozen, buffers = (state.own_frozen, state.shared_frozen), (state.own_buffers, state.shared_buffers)
        total, losses, after = gradients.vmapped_objective(posterior, State(own, shared, *frozen, *buffers), batch)
        return total, (losses, after)

    found = _gradients_by_transforms(objective, state)
    # In the parameters' layout: the compiler fuses the copy with the product that computes the gradient.
    contiguous = {name: gradient.contiguous() for name, gradient in found.gradients.items()}
    return Gradients(found.losses, contiguous, found.buffers)


def _gradients_by_transforms(objective: Callable[..., Any], state: State) -> Gradients:
    (own, shared), (losses, after) = torch.func.grad(objective, argnums=(0, 1), has_aux=True)(state.own, state.shared)
    return Gradients(losses, {**shared, **own}, after)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


KINDS: tuple[Kind, ...] = ("loop", "vectorised", "streamed")
WORDS = (*KINDS, "compiled", "captured")


@dataclass(frozen=True)
class Plan:
    """How members run: a strategy, whether it is compiled, and whether the whole step is captured in a CUDA graph."""

    kind: Kind
    compiled: bool = False
    captured: bool = False
    fused: bool = field(default=True, compare=False)  # whether the graph may hold layers fused
    seconds: float | None = None  # for the gradients of one batch, if timed
    taken: PeakMemory = field(default=UNMEASURED, compare=False, repr=False)  # for these gradients, if timed on a GPU
    # The strategy that was timed, compiled already.
    tried: Strategy | None = field(default=None, compare=False, repr=False)
    keeps: bool = False  # whether a loop keeps the graphs of members that interact, so that each runs once

    @property
    def duration(self) -> str:
        """What was timed, for the log."""
        return "" if self.seconds is None else f" ({1e3 * self.seconds:.2f} ms for the gradients of a batch)"

    def __str__(self) -> str:
        words = [self.kind, *(["compiled"] if self.compiled else []), *(["captured"] if self.captured else [])]
        return "+".join(words)


def plain_plan(posterior: Posterior, activations: int | None = None) -> Plan:
    """How members run at first: in the way that needs no preparation. `activations`: bytes of one member's, if known."""
    particles, coupled = posterior.particles, posterior.interaction == "couple"
    if particles.members > 1 and particles.how != "loop":
        return Plan("vectorised")
    if posterior.device.type == "cuda":
        return Plan("streamed" if coupled else "loop")  # streamed: it keeps the members' graphs, too
    alone = particles.members > 1 and particles.exchange is ALONE and not (particles.divided or particles.fully_sharded)
    little = activations is not None and particles.members * activations <= KEPT
    return Plan("loop", keeps=coupled and alone and little)


def make_plan(
    engine: str,
    posterior: Posterior,
    batch: Batch,
    *,
    precision: torch.dtype | None,
    timed: bool = True,
    fused: bool = True,
) -> Plan:
    """The fast plan for `engine`: "auto", or words of loop, vectorised, streamed, compiled, captured joined by "+".

    Choices not fixed by the words are made here. `timed`: whether cuDNN may time its algorithms, and whether the only
    candidate is timed, too, which measures its memory. `fused`: whether graphs may hold layers fused.
    """
    words = set() if engine == "auto" else set(engine.split("+"))
    if unknown := words - set(WORDS):
        wanted, got = ", ".join(WORDS), sorted(unknown)[0]
        raise ValueError(f'expected engine "auto" or words of {wanted} joined by "+", got {got!r}; use these words')
    named = [kind for kind in KINDS if kind in words]
    if len(named) > 1:
        raise ValueError(f"expected one of {', '.join(KINDS)}, got {' and '.join(named)}; name one")
    on_gpu = posterior.device.type == "cuda"
    if not on_gpu and (wanting := words & {"streamed", "captured"}):
        raise ValueError(f'expected a GPU for engine "{sorted(wanting)[0]}", got {posterior.device}; use "auto"')
    plans = posterior.particles.runner.plans
    key = ("plan", timed, fused, engine, request_key(posterior, batch, precision))
    if key not in plans:
        plans[key] = _fastest_plan(named, words, posterior, batch, precision, timed=timed, fused=fused)
        log.info("members run %s%s", plans[key], plans[key].duration)
    return plans[key]


def may_compile(posterior: Posterior) -> bool:
    """Whether compiling may help: neither convolutions on a CPU, which are library calls, nor members that differ."""
    first, *others = posterior.particles.templates
    convolutional = any(isinstance(part, ConvNd) for part in first.modules())
    return not others and (posterior.device.type == "cuda" or not convolutional)


def compiled_plan(plan: Plan, posterior: Posterior, batch: Batch, *, precision: torch.dtype | None) -> Plan:
    """The plan compiled if that is faster, with the strategy that was timed; else the plan itself."""
    times: dict[bool, float | None] = {}
    taken, run = UNMEASURED, None
    for compiled in (False, True):
        run = make_strategy(plan.kind, compiled=compiled, fused=plan.fused)
        times[compiled], taken = _time_candidate(run, posterior, batch, precision, captured=plan.captured, timed=True)
    plain, fast = times[False], times[True]
    if fast is None or (plain is not None and fast >= plain):
        return plan
    # Without being kept: copies of the posterior must not copy compiled code.
    found = replace(plan, compiled=True, seconds=fast, taken=taken, tried=run)
    log.info("members run %s%s", found, found.duration)
    return found


def _fastest_plan(
    named: list[Kind],
    words: set[str],
    posterior: Posterior,
    batch: Batch,
    precision: torch.dtype | None,
    *,
    timed: bool,
    fused: bool,
) -> Plan:
    particles, on_gpu, compiled = posterior.particles, posterior.device.type == "cuda", "compiled" in words
    captured = on_gpu and ("captured" in words or (not words and posterior.capturable))
    # Vectorising is slower for members' own convolutions, on a GPU with three times the memory, and faster for all else.
    open_ones: list[Kind] = [particles.how]
    if on_gpu:
        open_ones = ["streamed"] if particles.how == "loop" else ["vectorised", "streamed"]
    kinds = named or (["loop"] if particles.members == 1 else open_ones)
    if len(kinds) == 1 and not (timed and on_gpu and not words):
        return Plan(kinds[0], compiled, captured, fused)
    for graphs in dict.fromkeys((captured, False)):  # if none can be captured: the fastest without a graph
        ways = {kind: make_strategy(kind, fused=fused) for kind in kinds}
        found = {
            kind: _time_candidate(ways[kind], posterior, batch, precision, captured=graphs, timed=timed)
            for kind in kinds
        }
        possible = {kind: seconds for kind, (seconds, _) in found.items() if seconds is not None}
        if possible:
            kind = min(possible, key=lambda each: possible[each])
            return Plan(kind, compiled, graphs, fused, possible[kind], found[kind][1])
    return Plan("loop", compiled, False)  # all of them fail: the plain loop works or raises the error


def _time_candidate(
    run: Strategy, posterior: Posterior, batch: Batch, precision: torch.dtype | None, *, captured: bool, timed: bool
) -> tuple[float | None, PeakMemory]:
    """(seconds for the gradients of a batch, or None, the memory that they take) in training mode."""
    was_training, device = posterior.training, posterior.device
    posterior.train()  # dropout and batch statistics take time in a step, and can fail
    try:
        timing = timed_convolutions(device) if timed else nullcontext()
        with autocast(device, precision), measure_peak(device) as memory, timing:
            seconds = time_strategy(run, posterior, batch, captured=captured)
        return seconds, memory[0] if memory else UNMEASURED
    finally:
        posterior.train(was_training)
        if device.type == "cuda":
            torch.cuda.synchronize()
            free_cublas_workspaces()  # of the candidate; libraries allocate them again when needed
            reset_peak(device)


def time_strategy(run: Strategy, posterior: Posterior, batch: Batch, *, captured: bool) -> float | None:
    """Median seconds for the gradients of one batch, captured if the step will be; None if they fail."""
    try:
        particles = posterior.particles
        with particles.lock_network(), particles.runner.run_context(), preserve_random_state(posterior.device):
            if not captured:
                return _median_seconds(lambda: run(posterior, batch), 3, posterior.device)
            graph = _capture_gradients(run, posterior, batch)
            return None if graph is None else _median_seconds(graph.replay, 5, posterior.device)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # a candidate that cannot run this network is dropped
        log.debug("a strategy is not used, because it fails: %s", error)
        return None
    finally:
        if posterior.device.type == "cuda":
            torch.cuda.empty_cache()


def _capture_gradients(run: Strategy, posterior: Posterior, batch: Batch) -> Graph | None:
    """The gradients of a batch in a graph, if need be with the constants that a forward makes; None if it fails."""
    ways = [None] if "compiled" in getattr(run, "name", "") else [None, Constants()]
    for constants in ways:
        try:
            # Warmed up on a side stream first, as torch requires before a capture: libraries initialise themselves here.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), for_graph():
                for _ in range(2):
                    with nullcontext() if constants is None else constants.record_constants():
                        run(posterior, batch)
            torch.cuda.current_stream().wait_stream(side)
            reset_peak(posterior.device)  # that of libraries which try algorithms
            with for_graph():
                return Graph(lambda: run(posterior, batch), constants=constants)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a user's network may do anything that cannot be captured
            torch.cuda.synchronize()
            failed = failure_reason(error)
    log.info("members run %s are not captured in a CUDA graph: %s", getattr(run, "name", ""), failed)
    return None


def _median_seconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median seconds of a call, without the first one."""
    times, wait = [], torch.cuda.synchronize if device.type == "cuda" else nullcontext
    for _ in range(1 + repeats):
        start = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]
