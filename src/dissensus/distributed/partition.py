"""How `fit` divides training: in an epoch each process holds its members and sees its rows; between epochs each holds all.

Every process reads the same whole batches, or each rank of the data axis reads its part. One process divides nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dissensus.core.batch import Batch, call_network
from dissensus.core.collectives import Exchange
from dissensus.core.divergence import Diverged
from dissensus.core.member import tensors_by_name
from dissensus.core.posterior import Posterior, inference_context
from dissensus.core.trainable import is_mesh
from dissensus.core.weights import Recorder
from dissensus.distributed.init import start
from dissensus.distributed.mesh import Mesh, check_same, check_turns, exchange_results, mesh as new_mesh, tree_checksum
from dissensus.distributed.mesh_collectives import UNDIVIDED, UNEVEN, MeshExchange, select_rows
from dissensus.engine.fast_optimisers import use_channels_last
from dissensus.engine.loader import Loader
from dissensus.numerics.randomness import generator_states, restore_generators
from dissensus.utils.checks import one_of
from dissensus.utils.process_group import world_size
from dissensus.utils.sharding import is_divided


@contextmanager
def partition_training(
    posterior: Posterior, mesh: Mesh | Literal["independent"] | None, loader: Loader
) -> Iterator["TrainingPartition"]:
    """Inside, how the posterior trains: on this mesh, on one that suits the processes there are, or on one process.

    Members are divided over as many ranks as divide their number, which exchange no gradients; other ranks divide batches.
    """
    if mesh is None and posterior.mesh == "independent":
        mesh = posterior.mesh
    if mesh is None:
        start()
        size = world_size()
        # A sampler may have divided rows already.
        members = max(size // loader.ranks, 1) if loader.ranks > 1 else math.gcd(size, posterior.particles.members)
        mesh = new_mesh(members=members) if size > 1 else None
    if not is_mesh(mesh):
        posterior.mesh = mesh
        yield TrainingPartition(posterior, loader)
    else:
        posterior.particles.exchange = Exchange()  # between epochs all processes do the same, and exchange nothing
        try:
            yield MeshTrainingPartition(posterior, loader, mesh)
        finally:
            del posterior.particles.exchange
    for each in (posterior, *posterior.watchers):
        each.mesh = mesh


class TrainingPartition:
    """A posterior's training, in the form for one process; `MeshTrainingPartition` is that for several."""

    is_shared, active_mesh = False, cast(Mesh | None, None)  # whether by several processes, and the mesh of these
    is_first = True  # whether this process writes and prints
    loader_count = 1  # how many ranks' batches make a whole one
    member_slice = slice(None)  # which members lie here

    def __init__(self, posterior: Posterior, loader: Loader) -> None:
        self.posterior, self.loader = posterior, loader

    def begin(self) -> None:
        """Gives every process the first one's tensors and random streams."""

    def local_state(self, optimizer: Optimizer, batch: Batch) -> AbstractContextManager[None]:
        """Inside, particles, recorders and chains are those that lie here; afterwards all again. `batch`: the first one."""
        return nullcontext()

    def full_optimizer_state(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside, the optimiser has the states of all members, as one process would; afterwards those that lie here again."""
        return nullcontext()

    def training_batches(self, epoch: int) -> Iterable[Any]:
        """What an epoch of this number reads from the loader."""
        return self.loader

    def complete_loader(self, loader: Loader) -> Loader:
        """The loader's batches, whole: for what is measured on all rows."""
        return loader

    def choose_engine(self, engine: str) -> str:
        """The engine as `fit` was asked for it, or one that can be divided."""
        return engine

    def gather_losses(self, losses: Tensor) -> Tensor:
        """(M,) losses of all members; `losses`: of those that lie here."""
        return losses

    def share_batches(self, work: Callable[[Iterable[Any]], Any], batches: Iterable[Any], what: str) -> list[Any]:
        """What work(batches) gives in every process, of which each takes other batches; `what` names it in errors."""
        return [work(batches)]

    def broadcast_object(self, value: Any) -> Any:
        """What the first process says."""
        return value


class MeshTrainingPartition(TrainingPartition):
    """A posterior's training divided over a mesh, the same in every process."""

    def __init__(self, posterior: Posterior, loader: Loader, mesh: Mesh) -> None:
        super().__init__(posterior, loader)
        check_divisible(mesh, posterior)
        self.mesh, self.particles, self.exchange = mesh, posterior.particles, MeshExchange(mesh, posterior)
        self.is_shared, self.active_mesh = mesh.size > 1, mesh if mesh.size > 1 else None
        self.members, self.member_slice = self.particles.members, self.exchange.member_slice
        self.is_first, self._began = mesh.is_first, False
        if loader.ranks > 1:
            check_turns(mesh.data, loader)
        if loader.ranks > 1 or mesh.batches == "parts":
            self.exchange.reads_parts, self.loader_count = True, mesh.data.size
        # Where loaders have no length, ranks tell each other before every step whether they have a batch.
        self._length = None if loader.is_stream else loader.length
        check_same(mesh.gather_objects(self._length), "number of batches", "make the loaders equally long")

    def begin(self) -> None:
        use_channels_last(self.particles)  # all members, so that those that lie here stay laid out from epoch to epoch
        self._broadcast_tensors()
        device = self.posterior.device
        restore_generators(self.broadcast_object(generator_states(device)), device)

    @torch.no_grad()
    def _broadcast_tensors(self) -> None:
        for tensor in {id(each): each for each in (*self.posterior.parameters(), *self.posterior.buffers())}.values():
            if is_divided(tensor):  # each process has a part of its own
                continue
            tensor.copy_(self.mesh.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format)))

    @contextmanager
    def local_state(self, optimizer: Optimizer, batch: Batch) -> Iterator[None]:
        self._check_first_batch(batch)
        chains, here = getattr(optimizer, "generators", []), self.member_slice
        full = [(tensor, tensor.data, axis) for tensor, axis in self._member_tensors()]
        for tensor, _, axis in full:
            tensor.data = tensor.data.narrow(axis, here.start, here.stop - here.start).clone()
        if full:
            self.particles.members = here.stop - here.start
            if len(chains) == self.members:
                optimizer.generators = chains[here]  # type: ignore[attr-defined]
        between, self.particles.exchange = self.particles.exchange, self.exchange
        try:
            yield
            self._gather_members(full)
        except Diverged:  # in all processes, which are as they were after the last good step
            self._gather_members(full)
            raise
        finally:
            for tensor, whole, _ in full:
                tensor.data, tensor.grad = whole, None
            self.particles.members = self.members
            self.particles.exchange = between
            if chains:
                optimizer.generators = chains  # type: ignore[attr-defined]
        if self.exchange.uneven:
            raise ValueError(f"{UNEVEN}, got others; make them even")
        check_equal_tensors(self.mesh, self.posterior)

    def _check_first_batch(self, batch: Batch) -> None:
        # Processes that should read the same batch: all, or those of one place on the data axis.
        ranks = self.mesh.members if self.exchange.reads_parts else self.mesh
        advice = 'give shuffling loaders one seed, or pass mesh(..., batches="parts")'
        check_same(ranks.gather_objects(tree_checksum(batch)), "batches", advice)
        if self.exchange.reads_parts and not self._began:  # what was measured on the first batch is of other rows
            self._broadcast_tensors()
        if self.mesh.data.size > 1 and not self._began:
            check_independent_rows(self.posterior, batch)
        self._began = True

    def _member_tensors(self) -> list[tuple[Tensor, int]]:
        """(tensor, axis of members) of everything that has a row for each member, where these lie in different processes."""
        if not self.exchange.splits_members:
            return []
        found = {id(tensor): (tensor, 0) for tensor in tensors_by_name(self.particles.own).values()}
        for recorder in (each for each in self.posterior.modules() if isinstance(each, Recorder)):
            found |= {id(tensor): (tensor, axis) for tensor, axis in recorder.with_members()}
        return list(found.values())

    @torch.no_grad()
    def _gather_members(self, full: list[tuple[Tensor, Tensor, int]]) -> None:
        """Puts tensors that lie here into those of all members, with what lies in other processes; the axis of members."""
        if self.mesh.statistics == "per rank":
            for buffer in self.particles.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(self.mesh.data.sum(buffer.contiguous().clone()) / self.mesh.data.size)
        for tensor, whole, axis in full:
            whole.copy_(self.mesh.members.gather(tensor, self.members, axis=axis))

    @contextmanager
    def full_optimizer_state(self, optimizer: Optimizer) -> Iterator[None]:
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

    def training_batches(self, epoch: int) -> Iterable[Any]:
        self.loader.set_epoch(epoch)
        batches: Iterable[Any] = self.loader
        if self.exchange.reads_parts:
            batches = self._read_parts()
        elif self.mesh.data.size > 1 and self.posterior.inputs is None and self.loader.has_separable_rows:
            batches = self.loader.partial_batches(self._choose_rows)
        return self._in_lockstep(batches) if self.is_shared else batches

    def _read_parts(self) -> Iterator[Batch]:
        """Batches of this rank's own rows; those that its sampler repeats, to be even, have weight 0."""
        seen = 0
        for batch in self.posterior.read(self.loader):
            seen += batch.size
            if (first := self.loader.first_reads(seen - batch.size, seen)) is not None:
                once = first.to(batch.y.device, torch.get_default_dtype())
                batch = batch._replace(weight=once if batch.weight is None else batch.weight * once)
            yield batch

    def _choose_rows(self, size: int) -> slice:
        """Which rows of a batch are read: this rank's, but all of the first batch, which is compared."""
        divided = self.particles.exchange is self.exchange and size >= self.mesh.data.size
        self.exchange.part = (size, self.mesh.row_slice(size)) if divided else None
        return slice(0, size) if self.exchange.part is None else self.exchange.part[1]

    def _in_lockstep(self, batches: Iterable[Any]) -> Iterator[Any]:
        """These batches, as many on every rank: where one has none left, the others would wait for it in the next step."""
        mesh, left = self.mesh, iter(batches)
        for number in count():
            batch = next(left, None)
            over, wanted = batch is None, number == self._length
            if self._length is None:
                ended = int(mesh.members.sum(mesh.data.sum(torch.tensor(int(over), device=mesh.device))))
                over, wanted = ended > 0, ended == mesh.size
            if over != wanted:
                which = "as many batches on all ranks, and as many as len(loader)"
                raise ValueError(f"expected {which}, got {number} on some; make the loaders equally long")
            if over:
                return
            yield batch

    def complete_loader(self, loader: Loader) -> Loader:
        return Loader(self.mesh.complete_loader(loader, self.posterior.read), complete=True)

    def choose_engine(self, engine: str) -> str:
        # Plain members, at once or in a loop, in every process alike: as one process would by itself on a CPU.
        known = ("auto", "loop") if self.particles.divided else ("auto", "loop", "vectorised")
        divided = "engine of divided networks, which run one after the other"
        what = divided if self.particles.divided else "engine on a mesh"
        if one_of(what, engine, known) == "auto":
            engine = "loop" if self.members == 1 else self.particles.how
        self.exchange.at_once = engine == "vectorised"
        return engine

    def gather_losses(self, losses: Tensor) -> Tensor:
        return self.mesh.members.gather(losses, self.members) if self.exchange.splits_members else losses

    def share_batches(self, work: Callable[[Iterable[Any]], Any], batches: Iterable[Any], what: str) -> list[Any]:
        def mine() -> Iterator[Any]:  # begins where work does
            for number, batch in enumerate(batches):  # all run divided networks together
                if self.particles.divided or number % self.mesh.size == self.mesh.rank:
                    yield batch

        return exchange_results(self.mesh, lambda: work(mine()), what)

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


