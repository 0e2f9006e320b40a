"""The mesh: processes in a grid with two axes, members and data.

    rank = members.rank × data.size + data.rank

Ranks along *members* hold different members and see the same rows; ranks along *data* hold the same members and see
different rows of every batch. Both axes divide into contiguous parts, larger ones first, so that the parts joined in the
order of ranks are the whole. With one process an axis has no group, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.loader import Loader
from dissensus.core.member import check_initialised
from dissensus.distributed.init import is_connected, start
from dissensus.distributed.work_split import (
    ConcatenatedBatches,
    InterleavedBatches,
    MeshFunctionPartition,
    map_batches,
    part_slice,
)
from dissensus.utils.checks import integer, one_of
from dissensus.utils.progress import set_reporting_check
from dissensus.utils.sharding import check_copyable

Statistics = Literal["synchronised", "per rank"]
Given = Literal["whole", "parts"]


class Axis:
    """One axis of a mesh: this process's `rank` among `size`, and their `group` (None for a single rank).

    `bytes_sent` counts the bytes that this process has sent in collectives, by kind.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: distributed.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.bytes_sent = {"sum": 0, "gather": 0}

    def __repr__(self) -> str:
        return f"part {self.rank + 1} of {self.size}"

    def part_slice(self, count: int, rank: int | None = None) -> slice:
        """Which of `count` things are this rank's (or another one's): a contiguous part."""
        return part_slice(count, self.rank if rank is None else rank, self.size)

    def sizes(self, count: int) -> list[int]:
        """How many of `count` things each rank has."""
        parts = [self.part_slice(count, rank) for rank in range(self.size)]
        return [part.stop - part.start for part in parts]

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, which becomes the sum over ranks in place."""
        if self.group is not None:
            self.bytes_sent["sum"] += tensor.nbytes
            distributed.all_reduce(tensor, group=self.group)
        return tensor

    def begin_sum(self, tensor: Tensor) -> distributed.Work | None:
        """Begins what `sum` does; the tensor is the sum once the work has been waited for."""
        if self.group is None:
            return None
        self.bytes_sent["sum"] += tensor.nbytes
        work: distributed.Work = distributed.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def maximum(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, which becomes the largest over ranks in place, entry by entry."""
        if self.group is not None:
            self.bytes_sent["sum"] += tensor.nbytes
            distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, tensor: Tensor, count: int, *, axis: int = 0) -> Tensor:
        """All ranks' tensors put together along an axis, of which each rank has its part of `count`. Without a graph."""
        if self.group is None:
            return tensor
        sizes = self.sizes(count)
        mine = tensor.detach().movedim(axis, 0)
        # Collectives want equal shapes: shorter parts are filled up, and cut again.
        padded = mine.new_zeros(max(sizes), *mine.shape[1:])
        padded[: len(mine)] = mine
        self.bytes_sent["gather"] += padded.nbytes
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, axis)

    def gather_objects(self, mine: Any) -> list[Any]:
        """What every rank has of a Python object, in the order of ranks."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, mine, group=self.group)
        return found


class Mesh:
    """How processes divide members and rows. Made by `mesh`, or by `fit` from the number of processes and members.

    Attributes:
        members: the `Axis` along which ranks hold different members.
        data: the `Axis` along which ranks see different rows of a batch.
        statistics: batch norm statistics in training, "synchronised" over the data axis, or "per rank".
        batches: "whole" if loaders yield the same batches in every process, "parts" if each rank of the data axis reads its
            own rows.
        device_mesh: torch's device mesh, with the axes "members" and "data"; None without a process group.
    """

    def __init__(
        self,
        members: Axis,
        data: Axis,
        *,
        statistics: Statistics = "synchronised",
        batches: Given = "whole",
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self.members = members
        self.data = data
        self.statistics = statistics
        self.batches = batches
        self.device_mesh = device_mesh
        self._world = distributed.group.WORLD if is_connected() else None
        set_reporting_check(lambda: self.is_first or not self.is_alive)

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.size}: {self.members!r} of the members, {self.data!r} of the rows)"

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.members.size * self.data.size

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self.members.rank * self.data.size + self.data.rank

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be exchanged."""
        cuda = self.device_mesh is not None and self.device_mesh.device_type == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    @property
    def is_alive(self) -> bool:
        """Whether its processes are still connected."""
        return is_connected() and distributed.group.WORLD is self._world

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def member_slice(self, members: int) -> slice:
        """Which of M members lie here."""
        return self.members.part_slice(members)

    def row_slice(self, examples: int) -> slice:
        """Which of the B examples of a batch lie here."""
        return self.data.part_slice(examples)

    def gather_objects(self, mine: Any) -> list[Any]:
        """What every process has of a Python object, in the order of ranks."""
        along = self.data.gather_objects(mine)
        return [each for row in self.members.gather_objects(along) for each in row]

    def partition_functions(
        self, drawn: DrawnFunctions, device: torch.device, apart: Callable[[], bool]
    ) -> MeshFunctionPartition:
        """The drawn functions, of which each process runs some where several share a batch."""
        return MeshFunctionPartition(drawn, device, apart)

    def map_batches(self, work: Callable[[Any], Any], batches: Iterable[Any], **about: Any) -> Iterator[Any]:
        """(batch, work(batch)) of every batch on every process, each worked on by one or several: `work_split.map_batches`."""
        return map_batches(self, work, batches, **about)

    def complete_loader(self, loader: Loader) -> Any:
        """The loader; where it gives each process a part of the data, one of all the parts, the same everywhere."""
        sampler = loader.sampler
        if sampler is not None and sampler.num_replicas > 1:
            return InterleavedBatches(self.data if sampler.num_replicas == self.data.size else self, loader, sampler)
        return ConcatenatedBatches(self.data, loader) if self.batches == "parts" and self.data.size > 1 else loader

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # a copied posterior is on the same mesh, and process groups cannot be copied

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # one that is sent elsewhere is on none

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, in place of this one's."""
        if self.device_mesh is not None:
            distributed.broadcast(tensor, src=0)
        return tensor


