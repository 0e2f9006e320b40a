"""The training step: zero gradients, compute new ones, check that they are finite, clip, step, observe.

`Guard` looks for values that are not finite before the optimiser changes anything. On a CPU a bad batch raises at once. On a
GPU a flag on the device makes fused optimisers skip all steps from then on, and stops statistics and clock; the host reads it
once per epoch. The posterior keeps its state after the last good step. `CapturedStep` replays whole steps from a CUDA graph.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dissensus.core.batch import Batch, input_tensors
from dissensus.core.divergence import Diverged, largest_magnitudes, may_be_nonfinite
from dissensus.core.gradients import (
    Strategy,
    add_gradients,
    automatic_gradients,
    can_train_in_place,
    compute_gradients,
    in_place_gradients,
)
from dissensus.core.likelihood import expand_weight
from dissensus.core.member_runner import NOTHING
from dissensus.core.posterior import Posterior
from dissensus.core.weights import Recorder
from dissensus.engine.cuda_graphs import CapturedCalls, Graph, NotConstant, for_graph, shape_key
from dissensus.engine.fast_optimisers import FusedStep, can_be_captured, can_skip, make_capturable, use_fused_kernels
from dissensus.kernels.multi_tensor import Chunks, clear_if_flagged
from dissensus.utils.parameter_groups import clip_members, count_optimizer_step
from dissensus.utils.sharding import local_part
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_private import flatten_all, unflatten_all, unscale_tensors


class EagerStep:
    """One optimiser step of all members per `accumulate` batches, equal to a step on one large batch."""

    def __init__(
        self,
        posterior: Posterior,
        optimizer: torch.optim.Optimizer,
        *,
        strategy: Strategy = automatic_gradients,
        clip: float | None = None,
        precision: torch.dtype | None = None,
        accumulate: int = 1,
    ) -> None:
        self.posterior, self.optimizer, self.strategy = posterior, optimizer, strategy
        self.clip, self.precision, self.accumulate = clip, precision, accumulate
        self.pending = 0  # batches accumulated since the last step
        self.accumulated_weight = torch.zeros(())  # total weight of their examples
        self.in_place = False  # whether a member that is the caller's module may train in it
        self._restore, self._step_optimizer = use_fused_kernels(optimizer), FusedStep(optimizer)
        self._trained = list(posterior.parameters())  # found once: it takes as long as a small layer
        self.guard = Guard(posterior, optimizer, host=posterior.device.type == "cpu")

    def __call__(self, batch: Batch, *, observe: bool = True) -> Tensor:
        """(M,) losses on the batch; every `accumulate` batches the optimiser steps. Raises Diverged before a bad step.

        It can be captured in a CUDA graph if one batch is a step. `observe`: whether to call the method's `observe` afterwards.
        """
        if self.pending == 0:
            # Zeroed before backward, not after the step, because recorders read gradients in observe. All gradients, not only
            # those of the optimiser: the others would grow from step to step, and they count in the norm for clipping.
            for parameter in self._trained:
                parameter.grad = None
            self.guard.begin(several=self.accumulate > 1)
        number, self.pending = self.pending + 1, 0  # if this batch raises, the accumulated ones are dropped
        losses = self._run_batch(batch, number)
        if number < self.accumulate:
            self.pending = number
        else:
            self._update(observe=observe)
        return losses

    def finish(self) -> None:
        """Steps with the gradients accumulated so far, if there are any."""
        if self.pending == 0:
            return
        self.pending = 0
        self.guard.check_values(None, complete=True)
        if not self.guard.checks_at_once:
            self.guard.restore_buffers()
        self._update()

    @property
    def engine_name(self) -> str:
        """How members run, such as "loop+compiled"."""
        return str(getattr(self.strategy, "name", "auto"))

    def check(self) -> None:
        """Raises Diverged if a GPU has skipped bad steps, or if weights are not finite."""
        self.guard.check()

    def close(self) -> None:
        """Restores the optimiser's settings."""
        self._restore()

    def _run_batch(self, batch: Batch, number: int) -> Tensor:
        """(M,) losses of a step's batch `number` (from 1); sets `.grad`, and batch statistics if all is finite."""
        in_place = self.in_place and self.accumulate == 1 and can_train_in_place(self.posterior)
        with NOTHING if self.precision is None else autocast(self.posterior.device, self.precision):
            if in_place:  # `fit` has locked the network, and asked what `compute_gradients` asks
                with self.posterior.particles.runner.run_context():
                    found = in_place_gradients(self.posterior, batch, write=True)
            else:
                found = compute_gradients(self.posterior, batch, self.strategy, self.guard.check_unmixed)
        if not in_place:
            share = self._weight_fraction(batch, number, found.losses.dtype)
            add_gradients(self.guard.weights, found.gradients, share=share)
        # Of the only batch of a step, what was found on the way is what is in `.grad`.
        known = found.largest if self.accumulate == 1 else None
        self.guard.check_values(found.losses, complete=number == self.accumulate, known=known)
        self.guard.write_buffers(found.buffers)
        return found.losses

    def _weight_fraction(self, batch: Batch, number: int, dtype: torch.dtype) -> Tensor | None:
        """() the batch's share of the weight accumulated so far; None for a step of one batch."""
        # Each batch's loss is a mean, Σ w ℓ / Σ w. Their mean, weighted by these shares, is that of one large batch.
        if self.accumulate == 1:
            return None
        counted = self.posterior.likelihood.training_weight(batch.y)
        w = torch.ones(len(batch.y), device=batch.y.device) if batch.weight is None else batch.weight
        if counted is not None:
            w = expand_weight(w, counted.to(w.dtype)) * counted
        counts = self.posterior.particles.exchange.total_batch_weight(w.sum(dtype=dtype))
        self.accumulated_weight = counts if number == 1 else self.accumulated_weight + counts
        return torch.where(self.accumulated_weight > 0, counts / self.accumulated_weight, 1 / number)

    def _update(self, *, observe: bool = True) -> None:
        if self.clip is not None:
            clip_members(self.posterior.particles, self.clip)
        with self.guard.skip_bad_step():
            self._step_optimizer()
        if observe:
            self.guard.observe()


