"""Work shared by batches and by functions: every rank gets what all of them found, in the order one process has.

Ranks along *data* take turns with batches, whole ones, so that networks see the shapes that they see in one process. Ranks
along *members* share a batch: each runs its part of the drawn functions, and all put together what these say. A loader's only
batch is shared by all ranks. Functions that cannot be cut, or are fewer than the ranks along *members*, run whole: all ranks
take turns with batches.

What was found of a batch, a few numbers per example, is then known to all ranks: metrics, curves, calibrations and thresholds
are computed from the same numbers in the same order wherever they are computed, and nothing has to be merged.
"""

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core.drawn_functions import DrawnFunctions, FunctionPartition

Given = TypeVar("Given")
Found = TypeVar("Found")

DATA = "pass the same data in the same order to all of them, or a DataLoader with a DistributedSampler"


SAME = {
    "calls": "call the same functions in the same order on every process",
    "functions": "load the same posterior everywhere, and draw with the same seed",
    "calibrations and promises": "fit or load them on every process",
    "batches": DATA,
}


class Ranks(Protocol):
    """Processes that work together: those of a mesh, or of one of its axes."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def gather_objects(self, mine: Any, /) -> list[Any]: ...


class Axes(Ranks, Protocol):
    """Processes along two axes."""

    members: Any
    data: Any


def part_slice(count: int, rank: int, size: int) -> slice:
    """Which of `count` things are this rank's: contiguous parts, the larger ones first."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))


class MeshFunctionPartition(FunctionPartition):
    """Of drawn functions those that run here while ranks share a batch (`work`); at other times all.

    `most`: how many ranks may share them. `apart()`: whether functions that run without the others are the same functions.
    """

    def __init__(self, drawn: DrawnFunctions, device: torch.device, apart: Callable[[], bool]) -> None:
        super().__init__(drawn)
        self.device, self.is_separable = device, apart
        together = any(hasattr(each, "full_tensor") for each in (*drawn.parameters(), *drawn.buffers()))
        self.max_ranks = 1 if together or drawn.function_subset(slice(0, drawn.members)) is None else drawn.members
        self._sharers: Ranks | None = None
        self._parts: dict[Ranks, DrawnFunctions] = {}

    def run_shared(self, sharers: Ranks, work: Callable[[], Found]) -> Found:
        """work(), by all these ranks at once, each with its part of the functions; an error of one is raised on all."""
        found = list[Found]()
        self._sharers = sharers
        try:
            exchange_results(sharers, lambda: found.append(work()), "what was found")
        finally:
            self._sharers = None
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


def map_batches(
    mesh: Axes,
    work: Callable[[Given], Found],
    batches: Iterable[Given],
    *,
    portion: FunctionPartition,
    seen_by: Iterable[Any],
    device: torch.device | str,
) -> Iterator[tuple[Given, Found]]:
    """(batch, work(batch)) of every batch, in order, on every rank, each worked on by one of them or by several at once.

    An error of one rank is raised on all, and so is one where ranks were given other batches or have drawn other functions.

    Args:
        batches: trees of tensors, the same on every rank.
        portion: the functions that the work is done with; a `MeshFunctionPartition` lets ranks share a batch.
        seen_by: facts and tensors of what the functions are seen through, the same on every rank.
        device: where tensors of what was found shall lie.
    """
    left, window, seen = iter(batches), list[Given](), 0
    about: dict[str, Any] = {"calls": work.__qualname__, "functions": _functions_checksum(portion.drawn)}
    about["calibrations and promises"] = tree_checksum([*seen_by])
    most = portion.max_ranks if isinstance(portion, MeshFunctionPartition) else 1
    takers, sharers = (mesh.data, mesh.members) if 1 < mesh.members.size <= most else (mesh, None)

    def read() -> dict[str, Any]:
        window[:] = islice(left, takers.size)
        return about | {"batches": [*map(tree_checksum, window)]}

    def work_on_own() -> list[Found]:
        return [work_on_batch(sharers, batch) for batch in window[takers.rank : takers.rank + 1]]

    def work_on_batch(ranks: Ranks | None, batch: Given) -> Found:
        if ranks is None or not isinstance(portion, MeshFunctionPartition):
            return work(batch)
        return portion.run_shared(ranks, lambda: work(batch))

    while True:
        everyone = exchange_results(mesh, read, "batches")
        for what, remedy in SAME.items():
            check_same([each[what] for each in everyone], what, remedy)
        only = not seen and len(window) == 1 < min(most, takers.size)
        seen += len(window)
        found = [work_on_batch(mesh, window[0])] if only else gather_from_ranks(takers, work_on_own, device, "results")
        yield from zip([*window], found, strict=True)
        if len(window) < takers.size:
            return


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