def mesh(
    members: int | None = None,
    data: int | None = None,
    *,
    statistics: Statistics = "synchronised",
    batches: Given = "whole",
) -> Mesh:
    """Makes the mesh of all processes, `members` × `data` of them; a missing number follows from the other.

    Call it in every process. Under `torchrun` it connects them first (`start`), if they are not connected yet.

    Args:
        members: number of ranks that hold different members; None is all processes divided by `data`.
        data: number of ranks that see different rows; None is 1, or all processes divided by `members`.
        statistics: "synchronised" gives batch norm the statistics of the whole batch, as in one process; "per rank" uses
            each rank's rows, which saves an exchange per layer but is a different model.
        batches: "whole" if every process's loader yields the same batches, of which `fit` takes this rank's rows; "parts" if
            each rank of the data axis reads its own rows, in equally many batches of equal sizes. A loader with a
            `DistributedSampler` always yields parts.

    Returns:
        A `Mesh`.
    """
    one_of("statistics", statistics, ("synchronised", "per rank"))
    one_of("batches", batches, ("whole", "parts"))
    start()
    size = distributed.get_world_size() if is_connected() else 1
    given = integer("members", 1 if members is None else members) * integer("data", 1 if data is None else data)
    left = max(size // given, 1)
    if members is None:
        members, data = left, data or 1
    data = left if data is None else data
    if members * data != size:
        raise ValueError(f"expected a mesh of {size} processes, got {members} × {data} (members × data); change one")
    if not is_connected():
        return Mesh(Axis(), Axis(), statistics=statistics, batches=batches)
    kind = "cuda" if "nccl" in str(distributed.get_backend()) else "cpu"
    found = init_device_mesh(kind, (members, data), mesh_dim_names=("members", "data"))
    # One rank has nobody to exchange with; one process that asks for a mesh all the same goes through every exchange.
    axes = [
        Axis(found.get_local_rank(name), number, found.get_group(name) if number > 1 or size == 1 else None)
        for name, number in (("members", members), ("data", data))
    ]
    return Mesh(*axes, statistics=statistics, batches=batches, device_mesh=found)


Network = TypeVar("Network", bound=nn.Module)


def shard(network: Network, mesh: Mesh) -> Network:
    """The network itself, of each of whose parameters every rank of the data axis keeps a part; the first process's values.

    For methods that hold one network or loop over several. In training and prediction one member at a time is whole; its
    gradients, the optimiser's states and all other members stay divided. To be called by every process, before the method
    is built. On one process it does nothing.

    Args:
        network: built whole, on the CPU for example: parts go to the mesh's device.
        mesh: with ranks for data alone, `mesh(members=1)`.
    """
    check_initialised(network)
    check_copyable(network)
    if mesh.device_mesh is None:
        return network
    from torch.distributed.tensor import Shard, distribute_tensor

    network.to(mesh.device)
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for part in network.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.ndim or not parameter.is_floating_point():
                continue
            if id(parameter) not in made:
                longest = max(range(parameter.ndim), key=lambda axis: parameter.shape[axis])
                parts = distribute_tensor(parameter.detach(), mesh.device_mesh["data"], [Shard(longest)])
                made[id(parameter)] = nn.Parameter(parts, requires_grad=parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]
    return network
