"""What processes of a mesh exchange in a training step: z if members are coupled, and gradients.

this process's rows of the batch → gradients of share · loss + ⟨z, v⟩, with v from the z of all members and all rows
→ one sum over the data axis (`completed`), for shared tensors also over the members axis → the optimiser
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from dissensus.core.batch import Batch
from dissensus.core.collectives import ALONE, Exchange
from dissensus.core.gradients import Gradients
from dissensus.core.particles import Particles, Rows
from dissensus.core.posterior import Posterior
from dissensus.distributed import replayed_rng
from dissensus.distributed.mesh import Axis, Mesh
from dissensus.distributed.sync_batch_norm import SynchronisedNorms
from dissensus.numerics.randomness import same_random_state
from dissensus.utils.dtensor import is_divided
from dissensus.utils.tensor_tree import Tensors

# Random operations of a run; and for each leaf of z of one member: its axis of rows, and how many numbers a row has
Plan = tuple[list[replayed_rng.Draw], list[tuple[int | None, int]]]
UNDIVIDED = "divide only members: mesh(data=1)"


class Share(NamedTuple):
    """What of a batch lies here: of `size` rows those of `here`, `weight` () of the whole weight `total` ()."""

    size: int
    here: slice
    weight: Tensor | None = None
    total: Tensor | None = None
    divided: bool = False  # a batch with fewer rows than ranks is not: all of them see it whole, and count it in part


class MeshExchange(Exchange):
    """The exchanges of one posterior in training. `taken` is set for every batch; `mine`: which of the M members lie here."""

    def __init__(self, mesh: Mesh, posterior: Posterior) -> None:
        self.mesh, self.posterior = mesh, posterior
        self.particles: Particles = posterior.particles
        self.members: int = self.particles.members
        self.ranks = mesh.data.size
        self.mine = mesh.rows(self.members)
        self.apart = mesh.members.group is not None and self.members > 1  # whether members lie in different processes
        self.taken = Share(0, slice(0, 0))
        self.at_once = False  # whether members run by vmap, where they can
        self._plans: dict[Any, Plan] = {}
        self._axes: list[tuple[int | None, int]] = []
        self._batch = Batch((), torch.zeros(0))
        self._noise: replayed_rng.WholeNoise | None = None
        self._alike = False  # whether leaves of z without rows were seen to be the same everywhere
        self._probing = False
        self._works: list[distributed.Work] = []  # sums that have begun
        self._summed = False  # whether they were those of this batch

    def rows(self, size: int) -> tuple[int, slice]:
        # In a trial run of a few rows, any that are as many.
        return (max(self.taken.size, 3), slice(0, size)) if self._probing else (self.taken.size, self.taken.here)

    def weighed(self, value: Tensor) -> Tensor:
        return value if self.share is None else value * self.share.to(value.dtype)

    def counted(self, weight: Tensor) -> Tensor:
        return weight if self.taken.total is None else self.taken.total.to(weight.dtype)

    @property
    def share(self) -> Tensor | None:
        return self.taken.weight

    # ------------------------------------------------------------------ a run of members

    def running(self, posterior: Any, batch: Batch) -> AbstractContextManager[object]:
        stack, self._batch, self._noise = ExitStack(), batch, None
        at_once = self.at_once and self.particles.how == "vectorised"
        draws, self._axes = self._planned(at_once=at_once)
        if any(draw.drew for draw in draws):
            together = (self.members, self.mine) if self.apart and at_once else None
            self._noise = replayed_rng.WholeNoise(draws, members=together, rows=(self.taken.size, self.taken.here))
            stack.enter_context(self._noise)
        if self.taken.divided and self.mesh.statistics == "synchronised":
            stack.enter_context(SynchronisedNorms(self.mesh.data))
        return stack

    def _planned(self, *, at_once: bool) -> Plan:
        """(random operations of a run, axes of what z holds), for batches like this one."""
        posterior = self.posterior
        key = (posterior.acts, posterior.training, at_once, *_kinds(self._batch))
        if key not in self._plans:
            try:
                self._plans[key] = self._probed(self._batch, at_once=at_once)
            except Exception:
                if not at_once:
                    raise
                self._plans[key] = self._planned(at_once=False)  # what cannot run at once will run in a loop
        return self._plans[key]

    def _probed(self, batch: Batch, *, at_once: bool) -> Plan:
        """The plan, by running members that lie here on two and on three rows."""
        particles = self.particles
        shared, common = particles.shared_parameters(), particles.shared_buffers()

        def run(some: Batch) -> list[torch.Size]:
            def one(row: Rows) -> Any:
                params = particles.put_together({**shared, **row.own})
                z = self.posterior.member_loss(params, {**common, **row.buffers}, some)[1]
                return pytree.tree_leaves(z)

            if not at_once:
                return [leaf.shape for leaf in one(particles.rows().at(0))]
            with particles.vectorising():
                return [leaf.shape[1:] for leaf in torch.func.vmap(one, randomness="different")(particles.rows())]

        self._probing = True
        try:
            with same_random_state(self.posterior.device), torch.no_grad(), particles.runner.running():
                (two, first), (three, second) = (replayed_rng.recorded(run, batch, rows) for rows in (2, 3))
        finally:
            self._probing = False
        return replayed_rng.plan(two, three), [replayed_rng.grown(a, b) for a, b in zip(first, second, strict=True)]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        try:
            with self._others_drawn():
                yield
        finally:
            for work in self._works:
                work.wait()
            self._summed, self._works = bool(self._works), []

    @contextmanager
    def _others_drawn(self) -> Iterator[None]:
        """Before and after, the noise of members that lie elsewhere is drawn."""
        if self._noise is None or not self.apart:
            yield
            return
        self._noise.paused = True  # all at once may have failed, whose draws were others
        self._noise.draws, self._noise.members, self._noise.position = self._planned(at_once=False)[0], None, 0
        self._noise.skip(self.mine.start)
        yield
        self._noise.skip(self.members - self.mine.stop)

    # ------------------------------------------------------------------ members that act on each other

    def coupled(self, couple: Callable[[Any], Any], z: Any) -> Any:
        leaves, form = pytree.tree_flatten(z)
        whole, cuts = [], []
        for leaf, (axis, per_row) in zip(leaves, self._axes, strict=True):
            cut = [self.mine, *[slice(None)] * (leaf.ndim - 1)]
            if self.taken.divided and axis is not None:
                leaf = self._all_rows(leaf, axis + 1, per_row)
                cut[axis + 1] = slice(self.taken.here.start * per_row, self.taken.here.stop * per_row)
            elif self.taken.divided and not self._alike:
                self._check_alike(leaf)
            whole.append(self.mesh.members.gather(leaf, self.members) if self.apart else leaf)
            cuts.append(tuple(cut))
        self._alike = self._alike or self.taken.divided
        with self._all_members():
            v = pytree.tree_leaves(couple(pytree.tree_unflatten(whole, form)))
        # What has no row for each example is there in every process of the data axis, and counts in each by its share.
        mine = [
            each[cut] if self.taken.divided and axis is not None else self.weighed(each[cut])
            for each, cut, (axis, _) in zip(v, cuts, self._axes, strict=True)
        ]
        return pytree.tree_unflatten(mine, form)

    def _all_rows(self, leaf: Tensor, axis: int, per_row: int) -> Tensor:
        here = self.taken.here.stop - self.taken.here.start
        if leaf.shape[axis] != here * per_row:
            raise ValueError(f"expected z with a row for each of {here} examples, got {tuple(leaf.shape)}; {UNDIVIDED}")
        rows = leaf.movedim(axis, 0)
        rows = rows.reshape(here, per_row, *rows.shape[1:])
        return self.mesh.data.gather(rows, self.taken.size).flatten(0, 1).movedim(0, axis)

    def _check_alike(self, leaf: Tensor) -> None:
        """Raises where what members are compared in has no rows, but is not the same in processes that see other rows."""
        largest, smallest = self.mesh.data.largest(leaf.double().clone()), -self.mesh.data.largest(-leaf.double())
        if not torch.allclose(largest, smallest, rtol=1e-6, atol=1e-9, equal_nan=True):
            got = f"shape {tuple(leaf.shape)}, which depends on the examples"
            raise ValueError(f"expected z of each member with a row for each example, got {got}; {UNDIVIDED}")

    def mixed(self, mix: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        if not self.apart:
            return mix(gradients)
        own = {name: p for name, p in self.particles.own_parameters().items() if p.requires_grad}
        names = [name for name in gradients if name in own]
        whole = self._gathered([*(p.detach() for p in own.values()), *(gradients[name] for name in names)])
        here = {name: parameter.data for name, parameter in own.items()}
        for parameter, values in zip(own.values(), whole, strict=False):
            parameter.data = values
        try:
            with self._all_members():
                found = mix(gradients | dict(zip(names, whole[len(own) :], strict=True)))
        finally:
            for name, parameter in own.items():
                parameter.data = here[name]
        return {name: each[self.mine] if name in own else each for name, each in found.items()}

    @contextmanager
    def _all_members(self) -> Iterator[None]:
        """Inside, the particles count as many members as there are everywhere."""
        here, self.particles.members = self.particles.members, self.members
        try:
            yield
        finally:
            self.particles.members = here

    # ------------------------------------------------------------------ gradients that are complete

    @torch.no_grad()
    def found(self, gradients: Gradients) -> Gradients:
        """One member's loss and gradients, whose sum over the data axis has begun."""
        return gradients if self.mesh.data.group is None else self._over_rows(self._begin, gradients)

    def _begin(self, flat: Tensor) -> Tensor:
        self._works += [work] if (work := self.mesh.data.begin_sum(flat)) is not None else []
        return flat

    @torch.no_grad()
    def completed(self, posterior: Any, found: Gradients) -> Gradients:
        if not self._summed and self.mesh.data.group is not None:
            found = self._over_rows(self.mesh.data.sum, found)
        self._summed, gradients = False, dict(found.gradients)
        shared = self.particles.shared_parameters()
        if self.apart and (names := [name for name in gradients if name in shared]):
            summed = _summed(self.mesh.members.sum, [gradients[name] for name in names])
            gradients |= dict(zip(names, summed, strict=True))
        return found._replace(gradients=gradients)

    def _over_rows(self, add: Callable[[Tensor], Tensor], found: Gradients) -> Gradients:
        """Losses and gradients summed over the data axis, by their shares; those of divided tensors are so already."""
        plain = {name: each for name, each in found.gradients.items() if not is_divided(each)}
        losses, *summed = _summed(add, [self.weighed(found.losses), *plain.values()])
        return found._replace(losses=losses, gradients=found.gradients | dict(zip(plain, summed, strict=True)))

    def averaged(self, values: Tensor) -> Tensor:
        if not self.apart or not values.is_floating_point():
            return ALONE.averaged(values)
        return self.mesh.members.sum(values.sum(0)) / self.members

    # ------------------------------------------------------------------ what is not finite

    def any(self, here: bool) -> bool:
        axis = self._disagreeing
        return here if axis is None else bool(axis.largest(torch.tensor(float(here), device=self.posterior.device)) > 0)

    @property
    def _disagreeing(self) -> Axis | None:
        """The axis whose ranks may see different numbers: those of the data axis have the same sums of whole tensors."""
        return self.mesh.data if self.particles.divided else self.mesh.members if self.apart else None

    def agree(self, flag: Tensor) -> None:
        if (axis := self._disagreeing) is not None:
            axis.largest(flag)

    def everywhere(self, values: Tensor) -> Tensor:
        if self.particles.divided:
            return self.mesh.data.largest(values.to(torch.uint8)).to(values.dtype)
        if not self.apart:
            return values
        return self.mesh.members.gather(values.to(torch.uint8), self.members, axis=1).to(values.dtype)

    def _gathered(self, each: list[Tensor]) -> list[Tensor]:
        """Tensors (M here, ...) of all members, in one exchange for each dtype."""
        found: list[Tensor] = list(each)
        for places in _by_dtype(each):
            flat = torch.cat([each[i].reshape(len(each[i]), -1) for i in places], dim=1)
            whole = self.mesh.members.gather(flat, self.members)  # (M, P)
            for i, part in zip(places, torch.split(whole, [each[i][0].numel() for i in places], dim=1), strict=True):
                found[i] = part.reshape(len(part), *each[i].shape[1:])
        return found


def _summed(add: Callable[[Tensor], Tensor], each: list[Tensor]) -> list[Tensor]:
    """The tensors summed over ranks, in one exchange for each dtype."""
    found: list[Tensor] = list(each)
    for places in _by_dtype(each):
        flat = add(torch.cat([each[i].reshape(-1) for i in places]))
        for i, part in zip(places, torch.split(flat, [each[i].numel() for i in places]), strict=True):
            found[i] = part.view(each[i].shape)
    return found


def _by_dtype(each: list[Tensor]) -> list[list[int]]:
    """Places of the tensors of each dtype, in the same order in every process."""
    kinds = dict.fromkeys(tensor.dtype for tensor in each)
    return [[i for i, tensor in enumerate(each) if tensor.dtype == kind] for kind in kinds]


def _kinds(batch: Batch) -> Iterable[Any]:
    return (batch.weight is None, *((tuple(each.shape[1:]), each.dtype) for each in batch.tensors()))
