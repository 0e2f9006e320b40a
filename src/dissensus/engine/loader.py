"""Loader: what a user passes to read batches from, and the only place that asks it what it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import cached_property, partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset

from dissensus.core.batch import convert_inputs, count_examples, input_tensors, split_labels
from dissensus.core.likelihood import RealTargets
from dissensus.core.trainable import connected_mesh
from dissensus.utils.arrays import is_array
from dissensus.utils.process_group import world_size

log = logging.getLogger("dissensus")

TOGETHER, SMALL = 16, 2**23  # batches that are read at once, and how many numbers they may have,
SMALL_COPY, END = 2**20, object()  # or, where they are copied for it; after the last batch
GENERATORS = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")


class Loader:
    """Batches (x, y) or (x, y, weight) of any iterable, or of the data themselves; every loop is an epoch.

    A batch or the data may also be a mapping (a dict, transformers' BatchEncoding): its labels are y, its other entries x.
    All functions make a `Loader` of what they get; make one yourself to name the labels.

    Args:
        given: an iterable of batches; or data (x, y) or (x, y, weight) of N rows, recognised by their second entry, an array:
            `ds.data.Batches` of 256 rows. A `Loader` is taken as it is.
        labels: name of the entry of a mapping that holds the targets; None is "labels" or "label".
        shuffle: whether data are shuffled, in batches of 32.
        raw: whether the inputs of data stay as they are, for a posterior that transforms them itself.
        complete: whether these are the batches of all processes.
    """

    def __init__(
        self, given: Any, *, labels: str | None = None, shuffle: bool = False, raw: bool = False, complete: bool = False
    ) -> None:
        data = split_labels(given, labels, required=True)
        self.rows: int | None = None  # of a batch, where the last read gave several together
        self.given, self.labels, self.is_complete = _batches_of_data(data, shuffle, raw), labels, complete
        if isinstance(given, Loader):
            self.given, self.labels = given.given, labels or given.labels
            self.is_complete = complete or given.is_complete
        dataset = isinstance(self.given, Dataset) and not isinstance(self.given, IterableDataset)
        if dataset and not _gives_batches(self.given):
            got = f"{type(given).__name__}, a Dataset of single examples"
            raise TypeError(f"expected a loader of batches, got {got}; pass DataLoader(dataset, batch_size=...)")

    @classmethod
    def for_posterior(cls, given: Any, posterior: Any, *, shuffle: bool = False) -> Loader:
        """A loader of what this posterior takes: raw inputs, if it transforms them."""
        return cls(given, shuffle=shuffle, raw=posterior.inputs is not None)

    @classmethod
    def complete(cls, given: Any, posterior: Any) -> Loader:
        """A loader of the batches of all processes, the same in each, for what is measured on all rows."""
        loader, mesh = cls.for_posterior(given, posterior), connected_mesh(posterior)
        if loader.is_complete:
            return loader
        if mesh is not None:
            return cls(mesh.complete_loader(loader), complete=True)
        if loader.ranks > 1 and posterior.mesh != "independent":
            raise ValueError(
                "expected a posterior with a mesh, since the loader gives each process a part of the data, got none; set "
                'posterior.mesh = ds.distributed.mesh(), or = "independent" for results on each part'
            )
        return loader

    @classmethod
    def complete_foreign(cls, given: Any, posterior: Any) -> Loader:
        """As `complete`, of foreign inputs: a loader, x or a list of batches x, which get targets that mean nothing."""
        bare = isinstance(given, list) and all(map(is_array, given)) and len({each.shape[1:] for each in given}) == 1
        real = isinstance(posterior.likelihood, RealTargets)  # for which it may be [x, y]
        if bare and real and len(given) in (2, 3) and len({each.shape for each in given}) == 1:
            raise ValueError(f"expected foreign x, or (x, y), got {len(given)} arrays of one shape; pass x alone")
        fill = with_placeholder_targets
        return cls.complete([*map(fill, given)] if bare else fill(given), posterior)

    def __iter__(self) -> Iterator[Any]:
        self.rows = None
        return map(partial(split_labels, labels=self.labels, required=self.labels is not None), self.given)

    def __len__(self) -> int:
        return len(self.given)

    @property
    def length(self) -> int | None:
        """Number of batches; None if it is not known, as of a DataLoader over a stream."""
        try:
            return len(self.given)
        except TypeError:
            return None

    @property
    def is_stream(self) -> bool:
        """Whether it reads a stream, whose length may be a guess."""
        return isinstance(getattr(self.given, "dataset", None), IterableDataset)

    def check_rereadable(self, hint: str = "") -> None:
        """Raises if it is a generator, or another iterator."""
        if isinstance(self.given, Iterator):
            raise ValueError(
                f"expected a loader that can be read twice, got a generator; pass a list of its batches{hint}"
            )

    @property
    def has_separable_rows(self) -> bool:
        """Whether a row is the same without the others of its batch: see `ds.data.Batches.divisible`."""
        return bool(getattr(self.given, "divisible", False))

    def joined_batches(self, first_alone: bool, may_copy: Callable[[], bool]) -> Iterator[Any]:
        """Batches, small ones together: then `rows` says how many rows each has. `may_copy`: asked once the first has run."""
        if not self.has_separable_rows:
            yield from self._joined_copies(may_copy)
            return
        x, self.rows = input_tensors(self.given.x), int(self.given.batch_size)
        numbers = self.rows * max(1, sum(each.numel() for each in x) // max(1, len(x[0])))
        rows = iter(self.given.rows())
        while several := [*islice(rows, 1 if first_alone else max(1, min(TOGETHER, SMALL // numbers)))]:
            first_alone = False
            ends = range(several[0][0], several[-1][-1] + 1) if isinstance(several[0], range) else torch.cat(several)
            yield self.given.at(ends)

    def _joined_copies(self, may_copy: Callable[[], bool]) -> Iterator[Any]:
        """Batches of any iterable, the first alone; neighbours that are alike are copied, since loaders may reuse memory."""
        several: list[tuple[Tensor, ...]] = []
        for number, given in enumerate(chain(self, [END])):
            copies = number > 0 and bool(kinds := _kinds_of_rows(given)) and may_copy()
            if several and not (copies and kinds == _kinds_of_rows(several[0]) and _fits(several, len(given[0]))):
                self.rows = len(several[0][0]) if len(several) > 1 else None
                yield several[0] if self.rows is None else tuple(map(torch.cat, zip(*several, strict=True)))
                several = []
            if copies and _fits([given], len(given[0])):
                several.append(tuple(each.detach().clone() for each in given))
            elif given is not END:
                self.rows = None
                yield given

    @property
    def row_counts(self) -> tuple[int, int] | None:
        """(rows that its sampler reads, rows of the data set behind every `Subset`); None where one is not known."""
        data, sampler = self._attribute("dataset"), self._attribute("sampler")
        while isinstance(data, Subset):
            data = data.dataset
        return (len(sampler), len(data)) if isinstance(sampler, Sized) and isinstance(data, Sized) else None

    def partial_batches(self, choose: Callable[[int], slice]) -> Iterator[Any]:
        """Batches of the rows choose(B) of each, which are all that is read; its rows must be separable."""
        for rows in self.given.rows():
            yield self.given.at(rows[choose(len(rows))])

    def replace_rows(self, make: Callable[[Iterable[Any]], tuple[Any, ...]]) -> Any:
        """The same loader of other rows, make(batches of all in order): ({name: tensor}, y, ...); None if it has no order."""
        given = self.given
        if hasattr(given, "replace_rows"):
            return given.replace_rows(make)
        if not isinstance(given, DataLoader) or self.is_stream or given.batch_sampler is None:
            return None
        size, collate, workers = given.batch_size or 256, given.collate_fn, given.num_workers
        x, *rest = make(
            Loader(DataLoader(given.dataset, size, collate_fn=collate, num_workers=workers), labels=self.labels)
        )
        rows = StackDataset(StackDataset(**x), *rest)
        return DataLoader(rows, batch_sampler=given.batch_sampler, generator=given.generator)

    @property
    def ranks(self) -> int:
        """Number of ranks to which its sampler gives different rows, like torch's DistributedSampler; 1 without one."""
        return 1 if self._rank_sampler is None else int(self._rank_sampler.num_replicas)

    def rank_rows(self) -> tuple[dict[str, Any], int, list[int]]:
        """(facts of its sampler and set, which should be the same on all ranks, this rank's number, numbers of its rows)."""
        sampler, shuffles = self._rank_sampler, getattr(self._rank_sampler, "shuffle", False)
        size = {"ranks": self.ranks, "rows": len(sampler.dataset), "batches": self.length}
        return {**size, "kind": type(sampler).__name__, "shuffles": shuffles}, sampler.rank, [*sampler]

    def first_reads(self, start: int, end: int) -> Tensor | None:
        """(end − start,) which of this rank's rows are not repeats that make ranks even; None if none of them is one."""
        sampler = self._rank_sampler
        if sampler is None or end < len(sampler) or sampler.total_size <= len(sampler.dataset):
            return None
        # The k-th row of rank r is number k R + r of all; those past the end are the first ones again.
        return torch.arange(start, end) * self.ranks + sampler.rank < len(sampler.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Makes a sampler of several ranks shuffle for the epoch of this number."""
        if hasattr(self._rank_sampler, "set_epoch"):
            self._rank_sampler.set_epoch(epoch)

    @cached_property
    def _rank_sampler(self) -> Any:
        prepared = type(self.given).__module__ == "accelerate.data_loader"
        if prepared and world_size() > 1:
            what = "one that Accelerate has divided over processes; pass it as it was before prepare"
            raise ValueError(f"expected the loader itself, got {what}")
        found = (self._attribute(path) for path in ("sampler", "batch_sampler.sampler"))
        return next((each for each in found if hasattr(each, "num_replicas") and hasattr(each, "rank")), None)

    def state(self) -> dict[str, Any]:
        """{"own": its state_dict(), or None; "generators": path -> state of a torch.Generator it holds}.

        Loaders that draw from torch's global generator, as a DataLoader does by default, need neither.
        """
        given = self.given
        own = given.state_dict() if hasattr(given, "state_dict") and hasattr(given, "load_state_dict") else None
        if not _holds_no_code(own):
            what = "the loader's state_dict() holds more than numbers, text and tensors and is not in the checkpoint"
            log.warning("%s: a resumed run may see other batches", what)
            own = None
        return {"own": own, "generators": {path: each.get_state() for path, each in self._generators().items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state; warns if that is not possible, because the batches will then differ."""
        found = self._generators()
        missing = sorted(state["generators"].keys() - found.keys())
        for path in state["generators"].keys() & found.keys():
            found[path].set_state(state["generators"][path].cpu())
        if state["own"] is not None:
            try:
                self.given.load_state_dict(state["own"])
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                missing.append(f"state ({error})" if hasattr(self.given, "load_state_dict") else "state")
        if missing:
            text = "the loader does not accept the %s in the checkpoint: the resumed run sees other batches; build it alike"
            log.warning(text, missing[0])

    def _generators(self) -> dict[str, torch.Generator]:
        """Path -> generator held by the loader or its sampler."""
        found = {path: self._attribute(path) for path in GENERATORS}
        return {path: each for path, each in found.items() if isinstance(each, torch.Generator)}

    def _attribute(self, path: str) -> Any:
        try:
            return attrgetter(path)(self.given)
        except AttributeError:
            return None


def with_placeholder_targets(given: Any) -> Any:
    """A batch or data (x, y), with targets that mean nothing where x or [x] was given alone."""
    x = given[0] if isinstance(given, tuple | list) and len(given) == 1 else given
    if isinstance(x, Mapping) and isinstance(pair := split_labels(x), tuple):
        return pair
    if not is_array(x) and not isinstance(x, Mapping):
        return given
    count = len(x) if is_array(x) else count_examples(convert_inputs(x))
    return x, torch.zeros(count, dtype=torch.int64)  # no real numbers, which might be taken for a column of targets


def _batches_of_data(given: Any, shuffle: bool, raw: bool) -> Any:
    if isinstance(given, tuple | list) and len(given) in (2, 3) and is_array(given[1]):
        from dissensus.data.batches import Batches, RawBatches  # imports all of `data`, which `import dissensus` avoids

        x, y, *weight = given
        kind: Any = RawBatches if raw else Batches
        return kind(x, y, weight=weight[0] if weight else None, batch_size=32 if shuffle else 256, shuffle=shuffle)
    if is_array(given):
        raise TypeError(f"expected a loader or (x, y), got {type(given).__name__}; pass those, or call predict(x)")
    return given


def _gives_batches(dataset: Any) -> bool:
    try:
        x, y, *_ = dataset[0]
        return isinstance(y, Tensor) and y.ndim > 0 and len(y) == count_examples(x)
    except (TypeError, ValueError):
        return False
    except (IndexError, KeyError):  # empty, or not indexed from 0: the loop that reads it will show
        return True


def _fits(several: list[tuple[Tensor, ...]], rows: int) -> bool:
    """Whether a batch of so many rows may be copied together with these: the last may have fewer than the others."""
    numbers = (len(several) + 1) * sum(each.numel() for each in several[0])
    return len(several) < TOGETHER and numbers <= SMALL_COPY and len(several[0][0]) == len(several[-1][0]) >= rows


def _kinds_of_rows(given: Any) -> list[Any]:
    """What batches of tensors must have in common; empty if a batch is something else, or is pinned for its transfer."""
    tensors: Any = given if isinstance(given, tuple | list) else [None]
    plain = all(type(each) is Tensor and each.ndim and each.layout is torch.strided for each in tensors)
    if not plain or len({len(each) for each in tensors}) != 1 or not len(tensors[0]) or tensors[0].is_pinned():
        return []
    return [(each.shape[1:], each.dtype, each.device) for each in tensors]


def _holds_no_code(value: Any) -> bool:
    """Whether this can be stored in a file without code."""
    if isinstance(value, dict):
        return all(_holds_no_code(key) and _holds_no_code(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_holds_no_code(each) for each in value)
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, Tensor)
