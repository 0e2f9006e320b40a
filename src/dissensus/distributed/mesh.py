"""The mesh: processes in a grid with two axes, members and data, and the work that they share after training.

    rank = members.rank × data.size + data.rank

Ranks along *members* hold different members and see the same rows; ranks along *data* hold the same members and see
different rows of every batch. Both axes divide into contiguous parts, larger ones first, so that the parts joined in the
order of ranks are the whole. With one process an axis has no group, and nothing is exchanged.

In prediction (`Mesh.map_batches`) ranks along *data* take turns with batches, whole ones, so that networks see the shapes of
one process. Ranks along *members* share a batch: each runs its part of the drawn functions. All ranks share a loader's only
batch. Functions that cannot be cut, or are fewer than the ranks along *members*, run whole: all ranks take turns with batches.
Every rank gets the results of all batches, in the order of one process, so nothing has to be merged.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, zip_longest
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dissensus.core.batch import count_examples
from dissensus.core.drawn_functions import DrawnFunctions, FunctionPartition
from dissensus.core.member import check_initialised
from dissensus.distributed.init import start
from dissensus.engine.loader import Loader
from dissensus.utils.checks import integer, one_of
from dissensus.utils.process_group import MissingRankError, is_connected, run_collective, world_size
from dissensus.utils.progress import set_reporting_check
from dissensus.utils.sharding import check_copyable
from dissensus.utils.torch_modes import set_attributes
from dissensus.utils.torch_private import group_timeout, parameters_of, pytree, set_group_timeout

Statistics = Literal["synchronised", "per rank"]
Given = Literal["whole", "parts"]
Found = TypeVar("Found")
Network = TypeVar("Network", bound=nn.Module)

DATA = "pass the same data in the same order to all of them, or a DataLoader with a DistributedSampler"
SAME = {
    "calls": "call the same functions in the same order on every process",
    "functions": "load the same posterior everywhere, and draw with the same seed",
    "calibrations and promises": "fit or load them on every process",
    "batches": DATA,
}


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

    def sum(self, tensor: Tensor, *, pending: list[distributed.Work] | None = None) -> Tensor:
        """The tensor, contiguous, which becomes the sum over ranks in place; with `pending`, once that work is done."""
        work = self._reduce(tensor, async_op=pending is not None)
        if pending is not None and work is not None:
            pending.append(work)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, which becomes the largest over ranks in place, entry by entry."""
        self._reduce(tensor, op=distributed.ReduceOp.MAX)
        return tensor

    def _reduce(self, tensor: Tensor, **how: Any) -> Any:
        if self.group is None:
            return None
        self.bytes_sent["sum"] += tensor.nbytes
        return run_collective(distributed.all_reduce, tensor, group=self.group, **how)

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
        run_collective(distributed.all_gather, parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, axis)

    def gather_objects(self, mine: Any) -> list[Any]:
        """What every rank has of a Python object, in the order of ranks."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        run_collective(distributed.all_gather_object, found, mine, group=self.group)
        return found


class Mesh:
    """How processes divide members and rows. Made by `mesh`, or by `fit` from the number of processes and members.

    Attributes:
        members: the `Axis` along which ranks hold different members.
        data: the `Axis` along which ranks see different rows of a batch.
        statistics: batch norm statistics in training, "synchronised" over the data axis, or "per rank".
        batches: "whole" if loaders yield the same batches everywhere, "parts" if each rank of the data axis reads its own rows.
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
        self.members, self.data, self.device_mesh = members, data, device_mesh
        self.statistics, self.batches = statistics, batches
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
        return [each for row in self.members.gather_objects(self.data.gather_objects(mine)) for each in row]

    def partition_functions(
        self, drawn: DrawnFunctions, device: torch.device, apart: Callable[[], bool]
    ) -> MeshFunctionPartition:
        """The drawn functions, of which each process runs some where several share a batch."""
        return MeshFunctionPartition(drawn, device, apart)

    def map_batches(
        self,
        work: Callable[[Any], Found],
        batches: Iterable[Any],
        *,
        portion: FunctionPartition,
        seen_by: Iterable[Any],
        device: torch.device | str,
    ) -> Iterator[tuple[Any, Found]]:
        """(batch, work(batch)) of every batch, in order, on every rank, each worked on by one of them or by several at once.

        An error of one rank is raised on all, and so is one where ranks were given other batches or have drawn other functions.

        Args:
            batches: trees of tensors, the same on every rank.
            portion: the functions that the work is done with; a `MeshFunctionPartition` lets ranks share a batch.
            seen_by: facts and tensors of what the functions are seen through, the same on every rank.
            device: where tensors of what was found shall lie.
        """
        left, window, seen = iter(batches), list[Any](), 0
        about = {"calls": work.__qualname__, "calibrations and promises": tree_checksum([*seen_by])}
        drawn = portion.drawn
        seeds = [each.seed for each in drawn.modules() if isinstance(each, DrawnFunctions)]
        about["functions"] = tree_checksum([*drawn.parameters(), *drawn.buffers(), seeds])
        most = portion.max_ranks if isinstance(portion, MeshFunctionPartition) else 1
        sharers = self.members if 1 < self.members.size <= most else None
        takers: Ranks = self if sharers is None else self.data

        def read() -> dict[str, Any]:
            window[:] = islice(left, takers.size)
            return about | {"batches": [*map(tree_checksum, window)]}

        def work_on(given: list[Any], ranks: Ranks | None) -> list[Found]:
            if ranks is None or not isinstance(portion, MeshFunctionPartition):
                return [*map(work, given)]
            return [portion.run_shared(ranks, partial(work, batch)) for batch in given]

        def work_on_own() -> list[Found]:
            return work_on(window[takers.rank : takers.rank + 1], sharers)

        while True:
            everyone = exchange_results(self, read, "batches")
            for what, remedy in SAME.items():
                check_same([each[what] for each in everyone], what, remedy)
            only = not seen and len(window) == 1 < min(most, takers.size)
            seen += len(window)
            found = work_on(window, self) if only else gather_from_ranks(takers, work_on_own, device, "results")
            yield from zip([*window], found, strict=True)
            if len(window) < takers.size:
                return

    def complete_loader(self, loader: Loader, read: Callable[[Any], Iterable[Any]] | None = None) -> Any:
        """The loader; where it gives each process a part of the data, one of all the parts, the same everywhere.

        `read`: makes batches of what it yields, in training, where several ranks may have equal rows.
        """
        parts = loader.ranks > 1 or (self.batches == "parts" and self.data.size > 1)
        axis = self.data if loader.ranks in (1, self.data.size) else self
        return JoinedBatches(axis, loader, read) if parts else loader

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # a copied posterior is on the same mesh, and process groups cannot be copied

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # one that is sent elsewhere is on none

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, in place of this one's."""
        if self.device_mesh is not None:
            run_collective(distributed.broadcast, tensor, src=0)
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
            each rank of the data axis reads its own rows, in equally many equal batches, as with a `DistributedSampler`.
    """
    one_of("statistics", statistics, ("synchronised", "per rank"))
    one_of("batches", batches, ("whole", "parts"))
    start()
    size = world_size()
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
    world = Axis(distributed.get_rank(), size, distributed.group.WORLD)
    check_same(world.gather_objects((members, data)), "mesh", "call mesh with the same numbers on every process")
    found = init_device_mesh(kind, (members, data), mesh_dim_names=("members", "data"))
    # One rank has nobody to exchange with; one process that asks for a mesh all the same goes through every exchange.
    axes = [
        Axis(found.get_local_rank(name), number, found.get_group(name) if number > 1 or size == 1 else None)
        for name, number in (("members", members), ("data", data))
    ]
    for group in {axis.group for axis in axes} - {None}:
        set_group_timeout(group, group_timeout(distributed.group.WORLD))
    return Mesh(*axes, statistics=statistics, batches=batches, device_mesh=found)


def shard(network: Network, mesh: Mesh) -> Network:
    """The network itself, of each of whose parameters every rank of the data axis keeps a part; the first process's values.

    For methods that hold one network or loop over several. In training and prediction one member at a time is whole; its
    gradients, the optimiser's states and all other members stay divided. Every process calls it before building the method.
    On one process it does nothing.

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
        for name, parameter in parameters_of(part).items():
            if parameter is None or not parameter.ndim or not parameter.is_floating_point():
                continue
            if id(parameter) not in made:
                longest = max(range(parameter.ndim), key=lambda axis: parameter.shape[axis])
                parts = distribute_tensor(parameter.detach(), mesh.device_mesh["data"], [Shard(longest)])
                made[id(parameter)] = nn.Parameter(parts, requires_grad=parameter.requires_grad)
            parameters_of(part)[name] = made[id(parameter)]
    return network


