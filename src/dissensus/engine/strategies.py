"""Strategies: how the gradients of all members on one batch are found. All give the same results to rounding.

    loop         one member after the other
    vectorised   all at once, `vmap` over stacked tensors
    streamed     one member after the other, spread over CUDA streams so that small kernels of several run together

each of them plain or compiled. Where a gradient is 0 but for rounding (a bias before batch norm), Adam makes steps of the
rounding, which differ. A strategy changes nothing but the random state, so that it can be timed on a real batch.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.core.gradients import Gradients, Objective, State, Strategy
from dissensus.core.running import Attempt
from dissensus.engine.lanes import Lanes
from dissensus.numerics.tree import Tensors

log = logging.getLogger("dissensus")

Kind = Literal["loop", "vectorised", "streamed"]


def strategy(kind: Kind, *, compiled: bool = False, streams: int = 10) -> Strategy:
    """The strategy of this kind; falls back to a plainer one where it fails."""
    if kind == "vectorised":
        plain = OrElse(gradients.vectorised, gradients.looped, Plainer(kind="loop"))
        return OrElse(CompiledVectorised(), plain, Plainer(compiled=False)) if compiled else plain
    if kind == "loop":
        return OrElse(CompiledLoop(), gradients.looped, Plainer(compiled=False)) if compiled else gradients.looped
    if compiled:
        return OrElse(StreamedLoop(streams, compiled=True), StreamedLoop(streams), Plainer(compiled=False))
    return StreamedLoop(streams)


class Plainer(NamedTuple):
    """How a strategy's kind changes when it falls back: the new values, None where nothing changes."""

    kind: Kind | None = None
    compiled: bool | None = None


class OrElse:
    """One strategy until it fails, from then on another; the log says so once."""

    def __init__(self, first: Strategy, second: Strategy, instead: Plainer) -> None:
        self.first: Strategy | None = first
        self.second = second
        self.instead = instead

    def __call__(self, posterior: Objective, batch: Batch) -> Gradients:
        if self.first is None:
            return self.second(posterior, batch)
        # Past its limit of recompilations dynamo would run plain code and say nothing.
        loud = nullcontext() if self.instead.kind else torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
        with Attempt() as attempt, loud:
            return self.first(posterior, batch)
        result = self.second(posterior, batch)
        self.first = None
        if self.instead.kind == "loop":
            posterior.particles.runner.note_fallback(attempt.failed)
        else:
            log.info("members run uncompiled: the compiler gave up (%s)", attempt.failed)
        return result


def fallen_back(run: Strategy) -> Iterator[Plainer]:
    """How a strategy has changed by falling back, outermost first."""
    while isinstance(run, OrElse):
        if run.first is None:
            yield run.instead
        run = run.second


class CompiledVectorised:
    """The strategy that compiles vectorised gradients."""

    def __init__(self) -> None:
        self.function = _compile(_contiguous_vectorised_gradients)

    def __call__(self, posterior: Objective, batch: Batch) -> Gradients:
        with posterior.particles.vectorising():
            found: Gradients = self.function(posterior, gradients.state_of(posterior), batch)
        return found


class CompiledLoop:
    """The strategy that runs each member in turn through one compiled function."""

    def __init__(self) -> None:
        self.member = _compile(functional_member_gradients)

    def __call__(self, posterior: Objective, batch: Batch) -> Gradients:
        return gradients.looped(posterior, batch, member=self.member)


class StreamedLoop:
    """The strategy that spreads members over CUDA streams, so that small kernels of several run together."""

    def __init__(self, streams: int, *, compiled: bool = False) -> None:
        self.compiled = compiled
        self.member = _compile(functional_member_gradients) if compiled else gradients.member_gradients
        self.forward: Callable[..., Any] | None = None
        self.lanes = Lanes(streams)

    def __call__(self, posterior: Objective, batch: Batch) -> Gradients:
        lane, join = self.lanes.for_members(posterior.particles.members * posterior.train_samples)
        if posterior.coupled:
            # All members' memory is in use at once anyway, so their graphs are kept and nothing runs twice.
            if self.forward is None:
                self.forward = _compile(posterior.member_loss) if self.compiled else posterior.member_loss
            return gradients.looped_keeping_graphs(posterior, batch, forward=self.forward, lane=lane, join=join)
        return gradients.looped(posterior, batch, member=self.member, lane=lane, join=join)


def functional_member_gradients(posterior: Objective, state: State, batch: Batch, cotangent: Any) -> Gradients:
    """What `gradients.member_gradients` gives, by function transforms, which the compiler can follow."""

    def objective(own: Tensors, shared: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        params = {**shared, **state.shared_frozen, **own, **state.own_frozen}
        value, z, buffers = posterior.member_loss(params, {**state.shared_buffers, **state.own_buffers}, batch)
        return value if cotangent is None else value + gradients.inner(z, cotangent), (value, buffers)

    (own, shared), (value, buffers) = torch.func.grad(objective, argnums=(0, 1), has_aux=True)(state.own, state.shared)
    return Gradients(value, {**shared, **own}, buffers)


def _contiguous_vectorised_gradients(posterior: Objective, state: State, batch: Batch) -> Gradients:
    found = gradients.vectorised_by_transforms(posterior, state, batch)
    # In the parameters' layout: the compiler folds the copy into the product that makes the gradient.
    contiguous = {name: gradient.contiguous() for name, gradient in found.gradients.items()}
    return Gradients(found.losses, contiguous, found.buffers)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
