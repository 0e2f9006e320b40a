"""Division: `fit` on a mesh. In an epoch each process holds its members and sees its rows; between epochs each holds all."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dissensus.core.batch import Batch
from dissensus.core.collectives import Exchange
from dissensus.core.divergence import Diverged
from dissensus.core.loader import Loader
from dissensus.core.member import tensors_by_name
from dissensus.core.posterior import Posterior
from dissensus.core.weights import Recorder
from dissensus.distributed.consistency import (
    check_batches,
    check_equal_tensors,
    check_independent_rows,
    example_weights,
    select_rows,
)
from dissensus.distributed.init import is_connected, start
from dissensus.distributed.mesh import Mesh
from dissensus.distributed.mesh import mesh as make_mesh
from dissensus.distributed.mesh_collectives import LocalBatch, MeshExchange
from dissensus.distributed.mesh_loaders import (
    GatheredBatches,
    LocalRowBatches,
    LockstepBatches,
    PartBatches,
    check_equal_sizes,
    check_sampler,
)
from dissensus.distributed.single_process import TrainingPartition
from dissensus.distributed.work_split import check_sampler_order
from dissensus.engine.fast_optimisers import use_channels_last
from dissensus.utils.checks import one_of
from dissensus.utils.sharding import is_divided


@contextmanager
def partition_training(
    posterior: Posterior, mesh: Mesh | None, ranks: Literal["independent"] | None, loader: Loader
) -> Iterator[TrainingPartition]:
    """Inside, how the posterior trains: on this mesh, on one that suits the processes there are, or on one process.

    Members are divided over as many ranks as divide their number, since those exchange no gradients; the rest divide batches.
    """
    posterior.ranks = ranks or posterior.ranks
    if mesh is None and posterior.ranks is None:
        start()
        size = distributed.get_world_size() if is_connected() else 1
        rows = getattr(loader.sampler, "num_replicas", None)  # a sampler has divided rows already
        members = math.gcd(size, posterior.particles.members) if rows is None else max(size // rows, 1)
        mesh = make_mesh(members=members) if size > 1 else None
    if mesh is None:
        yield TrainingPartition()
        return
    posterior.particles.exchange = Exchange()  # between epochs all processes do the same, and exchange nothing
    try:
        yield MeshTrainingPartition(mesh, posterior)
    finally:
        del posterior.particles.exchange


class MeshTrainingPartition(TrainingPartition):
    """A posterior's training, divided over a mesh; made by `fit`, the same in every process."""

    def __init__(self, mesh: Mesh, posterior: Posterior) -> None:
        check_divisible(mesh, posterior)
        self.mesh, self.posterior, self.particles = mesh, posterior, posterior.particles
        self.exchange = MeshExchange(mesh, posterior)
        self.members, self.member_slice = self.exchange.members, self.exchange.member_slice
        self.is_first = mesh.is_first
        self.active_mesh = mesh if mesh.size > 1 else None
        self.reads_parts = False  # whether the loader gives this rank's rows alone
        self._row_loader: LocalRowBatches | None = None  # the loader, where it can be asked for them
        self._began = False
        self._sizes: set[int] = set()  # of parts
        self._uneven: Tensor | None = None  # () whether ranks had parts of other sizes; looked at after an epoch
        # (tensor, its values of all members, the axis of members)
        self._full_tensors: list[tuple[Tensor, Tensor, int]] = []

    # ------------------------------------------------------------------ the state: all members, or those that lie here

    def begin(self) -> None:
        """Gives every process the first one's tensors and random streams."""
        use_channels_last(self.posterior)  # all members, so that those that lie here stay laid out from epoch to epoch
        self._broadcast_tensors()
        cuda = self.posterior.device.type == "cuda"
        host, device = self.broadcast_object((torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None))
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)

    @torch.no_grad()
    def _broadcast_tensors(self) -> None:
        for tensor in {id(each): each for each in (*self.posterior.parameters(), *self.posterior.buffers())}.values():
            if is_divided(tensor):  # each process has a part of its own
                continue
            tensor.copy_(self.mesh.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format)))

    @contextmanager
    def local_state(self, optimizer: Optimizer, batch: Batch) -> Iterator[None]:
        """Inside, particles, recorders and chains of the optimiser are those that lie here; afterwards all have all again.

        `batch`: the first one, which must be the same in processes that read whole batches.
        """
        self._check_first_batch(batch)
        if self._row_loader is not None:  # the first batch was whole, to be compared and measured
            self._row_loader.reads_part = True
        chains = getattr(optimizer, "generators", [])
        self._take_local_members(optimizer, chains)
        between, self.particles.exchange = self.particles.exchange, self.exchange
        try:
            yield
            self._gather_members()
        except Diverged:  # in all processes, which are as they were after the last good step
            self._gather_members()
            raise
        finally:
            for tensor, whole, _ in self._full_tensors:
                tensor.data, tensor.grad = whole, None
            self._full_tensors = []
            self.particles.members = self.members
            self.particles.exchange = between
            if chains:
                optimizer.generators = chains  # type: ignore[attr-defined]
            if self._row_loader is not None:
                self._row_loader.reads_part = False
        if self._uneven is not None and bool(self._uneven):
            raise ValueError("expected parts of a batch with as many rows in every process, got others; make them even")
        check_equal_tensors(self.mesh, self.posterior)

    def _check_first_batch(self, batch: Batch) -> None:
        check_batches(self.mesh, batch, parts=self.reads_parts)
        if self.reads_parts and not self._began:  # what was measured on the first batch was measured on other rows
            self._broadcast_tensors()
        if self.mesh.data.size > 1 and not self._began:
            check_independent_rows(self.posterior, batch)
        self._began = True

    def _take_local_members(self, optimizer: Optimizer, chains: list[Any]) -> None:
        """Leaves of all tensors with a member axis, and of the optimiser's chains, what lies here."""
        here = self.member_slice
        for tensor, axis in self._member_tensors():
            self._full_tensors.append((tensor, tensor.data, axis))
            tensor.data = tensor.data.narrow(axis, here.start, here.stop - here.start).clone()
        if self._full_tensors:
            self.particles.members = here.stop - here.start
            if len(chains) == self.members:
                optimizer.generators = chains[here]  # type: ignore[attr-defined]

    def _member_tensors(self) -> list[tuple[Tensor, int]]:
        """(tensor, axis of members) of everything that has a row for each member, where these lie in different processes."""
        if not self.exchange.splits_members:
            return []
        found = {id(tensor): (tensor, 0) for tensor in tensors_by_name(self.particles.own).values()}
        for recorder in (each for each in self.posterior.modules() if isinstance(each, Recorder)):
            found |= {id(tensor): (tensor, axis) for tensor, axis in recorder.with_members()}
        return list(found.values())

    @torch.no_grad()
    def _gather_members(self) -> None:
        """Puts what lies here into the tensors of all members, with what lies in other processes."""
        if self.mesh.statistics == "per rank":
            for buffer in self.particles.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(self.mesh.data.sum(buffer.contiguous().clone()) / self.mesh.data.size)
        for tensor, whole, axis in self._full_tensors:
            whole.copy_(self.mesh.members.gather(tensor, self.members, axis=axis))

    @contextmanager
    def full_optimizer_state(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimiser has the states of all members, as one process would; afterwards those that lie here again."""
        chains = getattr(optimizer, "generators", [])
        if self.exchange.splits_members and len(chains) == self.members:
            states = self.mesh.members.gather_objects([chain.get_state() for chain in chains[self.member_slice]])
            for chain, state in zip(chains, (state for each in states for state in each), strict=True):
                chain.set_state(state)
        for parameter, key, value in self._member_states(optimizer):
            if value.shape == (self.member_slice.stop - self.member_slice.start, *parameter.shape[1:]):
                whole = torch.empty_like(parameter, dtype=value.dtype)  # in its layout, which fused kernels go through
                optimizer.state[parameter][key] = whole.copy_(self.mesh.members.gather(value, self.members))
        yield
        for parameter, key, value in self._member_states(optimizer):
            if value.shape == parameter.shape:
                optimizer.state[parameter][key] = value[self.member_slice].clone()

    def _member_states(self, optimizer: Optimizer) -> list[tuple[Tensor, str, Tensor]]:
        """(parameter, key, tensor) of the states of own parameters, where members lie in different processes."""
        parameters = self.particles.own_parameters() if self.exchange.splits_members else {}
        own = {id(parameter) for parameter in parameters.values()}
        return [
            (parameter, key, value)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if id(parameter) in own and isinstance(value, Tensor) and value.ndim
        ]

    # ------------------------------------------------------------------ loaders and batches

    def training_loader(self, loader: Loader) -> Any:
        if (sampler := loader.sampler) is not None:
            check_sampler(sampler, self.mesh.data)
            check_sampler_order(self.mesh.data, sampler)
        self.reads_parts = sampler is not None or self.mesh.batches == "parts"
        rows = self.mesh.data.size > 1 and self.posterior.inputs is None and loader.has_separable_rows
        self._row_loader = LocalRowBatches(loader, self.mesh.data) if rows and not self.reads_parts else None
        read = PartBatches(loader, self.posterior) if self.reads_parts else self._row_loader or loader
        return read if self.active_mesh is None else LockstepBatches(read, loader, self.mesh)

    @property
    def loader_count(self) -> int:  # type: ignore[override]
        return self.mesh.data.size if self.reads_parts else 1

    def complete_loader(self, loader: Loader) -> Loader:
        parts = loader.sampler is not None or self.mesh.batches == "parts"
        whole = GatheredBatches(PartBatches(loader, self.posterior), self.mesh) if parts else loader
        return Loader(whole, complete=True)

    def begin_epoch(self, loader: Loader, index: int) -> None:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(index)

    def take_local_rows(self, batch: Batch) -> Batch:
        """The rows of the batch that lie here; takes note of how much of it they are."""
        data, size, weight = self.mesh.data, batch.size, example_weights(self.posterior, batch)
        if data.group is None:
            self.exchange.local_batch = LocalBatch(size, slice(0, size))
            return batch
        if self.reads_parts:
            self.exchange.local_batch = self._measure_part(size, weight.sum())
            return batch
        if self._row_loader is not None and self._row_loader.last_part is not None:
            size, here = self._row_loader.last_part
            own = weight.sum()
            alike = batch.weight is None and self.posterior.likelihood.training_weight(batch.y) is None
            total = weight.new_tensor(size) if alike else data.sum(own.clone())
            mine = torch.where(total > 0, own / total, batch.size / size)
            self.exchange.local_batch = LocalBatch(size, here, mine, total, is_split=True)
            return batch
        if size < data.size:
            self.exchange.local_batch = LocalBatch(size, slice(0, size), weight.new_tensor(1 / data.size), weight.sum())
            return batch
        here = self.mesh.row_slice(size)
        total = weight.sum()
        mine = torch.where(total > 0, weight[here].sum() / total, (here.stop - here.start) / size)
        self.exchange.local_batch = LocalBatch(size, here, mine, total, is_split=True)

        weights = None if batch.weight is None else batch.weight[here]
        return Batch(select_rows(batch.x, size, here), cast(Tensor, select_rows(batch.y, size, here)), weights)

    def _measure_part(self, size: int, weight: Tensor) -> LocalBatch:
        """The share of a batch that is this rank's part of a whole one."""
        data = self.mesh.data
        each = data.gather(torch.stack([weight.new_tensor(size), weight])[None], data.size)  # (R, 2)
        if size not in self._sizes:
            self._sizes.add(size)
            check_equal_sizes([*map(int, each[:, 0].tolist())])
        uneven = (each[:, 0] != size).any()
        self._uneven = uneven if self._uneven is None else self._uneven | uneven
        total = each[:, 1].sum()
        mine = torch.where(total > 0, weight / total, 1 / data.size)
        return LocalBatch(size * data.size, slice(size * data.rank, size * (data.rank + 1)), mine, total, is_split=True)

    # ------------------------------------------------------------------ what all must agree on

    def choose_engine(self, engine: str) -> str:
        """Plain members, at once or in a loop, in every process alike: as one process would by itself on a CPU."""
        known = ("auto", "loop") if self.particles.divided else ("auto", "loop", "vectorised")
        divided = "engine of divided networks, which run one after the other"
        what = divided if self.particles.divided else "engine on a mesh"
        if one_of(what, engine, known) == "auto":
            engine = "loop" if self.members == 1 else self.particles.how
        self.exchange.at_once = engine == "vectorised"
        return engine

    def gather_losses(self, losses: Tensor) -> Tensor:
        return self.mesh.members.gather(losses, self.members) if self.exchange.splits_members else losses

    def assigned_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        if self.particles.divided:  # all must run it together
            return iter(batches)
        return (batch for number, batch in enumerate(batches) if number % self.mesh.size == self.mesh.rank)

    def broadcast_object(self, value: Any) -> Any:
        return self.mesh.gather_objects(value)[0]


def check_divisible(mesh: Mesh, posterior: Posterior) -> None:
    """Raises where a posterior cannot train on this mesh."""
    if any(isinstance(part, DistributedDataParallel) for part in posterior.particles.template.modules()):
        raise ValueError("expected a plain network, got DistributedDataParallel; pass net.module: fit sums gradients")
    if mesh.members.size > posterior.particles.members:
        count = posterior.particles.members
        got = f"{mesh.members.size}; pass mesh(data={mesh.size}), which divides batches"
        raise ValueError(f"expected at most {count} ranks for {count} members, got {got}")
    if posterior.particles.divided and posterior.interaction == "mix":
        kind = type(posterior).__name__
        raise NotImplementedError(f"expected undivided networks for {kind}, got divided ones; leave shard out")
    if posterior.particles.divided and mesh.members.size > 1:
        raise ValueError(f"expected mesh(members=1) for divided networks, got {mesh!r}; they divide batches alone")
    if not posterior.particles.divided and any(map(is_divided, posterior.parameters())):
        advice = "use ds.distributed.shard(network, mesh) or fully_shard(network) first"
        raise ValueError(f"expected networks divided before the posterior was built, got one divided since; {advice}")
