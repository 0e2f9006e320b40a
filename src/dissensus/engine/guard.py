"""The guard of a training step: losses and gradients are looked at before the optimiser moves anything.

On the host a bad batch raises at once. On a GPU nobody waits for the answer: a flag on the device lets the fused optimiser
skip the step, and every one after it, keeps batch statistics and clock as they were, and is read once an epoch. Either way
the posterior stays as it was after the last good step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from dissensus.core.errors import Diverged
from dissensus.core.finite import flag_not_finite, largest, suspicious
from dissensus.core.posterior import Posterior
from dissensus.engine.optimisers import can_skip
from dissensus.numerics.tree import Tensors

# What may be bad, the first of it that is named: gradients before members mixed them, of one member, of all.
KINDS = ("loss", "gradient, unmixed", "gradient", "gradient, shared")


class Guard:
    """Which members have diverged, and when. `host`: whether each step is read at once, which a GPU would wait for.

    An optimiser that cannot skip a step by a flag on the device is always read. So is the first step of every run: it makes
    the optimiser's state, which a skipped one would leave unfilled.
    """

    def __init__(self, posterior: Posterior, optimizer: torch.optim.Optimizer, *, host: bool) -> None:
        self.posterior = posterior
        self.optimizer = optimizer
        self.host = host
        self.reads = True  # this step
        self.taken = False  # a first step
        self.watched = type(posterior).observe is not Posterior.observe
        particles, device = posterior.particles, posterior.device
        self._weights = {**particles.shared_parameters(), **particles.own_parameters()}
        self.halted = torch.zeros((), dtype=torch.float32, device=device)  # 1 from the first bad step on
        self.bad = torch.zeros(len(KINDS), particles.members, dtype=torch.bool, device=device)  # what was, and whose
        self._one = torch.ones_like(self.halted)
        self._kept: Tensors | None = None
        self._unmixed: Tensor | None = None  # (M,) largest gradients before they were mixed
        self._aside = Aside(device)
        self._sound = {what: self._finite_now(tensors) for what, tensors in self._tensors().items()}

    def begin(self, *, several: bool) -> None:
        """To be called before a step's first batch; `several`: others follow, and batch statistics change before it."""
        self.reads = self.host or not self.taken or not can_skip(self.optimizer)
        self._kept = {name: buffer.clone() for name, buffer in self._buffers().items()} if several else None
        self._unmixed = None

    def look_unmixed(self, gradients: Mapping[str, Tensor]) -> None:
        """To be shown gradients that will be mixed: afterwards one bad member has spoilt all."""
        if self.reads and not suspicious(list(gradients.values())):
            return
        mine = self._largest(gradients)[0]
        self._unmixed = mine if self._unmixed is None else torch.maximum(self._unmixed, mine)

    def look(self, losses: Tensor | None, *, complete: bool) -> None:
        """Looks at losses, one per function, and, where the step is complete, at gradients; on the host raises Diverged."""
        gradients = {name: p.grad for name, p in self._weights.items() if p.grad is not None} if complete else {}
        given = [*([] if losses is None else [losses]), *gradients.values()]
        if self.reads:
            if suspicious(given):
                self._note(losses, gradients)
                self.halted.copy_(self.bad.any())
                self._raise_if_halted()
        elif given:
            with self._aside():  # first: beside the flag's kernel too
                self._note(losses, gradients)
            flag_not_finite(given, self.halted, self._one)

    def _note(self, losses: Tensor | None, gradients: Mapping[str, Tensor]) -> None:
        """Keeps what is bad and whose it is, if nothing was before."""
        nothing = torch.zeros_like(self.bad[0], dtype=torch.float32)
        mine, common = self._largest(gradients)
        # A member by any of its samples.
        of_losses = nothing if losses is None else losses.detach().reshape(len(nothing), -1).abs().amax(1)
        before = nothing if self._unmixed is None else self._unmixed
        now = ~torch.stack([of_losses, before, mine, common.expand(len(nothing))]).isfinite()
        self.bad.copy_(torch.where(self.bad.any(), self.bad, now))

    def join(self) -> None:
        """To be called at the end of a step that a CUDA graph holds."""
        self._aside.join()

    def write(self, buffers: Tensors) -> None:
        """Stores batch statistics (M, ...) as they were after a batch, unless it was bad or followed a bad one."""
        particles = self.posterior.particles
        if self.reads or not buffers:
            particles.write_buffers(buffers)
            return
        before = self._kept or self._buffers()
        kept = {name: value for name, value in buffers.items() if name in before}
        particles.write_buffers(_unless(self.halted, kept, before))

    def undo(self) -> None:
        """Puts batch statistics back to before the step's first batch, if it went wrong after some of them."""
        if self._kept is not None:
            self.posterior.particles.write_buffers(_unless(self.halted, self._buffers(), self._kept))

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside, the optimiser's step does nothing where something was bad."""
        if self.reads:
            yield
        else:
            # What torch's GradScaler gives fused optimisers: their kernels return at once where it is 1, and Adam's count of
            # steps stays.
            self.optimizer.found_inf = self.halted  # type: ignore[attr-defined]
            try:
                yield
            finally:
                del self.optimizer.found_inf  # type: ignore[attr-defined]
        self.taken = True

    def observe(self) -> None:
        """The method's clock, which stands still where something was bad."""
        if self.reads:
            self.posterior.observe(self.optimizer)
            return
        clocks = [part.steps for part in self.posterior.modules() if isinstance(part, Posterior)]
        if self.watched:  # what watches keeps counts on the host: it sees weights that stand still
            for parameter in self.posterior.parameters():
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(self.halted > 0, 0.0)
        with nullcontext() if self.watched else self._aside():
            self.posterior.observe(self.optimizer)
            lost = self.halted.to(torch.int64)
            for clock in clocks:
                clock.sub_(lost)

    def check(self) -> None:
        """Raises Diverged for what a device has noted since, and where a step has left tensors that are not finite."""
        if not self.host:
            self._raise_if_halted()
        found = {
            what: {name: tensor for name, tensor in tensors.items() if name in self._sound[what] or what == "moment"}
            for what, tensors in self._tensors().items()
        }
        if not suspicious([tensor for tensors in found.values() for tensor in tensors.values()]):
            return
        for what, tensors in found.items():
            mine, common = (~size.isfinite() for size in self._largest(tensors))
            if mine.any() or common:
                raise Diverged(
                    _numbers(mine if mine.any() else common.expand_as(mine)), int(self.posterior.steps), what
                )

    def _raise_if_halted(self) -> None:
        if self.halted > 0:
            self.undo()
            self.posterior.zero_grad(set_to_none=True)
            of_kinds = dict(zip(KINDS, self.bad.tolist(), strict=True))
            what, members = next((what, each) for what, each in of_kinds.items() if any(each))
            self.halted.zero_()
            self.bad.zero_()
            numbers = [number for number, bad in enumerate(members) if bad]
            raise Diverged(numbers, int(self.posterior.steps) + 1, what.partition(",")[0])

    def _buffers(self) -> Tensors:
        """Buffers that training changes, each (M, ...)."""
        particles = self.posterior.particles
        shared = {name: buffer[None] for name, buffer in particles.shared_buffers().items()}
        return {**shared, **particles.own_buffers()}

    def _largest(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """((M,), ()) largest absolute values; names that are not a member's own belong to all."""
        particles = self.posterior.particles
        own = particles.own_parameters().keys() | particles.own_buffers().keys()
        mine = [tensor for name, tensor in tensors.items() if name.partition("/")[0] in own]
        others = [tensor for name, tensor in tensors.items() if name.partition("/")[0] not in own]
        found = largest(mine, others, particles.members)
        return found[0].to(self.posterior.device), found[1].to(self.posterior.device)

    def _tensors(self) -> dict[str, Tensors]:
        """What may blow up: weights, buffers and the optimiser's moments, floating-point ones by name."""
        everywhere = dict(self.posterior.named_buffers())
        others = {name: buffer for name, buffer in everywhere.items() if not name.startswith("particles.own.")}
        moments = {
            f"{name}/{key}": value
            for name, weight in self._weights.items()
            for key, value in self.optimizer.state.get(weight, {}).items()
            if isinstance(value, Tensor) and value.shape == weight.shape
        }
        return {
            what: {name: t.detach() for name, t in tensors.items() if t.is_floating_point()}
            for what, tensors in (
                ("weight", self._weights),
                ("buffer", {**others, **self.posterior.particles.own_buffers()}),
                ("moment", moments),
            )
        }

    def _finite_now(self, tensors: Tensors) -> set[str]:
        """Names of the finite ones: a network may hold masks of −∞, which are no sign of anything."""
        if not suspicious(list(tensors.values())):
            return set(tensors)
        return {name for name, tensor in tensors.items() if bool(tensor.isfinite().all())}


class Aside:
    """A side stream of a CUDA graph for what nothing in the step waits for: it runs while the optimiser does."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.forked = False

    def __call__(self) -> AbstractContextManager[object]:
        """Inside, work goes beside the rest while a graph is captured; elsewhere it is done in its turn."""
        if self.stream is None or not torch.cuda.is_current_stream_capturing():
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.forked = True
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        """The current stream waits for it."""
        if self.stream is not None and self.forked:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.forked = False


def _unless(flag: Tensor, values: Tensors, before: Tensors) -> Tensors:
    """The values, or, where the flag is set, what was before: in a few kernels however many they are."""
    chosen: Tensors = {}
    for dtype in {value.dtype for value in values.values()}:
        names = [name for name, value in values.items() if value.dtype == dtype]
        old = torch.cat([before[name].expand_as(values[name]).reshape(-1) for name in names])
        new = torch.cat([values[name].reshape(-1) for name in names])
        parts = torch.where(flag > 0, old, new).split([values[name].numel() for name in names])
        chosen |= {name: part.view(values[name].shape) for name, part in zip(names, parts, strict=True)}
    return chosen


def _numbers(members: Tensor) -> list[int]:
    found: Sequence[int] = members.nonzero().flatten().tolist()
    return list(found)
