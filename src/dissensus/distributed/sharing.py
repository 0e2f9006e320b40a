"""Work shared by batches: ranks take batches in turn, and every rank gets all results, in the order of one process.

Rank r of W works on the whole batches r, r + W, r + 2W, …, so that networks see the same shapes as in one process. The
results of a batch, a few numbers per example, are sent to all ranks. So metrics, curves, calibrations and thresholds are
computed everywhere from the same numbers in the same order, and nothing has to be merged.
"""

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dissensus.core.batch import Batch
from dissensus.core.functions import DrawnFunctions

Given = TypeVar("Given")
Found = TypeVar("Found")

DATA = "pass the same data in the same order to all of them, or a DataLoader with a DistributedSampler"


class Ranks(Protocol):
    """Processes that work together: those of a mesh, or of one of its axes."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def objects(self, mine: Any, /) -> list[Any]: ...


def in_turns(
    ranks: Ranks,
    work: Callable[[Given], Found],
    batches: Iterable[Given],
    *,
    drawn: DrawnFunctions,
    device: torch.device | str,
) -> Iterator[tuple[Given, Found]]:
    """(batch, work(batch)) of every batch, in order, on every rank, each worked on by one of them.

    An error of one rank is raised on all, and so is one where ranks were given other batches or have drawn other functions.

    Args:
        batches: trees of tensors, the same on every rank.
        drawn: the functions that the work is done with.
        device: where tensors of what was found shall lie.
    """
    left, functions, window = iter(batches), _mark_of(drawn), list[Given]()

    def turn() -> tuple[int, list[int], bytes]:
        window[:] = islice(left, ranks.size)
        mine = work(window[ranks.rank]) if ranks.rank < len(window) else None
        return functions, [*map(_mark, window)], _packed(mine)

    while True:
        marks, data, found = zip(*exchanged(ranks, turn), strict=True)
        check_same(marks, "functions", "load the same posterior everywhere, and draw with the same seed")
        check_same(data, "batches", DATA)
        for batch, packed in zip([*window], found, strict=False):
            yield batch, _unpacked(packed, device)
        if len(window) < ranks.size:
            return


class Joined:
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
            return _mark(mine), _packed(mine) if mine else b""

        while True:
            everyone = exchanged(self.ranks, read)
            if mine and isinstance(mine[0], Batch):  # from a posterior's door: joined before
                yield mine[0]
                yield from left
                return
            parts = {mark: _unpacked(packed, "cpu")[0] for mark, packed in everyone if packed}
            if not parts:
                return
            if len(parts) < sum(bool(packed) for _, packed in everyone):
                raise ValueError(
                    'expected different rows on every rank, since the mesh has batches="parts", got the same on two; pass each '
                    'rank its own rows, or mesh(batches="whole")'
                )
            yield pytree.tree_map(lambda *each: torch.cat(each), *parts.values())


class Interleaved(Joined):
    """The batches of DataLoaders whose DistributedSamplers give each rank its part, joined: all rows, in the samplers' order.

    Rank r of W has rows r, r + W, r + 2W, …, and samplers repeat a few at the end where W does not divide their number: those
    are left out.
    """

    def __init__(self, ranks: Ranks, loader: Any, sampler: Any) -> None:
        super().__init__(ranks, loader)
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        about = self.sampler.num_replicas, len(self.sampler.dataset), len(self.loader)
        everyone = exchanged(self.ranks, lambda: (about, self.sampler.rank))
        check_same([each for each, _ in everyone], "sampler and set", DATA)
        if (found := [rank for _, rank in everyone]) != [*range(about[0])]:
            raise ValueError(
                f"expected samplers of ranks 0 to {self.ranks.size - 1}, got {found} of {about[0]}; build them by "
                "DistributedSampler(data, num_replicas=mesh.data.size, rank=mesh.data.rank, shuffle=False)"
            )
        left, rows = iter(self.loader), about[1]
        for _ in range(about[2]):
            parts = [_unpacked(each, "cpu") for each in exchanged(self.ranks, lambda: _packed(next(left)))]
            # (B, W, ...) flattened is in the samplers' order: row i of rank r is number i·W + r
            whole = pytree.tree_map(lambda *each: torch.stack(each, 1).flatten(0, 1), *parts)
            size = len(pytree.tree_leaves(whole)[0])
            yield whole if size <= rows else pytree.tree_map(itemgetter(slice(rows)), whole)
            rows -= size


def exchanged(ranks: Ranks, make: Callable[[], Found]) -> list[Found]:
    """What make() gave on every rank, in their order; an error of one rank is raised on all."""
    failed, mine = None, None
    try:
        mine = make()
    except Exception as error:
        failed = error
    everyone = ranks.objects((_sendable(failed), mine))
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is not None:
            raise failed if rank == ranks.rank and failed is not None else theirs
    return [found for _, found in everyone]


def check_same(several: Iterable[object], what: str, remedy: str) -> None:
    """Raises where a rank has something else than the first."""
    first, *others = several
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(
                f"expected the same {what} on all ranks, got different ones on ranks {rank} and 0; {remedy}"
            )


def _sendable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error's class may take other arguments than it keeps
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _mark_of(drawn: DrawnFunctions) -> int:
    seeds = [each.seed for each in drawn.modules() if isinstance(each, DrawnFunctions)]
    return _mark([*drawn.parameters(), *drawn.buffers(), torch.tensor(seeds)])


def _mark(tree: Any) -> int:
    """A number that differs where tensors of the tree do."""
    found = 0
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), found)
            found = zlib.crc32(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _packed(found: object) -> bytes:
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def _unpacked(packed: bytes, device: torch.device | str) -> Any:
    # It comes from another rank of the same run, never from a file.
    return torch.load(io.BytesIO(packed), map_location=device, weights_only=False)
