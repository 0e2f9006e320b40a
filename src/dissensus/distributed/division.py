"""Division: a posterior in training on a mesh, each process with its members and its rows of every batch.

    in a step      rows of the batch (`part`) → gradients of share · loss, z gathered where members are coupled
                   → one sum over the data axis (`completed`), shared tensors over the members axis too → the optimiser
    in an epoch    `here`: particles and recorders hold the members that lie here; outside all processes hold all members
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dissensus.core.batch import Batch, apply
from dissensus.core.errors import Diverged
from dissensus.core.exchange import ALONE, Exchange
from dissensus.core.gradients import Gradients
from dissensus.core.likelihood import spread
from dissensus.core.particles import Particles, Rows
from dissensus.core.posterior import Posterior
from dissensus.core.recorder import Recorder
from dissensus.core.splitting import tensors_of
from dissensus.distributed import noise
from dissensus.distributed.alone import Undivided
from dissensus.distributed.joining import connected, start
from dissensus.distributed.mesh import Mesh
from dissensus.distributed.mesh import mesh as make_mesh
from dissensus.distributed.statistics import SynchronisedNorms
from dissensus.numerics.checks import one_of
from dissensus.numerics.randomness import same_random_state
from dissensus.numerics.tree import Tensors


class Division(Exchange, Undivided):
    """A posterior's training, divided over a mesh. Made by `fit`, the same in every process."""

    def __init__(self, mesh: Mesh, posterior: Posterior) -> None:
        self.mesh, self.posterior = mesh, posterior
        self.is_first = mesh.is_first
        self.together = mesh if mesh.size > 1 else None
        self.particles: Particles = posterior.particles
        self.members: int = self.particles.members
        self.mine = mesh.rows(self.members)
        self._share: Tensor | None = None
        self._rows = (0, slice(0, 0))  # of the batch: how many, and which lie here
        self._divided = True  # whether the batch is: one with fewer rows than ranks is seen whole by all
        self._plans: dict[Any, tuple[list[noise.Draw], list[tuple[int | None, int]]]] = {}
        self._noise: noise.WholeNoise | None = None
        self._axes: list[tuple[int | None, int]] = []  # of z's leaves, in a run of one member: that of the rows, numbers per row
        self._alike = False  # whether leaves of z without rows were seen to be the same everywhere
        self._probing = False
        self._whole: list[tuple[Tensor, Tensor, int]] = []  # (tensor, its values of all members, the axis of members)
        check_divisible(mesh, posterior)

    # ------------------------------------------------------------------ the state: all members, or those that lie here

    def begin(self) -> None:
        """Gives every process the first one's tensors and random streams."""
        state = {id(each): each for each in (*self.posterior.parameters(), *self.posterior.buffers())}
        with torch.no_grad():
            for tensor in state.values():
                tensor.copy_(self.mesh.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format)))
        streams = self.mesh.objects(
            (torch.get_rng_state(), torch.cuda.get_rng_state() if self.posterior.device.type == "cuda" else None)
        )[0]
        torch.set_rng_state(streams[0])
        if streams[1] is not None:
            torch.cuda.set_rng_state(streams[1])

    @contextmanager
    def here(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, particles, recorders and chains of the optimiser are those that lie here; afterwards all have all again."""
        for tensor, axis in self._with_members():
            whole = tensor.data
            self._whole.append((tensor, whole, axis))
            tensor.data = whole.narrow(axis, self.mine.start, self.mine.stop - self.mine.start).clone()
        self.particles.members = self.mine.stop - self.mine.start
        self.particles.exchange = self
        chains = getattr(optimizer, "generators", None)
        if chains is not None and len(chains) == self.members:
            optimizer.generators = chains[self.mine]  # type: ignore[attr-defined]
        try:
            yield
            self._gather()
        except Diverged:  # in all processes, which are as they were after the last good step
            self._gather()
            raise
        finally:
            for tensor, whole, _ in self._whole:
                tensor.data, tensor.grad = whole, None
            self._whole = []
            self.particles.members = self.members
            del self.particles.exchange  # ALONE again
            if chains is not None:
                optimizer.generators = chains  # type: ignore[attr-defined]

    @contextmanager
    def whole(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimiser has the states of all members, as one process would; afterwards those that lie here again."""
        own = {id(parameter) for parameter in self.particles.own_parameters().values()}
        divided = self.mesh.members.group is not None and self.members > 1
        chains = getattr(optimizer, "generators", [])
        several = divided and len(chains) == self.members
        if several:
            states = self.mesh.members.objects([chain.get_state() for chain in chains[self.mine]])
            for chain, state in zip(chains, (state for each in states for state in each), strict=True):
                chain.set_state(state)
        for parameter, key, value in _states(optimizer, own) if divided else ():
            if value.shape == (self.mine.stop - self.mine.start, *parameter.shape[1:]):
                optimizer.state[parameter][key] = self.mesh.members.gather(value, self.members)
        yield
        for parameter, key, value in _states(optimizer, own) if divided else ():
            if value.shape == parameter.shape:
                optimizer.state[parameter][key] = value[self.mine].clone()

    def _with_members(self) -> list[tuple[Tensor, int]]:
        """(tensor, axis of members) of everything that has a row for each member, where that is more than one."""
        if self.mesh.members.group is None or self.members == 1:
            return []
        found = {id(tensor): (tensor, 0) for tensor in tensors_of(self.particles.own).values()}
        for recorder in (each for each in self.posterior.modules() if isinstance(each, Recorder)):
            found |= {id(tensor): (tensor, axis) for tensor, axis in recorder.with_members()}
        return list(found.values())

    @torch.no_grad()
    def _gather(self) -> None:
        """Puts what lies here into the tensors of all members, with what lies in other processes."""
        for tensor, whole, axis in self._whole:
            whole.copy_(self.mesh.members.gather(tensor, self.members, axis=axis))
        if self.mesh.statistics == "per rank":
            for buffer in self.posterior.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(self.mesh.data.sum(buffer.contiguous().clone()) / self.mesh.data.size)

    # ------------------------------------------------------------------ a batch

    def part(self, batch: Batch) -> Batch:
        """The rows of the batch that lie here; takes note of how much of it they are."""
        size, here = batch.size, self.mesh.share(batch.size)
        self._divided = size >= self.mesh.data.size
        if self.mesh.data.group is None or not self._divided:
            self._rows, self._share = (size, slice(0, size)), None
            if self.mesh.data.group is not None:
                self._share = torch.tensor(1 / self.mesh.data.size, dtype=torch.float64, device=self.posterior.device)
            return batch
        self._rows = size, here

        def rows(tensor: Tensor) -> Tensor:
            return tensor[here] if tensor.ndim and len(tensor) == size else tensor

        weight = counted(self.posterior, batch)
        total, mine = weight.sum(), weight[here].sum()
        self._share = torch.where(total > 0, mine / total, (here.stop - here.start) / size)
        return Batch(apply(batch.x, rows), rows(batch.y), None if batch.weight is None else batch.weight[here])

    def engine(self, engine: str) -> str:
        """Plain members, at once or in a loop, in every process alike: as one process would by itself on a CPU."""
        if engine == "auto":
            return "loop" if self.members == 1 else self.particles.how
        return one_of("engine on a mesh", engine, ("auto", "loop", "vectorised"))

    def losses(self, losses: Tensor) -> Tensor:
        return self.mesh.members.gather(losses, self.members)

    def apart(self, batches: Iterable[Any]) -> Iterator[Any]:
        return (batch for number, batch in enumerate(batches) if number % self.mesh.size == self.mesh.rank)

    def total(self, *numbers: float) -> list[float]:
        return [math.fsum(each) for each in zip(*self.mesh.objects(numbers), strict=True)]

    def first(self, value: Any) -> Any:
        return self.mesh.objects(value)[0]

    def rows(self, size: int) -> tuple[int, slice]:
        return (max(self._rows[0], 3), slice(0, size)) if self._probing else self._rows

    def weighed(self, value: Tensor) -> Tensor:
        return value if self._share is None else value * self._share.to(value.dtype)

    @property
    def share(self) -> Tensor | None:
        return self._share

    # ------------------------------------------------------------------ gradients

    def running(self, posterior: Any, batch: Batch) -> AbstractContextManager[object]:
        stack, key = ExitStack(), (posterior.acts, posterior.training, self.particles.how, *_kinds(batch))
        if key not in self._plans:
            self._plans[key] = self._probed(batch)
        draws, self._axes = self._plans[key]
        together = (self.members, self.mine) if self.mesh.members.group is not None else None
        if any(draw.drew for draw in draws):
            self._noise = noise.WholeNoise(draws, members=together, rows=self._rows)
            stack.enter_context(self._noise)
        if self._divided and self.mesh.data.group is not None and self.mesh.statistics == "synchronised":
            stack.enter_context(SynchronisedNorms(self.mesh.data))
        stack.callback(self._quiet)
        return stack

    def _quiet(self) -> None:
        self._noise = None

    def _probed(self, batch: Batch) -> tuple[list[noise.Draw], list[tuple[int | None, int]]]:
        """(random operations of a run, axes of what z holds), by running members that lie here on two and on three rows."""
        particles = self.particles
        shared, common = particles.shared_parameters(), particles.shared_buffers()

        def run(some: Batch) -> list[torch.Size]:
            def one(row: Rows) -> Any:
                z = self.posterior.member_loss({**shared, **row.own}, {**common, **row.buffers}, some)[1]
                return pytree.tree_leaves(z)

            if particles.how == "loop" or self.members == 1:
                return [leaf.shape for leaf in one(particles.rows().at(0))]
            with particles.vectorising():
                return [leaf.shape[1:] for leaf in torch.func.vmap(one, randomness="different")(particles.rows())]

        self._probing = True
        try:
            with same_random_state(self.posterior.device), torch.no_grad(), particles.runner.running():
                (two, first), (three, second) = (noise.recorded(run, batch, rows) for rows in (2, 3))
        finally:
            self._probing = False
        return noise.plan(two, three), [noise.grown(a, b) for a, b in zip(first, second, strict=True)]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        if self._noise is None or self.mesh.members.group is None:
            yield
            return
        self._noise.members = None
        self._noise.skip(self.mine.start)
        yield
        self._noise.skip(self.members - self.mine.stop)

    def coupled(self, couple: Callable[[Any], Any], z: Any) -> Any:
        leaves, form = pytree.tree_flatten(z)
        divided = self._divided and self.mesh.data.group is not None
        size, here = self._rows
        whole, cuts = [], []
        for leaf, (axis, per_row) in zip(leaves, self._axes, strict=True):
            cut = [slice(None)] * leaf.ndim
            cut[0] = self.mine
            if divided and axis is not None:
                leaf = self._all_rows(leaf, axis + 1, per_row)
                cut[axis + 1] = slice(here.start * per_row, here.stop * per_row)
            elif divided and not self._alike:
                self._check_alike(leaf)
            whole.append(self.mesh.members.gather(leaf, self.members))
            cuts.append(tuple(cut))
        self._alike = True
        self.particles.members = self.members
        try:
            v = pytree.tree_leaves(couple(pytree.tree_unflatten(whole, form)))
        finally:
            self.particles.members = self.mine.stop - self.mine.start
        mine = [each[cut] for each, cut in zip(v, cuts, strict=True)]
        # What has no row for each example is there in every process of the data axis, and counts in each by its share.
        weighed = [
            each if divided and axis is not None else self.weighed(each)
            for each, (axis, _) in zip(mine, self._axes, strict=True)
        ]
        return pytree.tree_unflatten(weighed, form)

    def _all_rows(self, leaf: Tensor, axis: int, per_row: int) -> Tensor:
        size, here = self._rows
        if leaf.shape[axis] != (here.stop - here.start) * per_row:
            raise ValueError(
                f"expected members compared in a row for each of {here.stop - here.start} examples, got shape "
                f"{tuple(leaf.shape)}; {UNDIVIDED}"
            )
        rows = leaf.movedim(axis, 0).unflatten(0, (here.stop - here.start, per_row))
        return self.mesh.data.gather(rows, size).flatten(0, 1).movedim(0, axis)

    def _check_alike(self, leaf: Tensor) -> None:
        """Raises where what members are compared in has no rows, but is not the same in processes that see other rows."""
        largest, smallest = self.mesh.data.largest(leaf.double().clone()), -self.mesh.data.largest(-leaf.double())
        if not torch.allclose(largest, smallest, rtol=1e-6, atol=0, equal_nan=True):
            raise ValueError(
                f"expected members compared in a row for each example, or in what all rows agree on, got shape "
                f"{tuple(leaf.shape)}, which depends on the rows; {UNDIVIDED}"
            )

    @torch.no_grad()
    def completed(self, posterior: Any, found: Gradients) -> Gradients:
        data, members = self.mesh.data, self.mesh.members
        losses, gradients = self.weighed(found.losses), dict(found.gradients)
        if data.group is not None:
            losses, *summed = _summed(data.sum, [losses, *gradients.values()])
            gradients = dict(zip(gradients, summed, strict=True))
        shared = self.particles.shared_parameters()
        names = [name for name in gradients if name in shared] if members.group is not None and self.members > 1 else []
        if names:
            gradients |= dict(zip(names, _summed(members.sum, [gradients[name] for name in names]), strict=True))
        return found._replace(losses=losses, gradients=gradients)

    def mixed(self, mix: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        own = self.particles.own_parameters()
        if not self._whole:
            return mix(gradients)
        own = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        names = [name for name in gradients if name in own]
        gathered = _gathered(self, [*(p.detach() for p in own.values()), *(gradients[name] for name in names)])
        mine = {name: parameter.data for name, parameter in own.items()}
        for parameter, values in zip(own.values(), gathered, strict=False):
            parameter.data = values
        self.particles.members = self.members
        try:
            found = mix(gradients | dict(zip(names, gathered[len(own) :], strict=True)))
        finally:
            self.particles.members = self.mine.stop - self.mine.start
            for name, parameter in own.items():
                parameter.data = mine[name]
        return {name: each[self.mine] if name in own else each for name, each in found.items()}

    def averaged(self, values: Tensor) -> Tensor:
        if self.mesh.members.group is None or self.members == 1 or not values.is_floating_point():
            return ALONE.averaged(values)
        return self.mesh.members.sum(values.sum(0)) / self.members

    # ------------------------------------------------------------------ what is not finite

    def any(self, here: bool) -> bool:
        if self.mesh.members.group is None:
            return here
        flag = torch.tensor(float(here), device=self.posterior.device)
        return bool(self.mesh.members.largest(flag) > 0)

    def agree(self, flag: Tensor) -> None:
        self.mesh.members.largest(flag)

    def everywhere(self, values: Tensor) -> Tensor:
        return self.mesh.members.gather(values.to(torch.uint8), self.members, axis=1).to(values.dtype)


def _states(optimizer: Optimizer, own: set[int]) -> list[tuple[Tensor, str, Tensor]]:
    """(parameter, key, tensor) of the states of these parameters."""
    return [
        (parameter, key, value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if id(parameter) in own and isinstance(value, Tensor) and value.ndim
    ]


UNDIVIDED = "divide members alone: mesh(data=1)"


def divided(posterior: Posterior, mesh: Mesh | None) -> Undivided:
    """How the posterior trains: on this mesh, or on one that suits the processes there are, members first; or on one process.

    Members are divided over as many ranks as divide their number, since those exchange no gradients; the rest divide batches.
    """
    if mesh is None and posterior.ranks is None:
        start()
        size = distributed.get_world_size() if connected() else 1
        mesh = make_mesh(members=math.gcd(size, posterior.particles.members)) if size > 1 else None
    return Undivided() if mesh is None else Division(mesh, posterior)


def check_divisible(mesh: Mesh, posterior: Posterior) -> None:
    """Raises where a posterior cannot train on this mesh."""
    parts = list(posterior.particles.template.modules())
    if any(isinstance(part, DistributedDataParallel) for part in parts):
        raise ValueError(
            "expected a network of its own, got DistributedDataParallel; pass net.module: fit divides batches and sums "
            "gradients itself"
        )
    if mesh.members.size > posterior.particles.members:
        raise ValueError(
            f"expected at most as many ranks for members as there are, {posterior.particles.members}, got "
            f"{mesh.members.size}; pass mesh(data={mesh.size}), which divides batches"
        )


def counted(posterior: Posterior, batch: Batch) -> Tensor:
    """(B,) how much each example counts in a mean over the batch: its weight, over entries that count."""
    weight = torch.ones(batch.size, device=batch.y.device) if batch.weight is None else batch.weight
    weight = weight.double()
    if (entries := posterior.likelihood.training_weight(batch.y)) is not None:
        weight = (spread(weight, entries.to(weight.dtype)) * entries).flatten(1).sum(1) if entries.ndim > 1 else (
            weight * entries
        )  # fmt: skip
    return weight


def _kinds(batch: Batch) -> Iterable[Any]:
    return (batch.weight is None, *((tuple(each.shape[1:]), each.dtype) for each in batch.tensors()))


def _summed(add: Callable[[Tensor], Tensor], each: list[Tensor]) -> list[Tensor]:
    """The tensors summed over ranks, in one exchange for each dtype."""
    found: list[Tensor] = list(each)
    for dtype in {tensor.dtype for tensor in each}:
        places = [i for i, tensor in enumerate(each) if tensor.dtype == dtype]
        flat = add(torch.cat([each[i].reshape(-1) for i in places]))
        for i, part in zip(places, flat.split([each[i].numel() for i in places]), strict=True):
            found[i] = part.view(each[i].shape)
    return found


def _gathered(division: Division, each: list[Tensor]) -> list[Tensor]:
    """Tensors (M here, ...) of all members, in one exchange for each dtype."""
    found: list[Tensor] = list(each)
    for dtype in {tensor.dtype for tensor in each}:
        places = [i for i, tensor in enumerate(each) if tensor.dtype == dtype]
        flat = torch.cat([each[i].reshape(len(each[i]), -1) for i in places], dim=1)
        whole = division.mesh.members.gather(flat, division.members)  # (M, P)
        for i, part in zip(places, whole.split([each[i][0].numel() for i in places], dim=1), strict=True):
            found[i] = part.reshape(len(part), *each[i].shape[1:])
    return found