Ranks = Axis | Mesh  # processes that work together


def part_slice(count: int, rank: int, size: int) -> slice:
    """Which of `count` things are this rank's: contiguous parts, the larger ones first."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))


class MeshFunctionPartition(FunctionPartition):
    """Of drawn functions those that run here while ranks share a batch (`run_shared`); at other times all."""

    def __init__(self, drawn: DrawnFunctions, device: torch.device, apart: Callable[[], bool]) -> None:
        """`apart()`: whether functions that run without the others are the same functions."""
        super().__init__(drawn)
        self.device, self.is_separable = device, apart
        together = any(hasattr(each, "full_tensor") for each in (*drawn.parameters(), *drawn.buffers()))
        self.max_ranks = 1 if together or drawn.function_subset(slice(0, drawn.members)) is None else drawn.members
        self._sharers: Ranks | None = None
        self._parts: dict[Ranks, DrawnFunctions] = {}

    def run_shared(self, sharers: Ranks, work: Callable[[], Found]) -> Found:
        """work(), by all these ranks at once, each with its part of the functions; an error of one is raised on all."""
        found = list[Found]()
        with set_attributes(self, _sharers=sharers):
            exchange_results(sharers, lambda: found.append(work()), "what was found")
        return found[0]

    @property
    def sharing_ranks(self) -> Ranks | None:
        return self._sharers if self._sharers is not None and self.is_separable() else None

    @property
    def local_functions(self) -> DrawnFunctions:
        if (ranks := self.sharing_ranks) is None:
            return self.drawn
        if ranks not in self._parts:
            self._parts[ranks] = cast(DrawnFunctions, self.drawn.function_subset(self._rank_slice(ranks)))
        return self._parts[ranks]

    @property
    def first_local_index(self) -> int:
        return 0 if (ranks := self.sharing_ranks) is None else self._rank_slice(ranks).start

    def _rank_slice(self, ranks: Ranks) -> slice:
        return part_slice(self.drawn.members, ranks.rank, ranks.size)

    def gather_results(self, find: Callable[[], Found]) -> list[Found]:
        if (ranks := self.sharing_ranks) is None:
            return [find()]
        some = ranks.rank < self.drawn.members
        return gather_from_ranks(ranks, lambda: [find()] if some else [], self.device, "what functions say")


def gather_from_ranks(
    ranks: Ranks, find: Callable[[], list[Found]], device: torch.device | str, what: str
) -> list[Found]:
    """What find() gave on every rank, in their order; tensors of other ranks lie on the device."""
    mine = list[Found]()

    def make() -> bytes:
        mine.extend(find())
        return _serialise(mine) if ranks.size > 1 else b""

    everyone = exchange_results(ranks, make, what)
    parts = (mine if rank == ranks.rank else _deserialise(packed, device) for rank, packed in enumerate(everyone))
    return [found for part in parts for found in part]


class JoinedBatches:
    """The batches of loaders that give each rank rows of its own, joined: those of all ranks, the same on each.

    Rows of one rank follow those of another; ranks may have other numbers of rows, or none. Those of a `DistributedSampler` are
    in its order: rank r of W has rows r, r + W, r + 2W, …, and rows repeated at the end, where W does not divide their number,
    are left out. Each rank reads its own from the disk, and inputs are exchanged.
    """

    def __init__(self, ranks: Ranks, loader: Loader, read: Callable[[Any], Iterable[Any]] | None = None) -> None:
        """`read`: makes batches of what the loader yields; None takes these as they are, and refuses equal ones."""
        self.ranks, self.loader, self.read = ranks, loader, read

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        sampled = self.loader.ranks > 1
        rows = check_turns(self.ranks, self.loader) if sampled else 0  # left to read
        left, mine = iter(self.loader if self.read is None else self.read(self.loader)), list[Any]()

        def read_part() -> tuple[int, bytes]:
            mine[:] = islice(left, 1)
            return tree_checksum(mine), _serialise(mine) if mine else b""

        while True:
            everyone = exchange_results(self.ranks, read_part, "parts of batches")
            parts = [_deserialise(packed, "cpu")[0] for _, packed in everyone if packed]
            if not parts:
                return
            if not sampled:
                if self.read is None and len({mark for mark, packed in everyone if packed}) < len(parts):
                    got = 'the same; pass each its own, or mesh(batches="whole")'
                    raise ValueError(f'expected different rows on every rank for batches="parts", got {got}')
                yield _join_rows(parts, torch.cat)
                continue
            # (B, W, ...) flattened is in the samplers' order: row i of rank r is number i·W + r
            yield _join_rows(parts, lambda each: torch.stack(each, 1).flatten(0, 1), most=rows)
            rows -= sum(count_examples(part[0]) for part in parts)


def _join_rows(parts: list[Any], join: Callable[[Any], Tensor], most: int | None = None) -> Any:
    """One batch of several, (x, y) or (x, y, weight): tensors with a row for each example are joined, up to `most` rows."""
    sizes = [count_examples(part[0]) for part in parts]

    def join_leaf(*each: Any) -> Any:
        pairs = zip(each, sizes, strict=True)
        rows = all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size for leaf, size in pairs)
        return join(each)[:most] if rows else each[0]

    return pytree.tree_map(join_leaf, *parts)


def check_turns(ranks: Ranks, loader: Loader) -> int:
    """The number of rows, which samplers must deal out in turns, all before one is repeated, in order unless they shuffle."""
    facts, numbers, rows = zip(*exchange_results(ranks, loader.rank_rows, "samplers"), strict=True)
    check_same(facts, "sampler and set", DATA)
    if [*numbers] != [*range(facts[0]["ranks"])]:
        got = f"{[*numbers]} of {facts[0]['ranks']}"
        advice = "use DistributedSampler(data, num_replicas=mesh.data.size, rank=mesh.data.rank)"
        raise ValueError(f"expected samplers of ranks 0 to {ranks.size - 1}, got {got}; {advice}")
    order = [row for turn in zip_longest(*rows) for row in turn][: facts[0]["rows"]]
    if len({*order}) < len(order) or not (facts[0]["shuffles"] or order == sorted(order)):
        advice = "use DistributedSampler, or give each rank its own rows with mesh(batches='parts')"
        raise ValueError(f"expected samplers that deal out rows in turns, got {facts[0]['kind']}; {advice}")
    return int(facts[0]["rows"])


def exchange_results(ranks: Ranks, make: Callable[[], Found], what: str) -> list[Found]:
    """What make() gave on every rank, in their order; an error of one rank is raised on all.

    `what` names the exchange: ranks that are at different ones raise an error. make() may exchange with the same ranks itself.
    """
    failed, mine = None, None
    try:
        mine = make()
    except Exception as error:
        # an exchange within has raised it on all of them, or there is nobody left to tell
        if getattr(error, "known_to", None) == id(ranks) or isinstance(error, MissingRankError):
            raise
        failed = error
    everyone = ranks.gather_objects((what, _picklable_error(failed), mine))
    errors = [failed if rank == ranks.rank else error for rank, (_, error, _) in enumerate(everyone)]
    bad = next((each for each in errors if each is not None), None)
    if bad is None and len({place for place, *_ in everyone}) > 1:
        places = ", ".join(place for place, *_ in everyone)
        bad = RuntimeError(f"expected all ranks to exchange {what}, got {places}; {SAME['calls']}")
    if bad is not None:
        setattr(bad, "known_to", id(ranks))  # noqa: B010
        raise bad
    return [found for *_, found in everyone]


def check_same(several: Iterable[object], what: str, remedy: str) -> None:
    """Raises where a rank has something else than the first."""
    first, *others = several
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(f"expected the same {what} on all ranks, got unequal ones on ranks {rank} and 0; {remedy}")


def _picklable_error(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error's class may take other arguments than it keeps
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def tree_checksum(tree: Any) -> int:
    """A number that differs where tensors of the tree do, or texts and numbers."""
    found = 0
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, str | int | float):
            found = zlib.crc32(repr(leaf).encode(), found)
        if isinstance(leaf, Tensor) and not hasattr(leaf, "full_tensor"):  # of which each rank has a part
            found = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), found)
            found = zlib.crc32(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _serialise(found: object) -> bytes:
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def _deserialise(packed: bytes, device: torch.device | str) -> Any:
    # It comes from another rank of the same run, never from a file.
    return torch.load(io.BytesIO(packed), map_location=device, weights_only=False)
