"""Strategies: how the gradients of all members on one batch are computed. All give the same results up to rounding.

    loop         one member after the other
    vectorised   all at once, `vmap` over stacked tensors
    streamed     one member after the other, spread over CUDA streams so that small kernels of several run together

each of them plain or compiled. If a gradient is 0 up to rounding (a bias before batch norm), Adam scales the rounding errors
to full steps, and these differ. A strategy changes only the random state, so that it can be timed on a real batch.
"""

from __future__ import annotations  # compilers cannot evaluate the types of inner functions

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.core.forward_attributes import run_compiled
from dissensus.core.gradients import Gradients, Objective, State, Strategy
from dissensus.core.member_runner import FallbackChain
from dissensus.engine.cuda_graphs import Lanes
from dissensus.kernels.fused_norm import fuse_layers
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_private import raise_at_recompile_limit

log = logging.getLogger("dissensus")

Kind = Literal["loop", "vectorised", "streamed"]


def make_strategy(kind: Kind, *, compiled: bool = False) -> FallbackChain:
    """The strategy of this kind; it falls back to a simpler one if it fails. `name` is the one in use: "loop+compiled"."""
    make = _make_vectorised if kind == "vectorised" else functools.partial(LoopStrategy, streamed=kind == "streamed")
    ways = {f"{kind}+compiled": _forbid_recompile_limit(make(compiled=True))} if compiled else {}
    ways[kind] = make(compiled=False)
    if kind == "vectorised":
        ways["loop"] = gradients.looped_gradients
    return FallbackChain(_note_fallback, **ways)


def _note_fallback(name: str, reason: str, posterior: Objective, batch: Batch) -> None:
    if name == "vectorised":
        posterior.particles.runner.note_fallback(name, reason)
    else:
        log.info("members run uncompiled: the compiler failed (%s)", reason)


def _note_unfused(_: str, reason: str, *args: object) -> None:
    log.info("batch norm runs apart from the layers after it: fused kernels fail for this network (%s)", reason)


def _forbid_recompile_limit(run: Strategy) -> Strategy:
    """The strategy, but raising at dynamo's limit of recompilations, where it would silently run plain code."""

    def run_or_raise(posterior: Objective, batch: Batch) -> Gradients:
        with raise_at_recompile_limit():
            return run_compiled(posterior.particles, lambda: run(posterior, batch))

    return run_or_raise


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

    def __init__(self, *, streamed: bool, compiled: bool) -> None:
        self.compiled = compiled
        self.member = _compile(functional_member_gradients) if compiled else None  # None: as `looped_gradients` does
        self.forward: Callable[..., Any] | None = None
        self.lanes = Lanes() if streamed else None
        self.implementations = FallbackChain(_note_unfused, fused=self.run_fused, plain=self.run)

    def __call__(self, posterior: Objective, batch: Batch) -> Gradients:
        if self.compiled or batch.y.device.type != "cuda":  # where the members are, too
            return self.run(posterior, batch)
        return self.implementations(posterior, batch)  # type: ignore[no-any-return]

    def run_fused(self, posterior: Objective, batch: Batch) -> Gradients:
        """As `run`, with batch norm and the layers after it in one kernel."""
        with fuse_layers():
            return self.run(posterior, batch)

    def run(self, posterior: Objective, batch: Batch) -> Gradients:
        if self.lanes is None:
            return gradients.looped_gradients(posterior, batch, member=self.member)
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
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
