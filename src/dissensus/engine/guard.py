"""The guard of a training step: losses and gradients are looked at before the optimiser moves anything.

On the host a bad batch raises at once. On a GPU nobody waits for the answer: a flag on the device lets the fused optimiser
skip the step, and every one after it, keeps batch statistics and clock as they were, and is read once an epoch. Either way
the posterior stays as it was after the last good step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dissensus.core.errors import Diverged
from dissensus.core.finite import members_not_finite, suspicious
from dissensus.core.particles import Tensors
from dissensus.core.posterior import Posterior
from dissensus.engine.optimisers import can_skip


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
        self.members = torch.zeros(particles.members, dtype=torch.bool, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.of_loss = torch.zeros((), dtype=torch.bool, device=device)
        self._kept: Tensors | None = None
        self._unmixed: Tensor | None = None  # (M,) members whose gradients were bad before they were mixed
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
        bad = self._members(gradients)
        self._unmixed = bad if self._unmixed is None else self._unmixed | bad

    def look(self, losses: Tensor | None, *, complete: bool) -> None:
        """Looks at losses, one per function, and, where the step is complete, at gradients; on the host raises Diverged."""
        gradients = {name: p.grad for name, p in self._weights.items() if p.grad is not None} if complete else {}
        if self.reads and not suspicious([*([] if losses is None else [losses]), *gradients.values()]):
            return
        nobody = torch.zeros_like(self.members)
        # A member by any of its samples.
        of_losses = nobody if losses is None else ~losses.isfinite().reshape(len(nobody), -1).all(1)
        of_gradients = self._members(gradients) if gradients else nobody
        if complete and self._unmixed is not None:
            of_gradients = torch.where(self._unmixed.any(), self._unmixed, of_gradients)
        bad = torch.where(of_losses.any(), of_losses, of_gradients)  # (M,)
        first = bad.any() & (self.halted == 0)
        self.members.copy_(torch.where(first, bad, self.members))
        self.step.copy_(torch.where(first, self.posterior.steps + 1, self.step))
        self.of_loss.copy_(torch.where(first, of_losses.any(), self.of_loss))
        self.halted.copy_(torch.maximum(self.halted, bad.any().to(self.halted)))
        if self.reads:
            self._raise_if_halted()

    def write(self, buffers: Tensors) -> None:
        """Stores batch statistics (M, ...) as they were after a batch, unless it was bad or followed a bad one."""
        particles = self.posterior.particles
        if self.reads or not buffers:
            particles.write_buffers(buffers)
            return
        before = self._kept or self._buffers()
        particles.write_buffers(
            {n: torch.where(self.halted > 0, before[n], value) for n, value in buffers.items() if n in before}
        )

    def undo(self) -> None:
        """Puts batch statistics back to before the step's first batch, if it went wrong after some of them."""
        if self._kept is not None:
            now = self._buffers()
            kept = {name: torch.where(self.halted > 0, value, now[name]) for name, value in self._kept.items()}
            self.posterior.particles.write_buffers(kept)

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
        before = [clock.clone() for clock in clocks]
        if self.watched:  # what watches keeps counts on the host: it sees weights that stand still
            for parameter in self.posterior.parameters():
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(self.halted > 0, 0.0)
        self.posterior.observe(self.optimizer)
        for clock, value in zip(clocks, before, strict=True):
            clock.copy_(torch.where(self.halted > 0, value, clock))

    def check(self) -> None:
        """Raises Diverged for what a device has noted since, and where a step has left tensors that are not finite."""
        if not self.host:
            self._raise_if_halted()
        for what, tensors in self._tensors().items():
            found = {name: tensor for name, tensor in tensors.items() if name in self._sound[what] or what == "moment"}
            if self.host and not suspicious(list(found.values())):
                continue
            bad = self._members(found)
            if bad.any():
                raise Diverged(_numbers(bad), int(self.posterior.steps), what)

    def _raise_if_halted(self) -> None:
        if self.halted > 0:
            self.undo()
            self.posterior.zero_grad(set_to_none=True)
            self.halted.zero_()
            raise Diverged(_numbers(self.members), int(self.step), "loss" if self.of_loss else "gradient")

    def _buffers(self) -> Tensors:
        """Buffers that training changes, each (M, ...)."""
        particles = self.posterior.particles
        shared = {name: buffer[None] for name, buffer in particles.shared_buffers().items()}
        return {**shared, **particles.own_buffers()}

    def _members(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(M,) whose tensors by name are not finite; names that are not a member's own belong to all."""
        particles = self.posterior.particles
        own = particles.own_parameters().keys() | particles.own_buffers().keys()
        mine = [tensor for name, tensor in tensors.items() if name.partition("/")[0] in own]
        others = [tensor for name, tensor in tensors.items() if name.partition("/")[0] not in own]
        return members_not_finite(mine, others, particles.members).to(self.posterior.device)

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


def _numbers(members: Tensor) -> list[int]:
    found: Sequence[int] = members.nonzero().flatten().tolist()
    return list(found)