@torch.no_grad()
def check_equal_tensors(mesh: Mesh, posterior: Posterior) -> None:
    """Raises where a tensor is not the same in all processes after an epoch: something in training saw its rows alone."""
    named = [*posterior.named_buffers(), *posterior.named_parameters()]
    plain = {name: each.sum(dtype=torch.float64) for name, each in named if not hasattr(each, "full_tensor")}
    mine = {name: repr(float(each)) for name, each in plain.items()}  # "nan" is "nan"
    for other in mesh.gather_objects(mine):
        if off := [name for name, value in mine.items() if other.get(name) != value]:
            advice = f"use the same optimizer and callbacks everywhere; if the network sums over rows, {UNDIVIDED}"
            raise ValueError(f"expected '{off[0]}' to be the same in all processes, got different values; {advice}")


def check_independent_rows(posterior: Posterior, batch: Batch) -> None:
    """Raises where a network's output for a row depends on the other rows of the batch: it would see some of them alone."""
    particles, few = posterior.particles, min(batch.size, 8)  # as many as one process has room for in any case
    if any(hasattr(each, "full_tensor") for each in particles.parameters()):
        return

    def outputs(x: Any) -> Tensor:
        found: Tensor = particles.call(lambda member: call_network(member.network, x), *particles.member_tensors(0))[0]
        return found[: (few + 1) // 2].double()

    with inference_context(posterior):
        alone, among = (outputs(select_rows(batch.x, batch.size, slice(count))) for count in ((few + 1) // 2, few))
    # Rounding is far below; what mixes rows is far above.
    close = (alone - among).abs() <= 0.01 * among.abs().max()
    if not (posterior.network_is_random or bool((close | among.isnan()).all())):
        raise ValueError(f"expected outputs that do not depend on other rows of a batch, got some that do; {UNDIVIDED}")
