"""Loaders on a mesh: every process reads the same whole batches, or each rank of the data axis reads its own part."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from dissensus.core.batch import Batch, map_tensors
from dissensus.core.loader import Loader
from dissensus.core.posterior import Posterior
from dissensus.distributed.mesh import Axis, Mesh
from dissensus.distributed.work_split import check_same


def check_sampler(sampler: Any, axis: Axis) -> None:
    """Raises where a sampler divides rows otherwise than the axis does."""
    if (sampler.num_replicas, sampler.rank) != (axis.size, axis.rank):
        got = f"rank {sampler.rank} of {sampler.num_replicas}"
        hint = "pass DistributedSampler(data, num_replicas=mesh.data.size, rank=mesh.data.rank)"
        raise ValueError(f"expected a sampler of the mesh's data axis, rank {axis!r}, got {got}; {hint}")


def check_equal_sizes(sizes: list[int]) -> None:
    """Raises where ranks have other numbers of rows."""
    if len({*sizes}) > 1:
        raise ValueError(f"expected parts of a batch with as many rows in every process, got {sizes}; make them even")


class LockstepBatches:
    """Batches of a loader, as many on every rank: where one has none left, the others would wait for it in the next step.

    Lengths are compared once. If loaders have none, ranks tell each other before every step whether they have a batch.
    """

    def __init__(self, batches: Iterable[Any], loader: Loader, mesh: Mesh) -> None:
        self.batches, self.mesh, self.length = batches, mesh, None if loader.is_stream else loader.length
        check_same(mesh.gather_objects(self.length), "number of batches", "make the loaders equally long")

    def __iter__(self) -> Iterator[Any]:
        left, mesh = iter(self.batches), self.mesh
        for number in count():
            batch = next(left, None)
            over, wanted = batch is None, number == self.length
            if self.length is None:
                ended = int(mesh.members.sum(mesh.data.sum(torch.tensor(int(over), device=mesh.device))))
                over, wanted = ended > 0, ended == mesh.size
            if over != wanted:
                which = "as many batches on all ranks, and as many as len(loader)"
                raise ValueError(f"expected {which}, got {number} on some; make the loaders equally long")
            if over:
                return
            yield batch


class PartBatches:
    """Batches of a loader that gives each rank its own rows; rows that its sampler repeats, to be even, have weight 0."""

    def __init__(self, loader: Loader, posterior: Posterior) -> None:
        self.loader, self.posterior, self.sampler = loader, posterior, loader.sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        seen, sampler = 0, self.sampler
        for batch in self.posterior.read(self.loader):
            seen += batch.size
            if sampler is not None and seen == len(sampler) and sampler.total_size > len(sampler.dataset):
                # The k-th row of rank r is number k R + r of all; those past the end are the first ones again.
                number = torch.arange(seen - batch.size, seen) * sampler.num_replicas + sampler.rank
                once = (number < len(sampler.dataset)).to(batch.y.device, torch.get_default_dtype())
                batch = batch._replace(weight=once if batch.weight is None else batch.weight * once)
            yield batch


class LocalRowBatches:
    """Batches of `ds.data.Batches`, of which this rank reads its own rows alone while `cut` is true, and whole ones before.

    `taken`: (rows of the whole batch, which of them lie here) of the last one, None where it was whole.
    """

    def __init__(self, loader: Loader, axis: Axis) -> None:
        self.loader, self.axis = loader.given, axis
        self.reads_part, self.last_part = False, cast(tuple[int, slice] | None, None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, self.loader.rows())

    def _read(self, rows: Any) -> Any:
        size = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if not self.reads_part or size < self.axis.size:
            self.last_part = None
            return self.loader.at(rows)
        here = self.axis.part_slice(size)
        self.last_part = size, here
        whole = isinstance(rows, slice)
        return self.loader.at(slice(rows.start + here.start, rows.start + here.stop) if whole else rows[here])


class GatheredBatches:
    """Whole batches, put together from the parts that the ranks of the data axis read: the same in all of them."""

    def __init__(self, parts: PartBatches, mesh: Mesh) -> None:
        self.parts, self.mesh = parts, mesh

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Batch]:
        device, axis, left = self.mesh.device, self.mesh.data, iter(self.parts)
        while True:
            batch = next(left, None)
            size = 0 if batch is None else batch.size
            check_equal_sizes(axis.gather_objects(size))  # also where a rank has none left
            if batch is None:
                return

            def gather_tensor(tensor: Tensor, size: int = size) -> Tensor:
                if not tensor.ndim or len(tensor) != size:
                    return tensor
                whole = axis.gather(tensor.to(device), size * axis.size)
                return whole.to(tensor.device)

            weight = None if batch.weight is None else gather_tensor(batch.weight)
            yield Batch(map_tensors(batch.x, gather_tensor), gather_tensor(batch.y), weight)