def request_key(posterior: Posterior, batch: Batch, precision: torch.dtype | None) -> tuple[Any, ...]:
    """What times and plans depend on: device, precision and the shapes of a batch."""
    shapes = [tuple(t.shape) for t in input_tensors(batch.x)]
    return (str(posterior.device), precision, *shapes)


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """The context of mixed precision on the device; an empty one if precision is None."""
    if precision is None:
        return nullcontext()
    # Without a cache of cast weights: members on other streams could read a copy that is still being written.
    return torch.autocast(device.type, dtype=precision, cache_enabled=False)


# Values that may be bad, in the order of reporting: a loss, a gradient before mixing, a member's gradient, a shared one.
FAULTS = ("loss", "gradient, unmixed", "gradient", "gradient, shared")


class Guard:
    """Detects which members have diverged, and at which step. `host`: check every step at once, which waits for a GPU.

    Checked at once in any case: optimisers that cannot skip a step by a flag, and the first step, which makes their state.
    """

    def __init__(self, posterior: Posterior, optimizer: torch.optim.Optimizer, *, host: bool) -> None:
        self.posterior, self.optimizer, self.host = posterior, optimizer, host
        self.checks_at_once = True  # whether this step is checked at once
        self.has_stepped = False  # whether there has been a step
        # Found once: walking over the modules costs more than a step of a small network.
        parts = list(posterior.modules())
        self._clocked = [part for part in parts if isinstance(part, Posterior)]
        self._recorders = [part for part in parts if isinstance(part, Recorder)]
        particles, device = posterior.particles, posterior.device
        self.weights = particles.parameters_by_name()
        self.halted = torch.zeros((), dtype=torch.float32, device=device)  # 1 from the first bad step on
        self.bad = torch.zeros(len(FAULTS), particles.members, dtype=torch.bool, device=device)  # at the first bad step
        self._one = torch.ones_like(self.halted)
        self._saved_buffers: Tensors | None = None
        self._unmixed: Tensor | None = None  # (M,) largest gradients before they were mixed
        self._chunks = Chunks()  # of the gradients that recorders read
        checked = self._checked_tensors()
        known = not may_be_nonfinite([each for tensors in checked.values() for each in tensors.values()])
        # names of tensors that are finite now: others, such as masks of −∞, are not checked later
        self._finite_names = {
            what: {name for name, tensor in tensors.items() if known or bool(tensor.isfinite().all())}
            for what, tensors in checked.items()
        }

    def begin(self, *, several: bool) -> None:
        """Call it before a step's first batch. `several`: whether the step has more batches, which all change statistics."""
        self.checks_at_once = self.host or not self.has_stepped or not can_skip(self.optimizer)
        # With one batch, statistics are written once it is known to be good; with several, a copy is needed to restore them.
        self._saved_buffers = {name: buffer.clone() for name, buffer in self.buffers().items()} if several else None
        self._unmixed = None

    def check_unmixed(self, gradients: Mapping[str, Tensor]) -> None:
        """Checks gradients before mixing, which would spread one member's bad values to all."""
        if self.checks_at_once and not may_be_nonfinite(list(gradients.values())):
            return
        mine = self._largest_values(gradients)[0]
        self._unmixed = mine if self._unmixed is None else torch.maximum(self._unmixed, mine)

    def check_values(self, losses: Tensor | None, *, complete: bool, known: Tensor | None = None) -> None:
        """Checks losses, and gradients if the step is complete; raises Diverged if this step is checked at once.

        `known`: (M,) the largest values of members' own gradients, if somebody has looked: these are not read again then.
        """
        held = {n: g for n, p in self.weights.items() if (g := p.grad) is not None} if complete else {}
        particles, exchange = self.posterior.particles, self.posterior.particles.exchange
        if known is not None:
            own = particles.own_parameters()
            held = {name: each for name, each in held.items() if name not in own}
        if particles.divided:
            held = {name: local_part(gradient) for name, gradient in held.items()}
        if self.checks_at_once:
            given = [each for each in (losses, known, *held.values()) if each is not None]
            _flag_not_finite(given, self.halted, self._one)
            if exchange.any_process(self.halted.item() > 0):
                self._record_faults(losses, held, known)
                self.halted.copy_(exchange.gather_members(self.bad).any())
                self._raise_if_halted()
        else:
            self._record_faults(losses, held, known)
            self.halted.copy_(self.bad.any())
            exchange.reduce_flag(self.halted)

    def _record_faults(self, losses: Tensor | None, gradients: Mapping[str, Tensor], known: Tensor | None) -> None:
        """Records which values of which members are bad, unless an earlier step was bad."""
        nothing = torch.zeros_like(self.bad[0], dtype=torch.float32)
        mine, common = self._largest_values(gradients)
        mine = mine if known is None else known
        of_losses = nothing if losses is None else losses.detach()
        before = nothing if self._unmixed is None else self._unmixed
        now = ~torch.stack([of_losses, before, mine, common.expand(len(nothing))]).isfinite()
        # torch.where, not `if`: a branch on the host would wait for the device and could not be captured.
        self.bad.copy_(torch.where(self.bad.any(), self.bad, now))

    def write_buffers(self, buffers: Tensors) -> None:
        """Stores batch statistics (M, ...) after a batch, unless this or an earlier batch was bad."""
        if buffers and not self.checks_at_once:
            before = self._saved_buffers or self.buffers()
            changed = {name: each for name, each in buffers.items() if name in before}
            buffers = _restore_if_flagged(self.halted, changed, before)
        self.posterior.particles.write_buffers(buffers)

    def restore_buffers(self) -> None:
        """Restores the batch statistics from before the step's first batch if a later batch was bad."""
        if self._saved_buffers is not None:
            buffers = _restore_if_flagged(self.halted, self.buffers(), self._saved_buffers)
            self.posterior.particles.write_buffers(buffers)

    def skip_bad_step(self) -> AbstractContextManager[object]:
        """Inside, the optimiser's step does nothing if a value was bad, and recorders can know it."""
        self.has_stepped = True
        return NOTHING if self.checks_at_once else self._skip_by_flag()

    @contextmanager
    def _skip_by_flag(self) -> Iterator[None]:
        # As torch's GradScaler does: if the flag is 1, kernels of fused optimisers return at once, and Adam counts no step.
        self.optimizer.found_inf = self.halted  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del self.optimizer.found_inf  # type: ignore[attr-defined]

    def observe(self) -> None:
        """Calls the method's `observe`, and resets its clock if the step was bad."""
        if self.checks_at_once:
            self.posterior.observe(self.optimizer)
            return
        clocks = [part.steps for part in self._clocked]
        # Recorders count on the host: after a bad step they see unchanged weights and gradients of 0.
        if any(recorder.reads_next_step for recorder in self._recorders):
            gradients = [local_part(p.grad) for p in self.weights.values() if p.grad is not None]
            clear_if_flagged(self.halted, gradients, self._chunks)
        with self.skip_bad_step():
            self.posterior.observe(self.optimizer)
            lost = self.halted.to(torch.int64)
            for clock in clocks:
                clock.sub_(lost)

    def check(self) -> None:
        """Raises Diverged if a GPU has skipped bad steps, or if tensors are not finite."""
        if not self.host:
            self._raise_if_halted()
        checked = self._checked_tensors()
        names = {**self._finite_names, "moment": set(checked["moment"])}
        found = {what: {k: t for k, t in tensors.items() if k in names[what]} for what, tensors in checked.items()}
        exchange = self.posterior.particles.exchange
        everything = [tensor for part in found.values() for tensor in part.values()]
        if not exchange.any_process(may_be_nonfinite(everything)):
            return
        for what, tensors in found.items():
            mine, common = (~size.isfinite() for size in self._largest_values(tensors))
            all_mine, all_common = exchange.gather_members(torch.stack([mine, common.expand_as(mine)]))
            if all_mine.any() or all_common.any():
                bad = all_mine if all_mine.any() else all_common
                raise Diverged(bad.nonzero().flatten().tolist(), int(self.posterior.steps), what)

    def _raise_if_halted(self) -> None:
        if self.halted > 0:
            self.restore_buffers()
            self.posterior.zero_grad(set_to_none=True)
            bad = self.posterior.particles.exchange.gather_members(self.bad)
            by_fault = dict(zip(FAULTS, bad.tolist(), strict=True))
            what, members = next((what, each) for what, each in by_fault.items() if any(each))
            self.halted.zero_()
            self.bad.zero_()
            numbers = [number for number, bad in enumerate(members) if bad]
            raise Diverged(numbers, int(self.posterior.steps) + 1, what.partition(",")[0])

    def buffers(self) -> Tensors:
        """Buffers that training changes, each (M, ...)."""
        particles = self.posterior.particles
        shared = {name: buffer[None] for name, buffer in particles.shared_buffers().items()}
        return {**shared, **particles.own_buffers()}

    def _largest_values(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Largest absolute values: ((M,) of own tensors, () of the others)."""
        particles = self.posterior.particles
        own = particles.own_parameters().keys() | particles.own_buffers().keys()
        mine = [tensor for name, tensor in tensors.items() if name.partition("/")[0] in own]
        others = [tensor for name, tensor in tensors.items() if name.partition("/")[0] not in own]
        device = self.posterior.device
        found = largest_magnitudes(mine, others, particles.members, device)
        return found[0].to(device), found[1].to(device)

    def _checked_tensors(self) -> dict[str, Tensors]:
        """Kind ("weight", "buffer", "moment") -> floating-point tensors by name, which are checked."""
        everywhere = dict(self.posterior.named_buffers())
        others = {name: buffer for name, buffer in everywhere.items() if not name.startswith("particles.own.")}
        moments = {
            f"{name}/{key}": value
            for name, weight in self.weights.items()
            for key, value in self.optimizer.state.get(weight, {}).items()
            if isinstance(value, Tensor) and value.shape == weight.shape
        }
        buffers = {**others, **self.posterior.particles.own_buffers()}
        kinds = {"weight": self.weights, "buffer": buffers, "moment": moments}
        return {
            what: {name: local_part(t.detach()) for name, t in tensors.items() if t.is_floating_point()}
            for what, tensors in kinds.items()
        }


def _restore_if_flagged(flag: Tensor, values: Tensors, before: Tensors) -> Tensors:
    """`values`, or `before` if the flag is set, in few kernels for any number of tensors."""
    chosen: Tensors = {}
    for dtype in {value.dtype for value in values.values()}:
        names = [name for name, value in values.items() if value.dtype == dtype]
        new, old = [values[name] for name in names], [before[name].expand_as(values[name]) for name in names]
        flat = torch.where(flag > 0, flatten_all(old), flatten_all(new))
        chosen |= dict(zip(names, unflatten_all(flat, new), strict=True))
    return chosen


def _flag_not_finite(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Sets the flag, () in float32, to 1 if a tensor holds a value that is not finite; else does not change it."""
    # One kernel for all tensors of a dtype, as in torch's GradScaler, which also multiplies them by `one`, without waiting.
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        unscale_tensors([each for each in tensors if each.dtype == dtype] if len(dtypes) > 1 else tensors, flag, one)


class CapturedStep(CapturedCalls):
    """One optimiser step of all members per batch, replayed from the graph for the batch's shape if there is one."""

    log_name = "the training step"
    warm_up = 1  # which trains like any other step

    def __init__(self, step: EagerStep) -> None:
        super().__init__()
        self.step, self.finish, self.posterior = step, step.finish, step.posterior
        self.compiled = "compiled" in step.engine_name
        self.due_to_compare: set[Hashable] = set()  # shapes whose constants are compared in the next step
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

    def _run_plain(self, key: Hashable, batch: Batch) -> Tensor:
        # On a side stream: memory allocated before a capture must not belong to the default stream.
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream), self.record_constants(key), for_graph():
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
        with for_graph():
            graph = self.capture(
                key, lambda: self.step(held, observe=self.captures_observe), held.tensors(), generators
            )
        if graph is None:
            self.posterior.steps.copy_(steps)
        else:
            self.gradients[key] = [(p, p.grad) for p in self.posterior.parameters()]
        return graph