class ConcatenatedBatches:
    """The batches of loaders that give each rank rows of its own, joined: those of all ranks, in their order.

    Ranks may have other numbers of rows, or none. Each reads its own from the disk, and inputs are exchanged.
    """

    def __init__(self, ranks: Ranks, loader: Any) -> None:
        self.ranks, self.loader = ranks, loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        left, mine = iter(self.loader), list[Any]()

        def read() -> tuple[int, bytes]:
            mine[:] = islice(left, 1)
            return tree_checksum(mine), _serialise(mine) if mine else b""

        while True:
            everyone = exchange_results(self.ranks, read, "parts of batches")
            parts = {mark: _deserialise(packed, "cpu")[0] for mark, packed in everyone if packed}
            if not parts:
                return
            if len(parts) < sum(bool(packed) for _, packed in everyone):
                advice = 'pass each its own, or mesh(batches="whole")'
                raise ValueError(f'expected different rows on every rank for batches="parts", got the same; {advice}')
            yield pytree.tree_map(lambda *each: torch.cat(each), *parts.values())


class InterleavedBatches(ConcatenatedBatches):
    """The batches of DataLoaders whose DistributedSamplers give each rank its part, joined: all rows, in the samplers' order.

    Rank r of W has rows r, r + W, r + 2W, …, and samplers repeat a few at the end where W does not divide their number: those
    are left out.
    """

    def __init__(self, ranks: Ranks, loader: Any, sampler: Any) -> None:
        super().__init__(ranks, loader)
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        about = self.sampler.num_replicas, len(self.sampler.dataset), len(self.loader)
        everyone = exchange_results(self.ranks, lambda: (about, self.sampler.rank), "samplers")
        check_same([each for each, _ in everyone], "sampler and set", DATA)
        if (found := [rank for _, rank in everyone]) != [*range(about[0])]:
            got = f"{found} of {about[0]}"
            advice = "use DistributedSampler(data, num_replicas=mesh.data.size, rank=mesh.data.rank, shuffle=False)"
            raise ValueError(f"expected samplers of ranks 0 to {self.ranks.size - 1}, got {got}; {advice}")
        check_sampler_order(self.ranks, self.sampler)
        left, rows = iter(self.loader), about[1]
        for _ in range(about[2]):
            everyones = exchange_results(self.ranks, lambda: _serialise(next(left)), "parts of batches")
            parts = [_deserialise(each, "cpu") for each in everyones]
            # (B, W, ...) flattened is in the samplers' order: row i of rank r is number i·W + r
            whole = pytree.tree_map(lambda *each: torch.stack(each, 1).flatten(0, 1), *parts)
            size = len(pytree.tree_leaves(whole)[0])
            yield whole if size <= rows else pytree.tree_map(itemgetter(slice(rows)), whole)
            rows -= size


def check_sampler_order(ranks: Ranks, sampler: Any) -> None:
    """Raises where samplers do not deal out rows in turns, all of them before one is repeated, in order unless they shuffle."""
    each = exchange_results(ranks, lambda: [*sampler], "rows of samplers")
    order = [row for turn in zip_longest(*each) for row in turn][: len(sampler.dataset)]
    if len({*order}) < len(order) or not (getattr(sampler, "shuffle", False) or order == sorted(order)):
        advice = "use DistributedSampler, or give each rank its own rows with mesh(batches='parts')"
        raise ValueError(f"expected samplers that deal out rows in turns, got {type(sampler).__name__}; {advice}")


def exchange_results(ranks: Ranks, make: Callable[[], Found], what: str) -> list[Found]:
    """What make() gave on every rank, in their order; an error of one rank is raised on all.

    `what` names the exchange: ranks that are at different ones raise an error. make() may exchange with the same ranks itself.
    """
    failed, mine = None, None
    try:
        mine = make()
    except Exception as error:
        if getattr(error, "known_to", None) == id(ranks):  # an exchange within has raised it on all of them
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


def _functions_checksum(drawn: DrawnFunctions) -> int:
    seeds = [each.seed for each in drawn.modules() if isinstance(each, DrawnFunctions)]
    return tree_checksum([*drawn.parameters(), *drawn.buffers(), seeds])


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
