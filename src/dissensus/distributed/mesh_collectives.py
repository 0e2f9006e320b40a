"""What processes of a mesh exchange in a training step: z if members are coupled, and gradients.

this process's rows of the batch → gradients of share · loss + ⟨z, v⟩, with v from the z of all members and all rows
→ one sum over the data axis (`completed`), for shared tensors also over the members axis → the optimiser
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed

from dissensus.core.batch import Batch, Inputs, map_tensors
from dissensus.core.collectives import ALONE, Exchange
from dissensus.core.gradients import Gradients
from dissensus.core.likelihood import expand_weight
from dissensus.core.particles import Particles, Rows
from dissensus.core.posterior import Posterior
from dissensus.distributed import replayed_rng
from dissensus.distributed.mesh import Axis, Mesh
from dissensus.distributed.sync_batch_norm import synchronise_norms
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.sharding import is_divided
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_modes import set_attributes
from dissensus.utils.torch_private import pytree

# Random operations of a run; and for each leaf of z of one member: its axis of rows, and how many numbers a row has
Plan = tuple[list[replayed_rng.Draw], list[tuple[int | None, int]]]
UNDIVIDED = "divide only members: mesh(data=1)"
UNEVEN = "expected parts of a batch with as many rows in every process"


class LocalBatch(NamedTuple):
    """What of a batch lies here: of `size` rows those of `here`, `weight` () of the whole weight `total` ()."""

    size: int
    rows: slice
    weight: Tensor | None = None
    total: Tensor | None = None
    is_split: bool = False  # a batch with fewer rows than ranks is not: all of them see it whole, and count it in part


class MeshExchange(Exchange):
    """The exchanges of one posterior in training. `local_batch` is set for every batch."""

    def __init__(self, mesh: Mesh, posterior: Posterior) -> None:
        self.mesh, self.posterior = mesh, posterior
        self.particles: Particles = posterior.particles
        self.members: int = self.particles.members
        self.ranks = mesh.data.size
        self.member_slice = mesh.member_slice(self.members)
        # whether members lie in different processes
        self.splits_members = mesh.members.group is not None and self.members > 1
        self.local_batch = LocalBatch(0, slice(0, 0))
        self.at_once = False  # whether members run by vmap, where they can
        self.reads_parts = False  # whether the loader gives this rank's rows alone
        self.part: tuple[int, slice] | None = None  # (rows of the last batch, which were read), where not all were
        self._sizes: set[int] = set()  # of parts
        self.uneven: Tensor | bool = False  # () whether ranks had parts of other sizes; looked at after an epoch
        self._plans: dict[Any, Plan] = {}
        self._axes: list[tuple[int | None, int]] = []
        self._batch = Batch((), torch.zeros(0))
        self._noise: replayed_rng.FullBatchNoise | None = None
        self._leaves_checked = False  # whether leaves of z without rows were seen to be the same everywhere
        self._probing = False
        self._pending_sums: list[distributed.Work] = []  # sums that have begun
        self._sums_begun = False  # whether they were those of this batch

    def take_rows(self, batch: Batch) -> Batch:
        data, size, weight = self.mesh.data, batch.size, example_weights(self.posterior, batch)
        if data.group is None:
            self.local_batch = LocalBatch(size, slice(0, size))
            return batch
        if self.reads_parts:
            self.local_batch = self._measure_part(size, weight.sum())
            return batch
        if self.part is None and size < data.size:
            self.local_batch = LocalBatch(size, slice(0, size), weight.new_tensor(1 / data.size), weight.sum())
            return batch
        if self.part is not None:
            (size, here), own = self.part, weight.sum()
            alike = batch.weight is None and self.posterior.likelihood.training_weight(batch.y) is None
            total = weight.new_tensor(size) if alike else data.sum(own.clone())
        else:
            here = self.mesh.row_slice(size)
            own, total = weight[here].sum(), weight.sum()
            weights = None if batch.weight is None else batch.weight[here]
            batch = Batch(select_rows(batch.x, size, here), cast(Tensor, select_rows(batch.y, size, here)), weights)
        mine = torch.where(total > 0, own / total, batch.size / size)
        self.local_batch = LocalBatch(size, here, mine, total, is_split=True)
        return batch

    def _measure_part(self, size: int, weight: Tensor) -> LocalBatch:
        """The share of a batch that is this rank's part of a whole one."""
        data = self.mesh.data
        each = data.gather(torch.stack([weight.new_tensor(size), weight])[None], data.size)  # (R, 2)
        if size not in self._sizes:
            self._sizes.add(size)
            if len({*(sizes := [*map(int, each[:, 0].tolist())])}) > 1:
                raise ValueError(f"{UNEVEN}, got {sizes}; make them even")
        self.uneven = self.uneven | (each[:, 0] != size).any()
        total = each[:, 1].sum()
        mine = torch.where(total > 0, weight / total, 1 / data.size)
        return LocalBatch(size * data.size, slice(size * data.rank, size * (data.rank + 1)), mine, total, is_split=True)

    def batch_rows(self, size: int) -> tuple[int, slice]:
        # In a trial run of a few rows, any that are as many.
        mine = self.local_batch
        return (max(mine.size, 3), slice(0, size)) if self._probing else (mine.size, mine.rows)

    def scale_by_fraction(self, value: Tensor) -> Tensor:
        return value if self.batch_fraction is None else value * self.batch_fraction.to(value.dtype)

    def total_batch_weight(self, weight: Tensor) -> Tensor:
        return weight if self.local_batch.total is None else self.local_batch.total.to(weight.dtype)

    @property
    def batch_fraction(self) -> Tensor | None:
        return self.local_batch.weight

    def gradient_context(self, posterior: Any, batch: Batch) -> AbstractContextManager[object]:
        stack, self._batch, self._noise = ExitStack(), batch, None
        at_once = self.at_once and self.particles.how == "vectorised"
        draws, self._axes = self._find_plan(at_once=at_once)
        if any(draw.uses_generator for draw in draws):
            together = (self.members, self.member_slice) if self.splits_members and at_once else None
            rows = (self.local_batch.size, self.local_batch.rows)
            self._noise = replayed_rng.FullBatchNoise(draws, members=together, rows=rows)
            stack.enter_context(self._noise)
        if self.local_batch.is_split and self.mesh.statistics == "synchronised":
            stack.enter_context(synchronise_norms(self.mesh.data))
        return stack

    def _find_plan(self, *, at_once: bool) -> Plan:
        """(random operations of a run, axes of what z holds), for batches like this one."""
        posterior = self.posterior
        columns = ((tuple(each.shape[1:]), each.dtype) for each in self._batch.tensors())
        key = (posterior.interaction, posterior.training, at_once, self._batch.weight is None, *columns)
        if key not in self._plans:
            try:
                self._plans[key] = self._probe_plan(self._batch, at_once=at_once)
            except Exception:
                if not at_once:
                    raise
                self._plans[key] = self._find_plan(at_once=False)  # what cannot run at once will run in a loop
        return self._plans[key]

    def _probe_plan(self, batch: Batch, *, at_once: bool) -> Plan:
        """The plan, by running members that lie here on two and on three rows."""
        particles = self.particles
        shared, common = particles.shared_parameters(), particles.shared_buffers()

        def run(some: Batch) -> list[torch.Size]:
            def one(row: Rows) -> Any:
                params = particles.full_tensors({**shared, **row.own})
                return pytree.tree_leaves(self.posterior.member_loss(params, {**common, **row.buffers}, some)[1])

            if not at_once:
                return [leaf.shape for leaf in one(particles.rows().member_rows(1)[0])]
            with particles.vmap_context():
                return [leaf.shape[1:] for leaf in torch.func.vmap(one, randomness="different")(particles.rows())]

        probing, kept = set_attributes(self, _probing=True), preserve_random_state(self.posterior.device)
        with probing, kept, torch.no_grad(), particles.runner.run_context():
            (two, first), (three, second) = (replayed_rng.record_draws(run, batch, rows) for rows in (2, 3))
        axes = [replayed_rng.find_row_axis(a, b) for a, b in zip(first, second, strict=True)]
        return replayed_rng.plan_draws(two, three), axes

    @contextmanager
    def loop_context(self) -> Iterator[None]:
        noise = self._noise if self.splits_members else None  # that of members elsewhere is drawn before and after
        try:
            if noise is not None:
                noise.paused = True  # all at once may have failed, whose draws were others
                noise.draws, noise.members, noise.position = self._find_plan(at_once=False)[0], None, 0
                noise.draw_for_others(self.member_slice.start)
            yield
            if noise is not None:
                noise.draw_for_others(self.members - self.member_slice.stop)
        finally:
            for work in self._pending_sums:
                work.wait()
            self._sums_begun, self._pending_sums = bool(self._pending_sums), []

    def couple_members(self, couple: Callable[[Any], Any], z: Any) -> Any:
        leaves, form = pytree.tree_flatten(z)
        whole, cuts = [], []
        for leaf, (axis, per_row) in zip(leaves, self._axes, strict=True):
            cut = [self.member_slice, *[slice(None)] * (leaf.ndim - 1)]
            if self.local_batch.is_split and axis is not None:
                leaf = self._gather_rows(leaf, axis + 1, per_row)
                cut[axis + 1] = slice(self.local_batch.rows.start * per_row, self.local_batch.rows.stop * per_row)
            elif self.local_batch.is_split and not self._leaves_checked:
                self._check_equal_leaf(leaf)
            whole.append(self.mesh.members.gather(leaf, self.members) if self.splits_members else leaf)
            cuts.append(tuple(cut))
        self._leaves_checked = self._leaves_checked or self.local_batch.is_split
        with self._all_members():
            v = pytree.tree_leaves(couple(pytree.tree_unflatten(whole, form)))
        # What has no row for each example is there in every process of the data axis, and counts in each by its share.
        mine = [
            each[cut] if self.local_batch.is_split and axis is not None else self.scale_by_fraction(each[cut])
            for each, cut, (axis, _) in zip(v, cuts, self._axes, strict=True)
        ]
        return pytree.tree_unflatten(mine, form)

    def _gather_rows(self, leaf: Tensor, axis: int, per_row: int) -> Tensor:
        here = self.local_batch.rows.stop - self.local_batch.rows.start
        if leaf.shape[axis] != here * per_row:
            raise ValueError(f"expected z with a row for each of {here} examples, got {tuple(leaf.shape)}; {UNDIVIDED}")
        rows = leaf.movedim(axis, 0)
        rows = rows.reshape(here, per_row, *rows.shape[1:])
        return self.mesh.data.gather(rows, self.local_batch.size).flatten(0, 1).movedim(0, axis)

    def _check_equal_leaf(self, leaf: Tensor) -> None:
        """Raises where what members are compared in has no rows, but is not the same in processes that see other rows."""
        largest, smallest = self.mesh.data.maximum(leaf.double().clone()), -self.mesh.data.maximum(-leaf.double())
        if not torch.allclose(largest, smallest, rtol=1e-6, atol=1e-9, equal_nan=True):
            got = f"shape {tuple(leaf.shape)}, which depends on the examples"
            raise ValueError(f"expected z of each member with a row for each example, got {got}; {UNDIVIDED}")

    def mix_gradients(self, mix: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        if not self.splits_members:
            return mix(gradients)
        own = {name: p for name, p in self.particles.own_parameters().items() if p.requires_grad}
        names = [name for name in gradients if name in own]
        tensors = [*(p.detach() for p in own.values()), *(gradients[name] for name in names)]
        whole = _exchange_flat(lambda flat: self.mesh.members.gather(flat, self.members), tensors)
        here = {name: parameter.data for name, parameter in own.items()}
        for parameter, values in zip(own.values(), whole, strict=False):
            parameter.data = values
        try:
            with self._all_members():
                found = mix(gradients | dict(zip(names, whole[len(own) :], strict=True)))
        finally:
            for name, parameter in own.items():
                parameter.data = here[name]
        return {name: each[self.member_slice] if name in own else each for name, each in found.items()}

    def _all_members(self) -> AbstractContextManager[None]:
        """Inside, the particles count as many members as there are everywhere."""
        return set_attributes(self.particles, members=self.members)

    @torch.no_grad()
    def submit_gradients(self, gradients: Gradients) -> Gradients:
        """One member's loss and gradients, whose sum over the data axis has begun."""
        add = partial(self.mesh.data.sum, pending=self._pending_sums)
        return gradients if self.mesh.data.group is None else self._sum_over_rows(add, gradients)

    @torch.no_grad()
    def reduce_gradients(self, posterior: Any, found: Gradients) -> Gradients:
        if not self._sums_begun and self.mesh.data.group is not None:
            found = self._sum_over_rows(self.mesh.data.sum, found)
        self._sums_begun, gradients = False, dict(found.gradients)
        shared = self.particles.shared_parameters()
        if self.splits_members and (names := [name for name in gradients if name in shared]):
            summed = _exchange_flat(self.mesh.members.sum, [gradients[name][None] for name in names])
            gradients |= {name: each[0] for name, each in zip(names, summed, strict=True)}
        return found._replace(gradients=gradients)

    def _sum_over_rows(self, add: Callable[[Tensor], Tensor], found: Gradients) -> Gradients:
        """Losses and gradients summed over the data axis, by their shares; those of divided tensors are so already."""
        plain = {name: each for name, each in found.gradients.items() if not is_divided(each)}
        each = [self.scale_by_fraction(found.losses), *plain.values()]
        losses, *summed = (tensor[0] for tensor in _exchange_flat(add, [tensor[None] for tensor in each]))
        return found._replace(losses=losses, gradients=found.gradients | dict(zip(plain, summed, strict=True)))

    def average_members(self, values: Tensor) -> Tensor:
        if not self.splits_members or not values.is_floating_point():
            return ALONE.average_members(values)
        return self.mesh.members.sum(values.sum(0)) / self.members

    def any_process(self, here: bool) -> bool:
        axis = self._differing_axis
        return here if axis is None else bool(axis.maximum(torch.tensor(float(here), device=self.posterior.device)) > 0)

    @property
    def _differing_axis(self) -> Axis | None:
        """The axis whose ranks may see different numbers: those of the data axis have the same sums of whole tensors."""
        return self.mesh.data if self.particles.divided else self.mesh.members if self.splits_members else None

    def reduce_flag(self, flag: Tensor) -> None:
        if (axis := self._differing_axis) is not None:
            axis.maximum(flag)

    def gather_members(self, values: Tensor) -> Tensor:
        if self.particles.divided:
            return self.mesh.data.maximum(values.to(torch.uint8)).to(values.dtype)
        if not self.splits_members:
            return values
        return self.mesh.members.gather(values.to(torch.uint8), self.members, axis=1).to(values.dtype)


def _exchange_flat(exchange: Callable[[Tensor], Tensor], each: list[Tensor]) -> list[Tensor]:
    """The tensors (M, ...), joined to (M, P) for each dtype, after an exchange that may change M; views of its results."""
    found: list[Tensor] = list(each)
    for kind in dict.fromkeys(tensor.dtype for tensor in each):
        places = [i for i, tensor in enumerate(each) if tensor.dtype == kind]
        flat = exchange(torch.cat([each[i].reshape(len(each[i]), -1) for i in places], dim=1))
        for i, part in zip(places, torch.split(flat, [each[i][0].numel() for i in places], dim=1), strict=True):
            found[i] = part.view(len(flat), *each[i].shape[1:])
    return found


def select_rows(x: Inputs, size: int, rows: slice) -> Inputs:
    """These rows of every tensor of x that has as many as the batch."""
    return map_tensors(x, lambda tensor: tensor[rows] if tensor.ndim and len(tensor) == size else tensor)


def example_weights(posterior: Posterior, batch: Batch) -> Tensor:
    """(B,) how much each example counts in a mean over the batch: its weight, over entries that count."""
    weight = torch.ones(batch.size, device=batch.y.device) if batch.weight is None else batch.weight
    weight, entries = weight.double(), posterior.likelihood.training_weight(batch.y)
    if entries is None:
        return weight
    return (expand_weight(weight, entries.double()) * entries).reshape(batch.size, -1).sum(1)
