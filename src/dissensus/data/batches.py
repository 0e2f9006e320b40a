"""Batches of tensors in memory, made without a Python loop over examples."""

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor

from dissensus.utils.arrays import as_tensor
from dissensus.utils.checks import integer

BatchInputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


class Batches:
    """A fast loader for data in memory: iterates over batches (x, y) or (x, y, weight).

    Every loop starts a new epoch; len() is the number of batches. Batches stay on the device of x and y, and unshuffled
    batches are views of them. Small image sets are best moved to the GPU as a whole.

    Args:
        x: a tensor (N, ...), or a tuple or dict of such tensors, one row per example. Arrays, Series and DataFrames of
            numbers become tensors; real numbers take torch's default dtype.
        y: targets (N, ...). If x is a DataFrame and y a Series, their indices must be equal.
        batch_size: examples per batch, B.
        weight: (N,) example weights: how often each example counts.
        shuffle: draws a new order every epoch.
        seed: seed of the orders. The generator belongs to this object and continues from epoch to epoch, so a run
            repeats exactly. None draws a seed from the global generator every epoch, as a DataLoader does.
        drop_last: drops a last batch smaller than B.
        augment: a function of the batch's inputs, run on their device (`dissensus.data.Augmentation`). If its attribute
            `joint` is True, it takes and returns inputs and targets (`SegmentationAugmentation`).
    """

    def __init__(
        self,
        x: BatchInputs,
        y: Tensor,
        *,
        batch_size: int,
        weight: Tensor | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        augment: Callable[..., Any] | None = None,
    ) -> None:
        check_index(x, y, weight)
        x, y, weight = _map_inputs(as_tensor, x), as_tensor(y), as_tensor(weight)
        lengths = {len(tensor) for tensor in _input_tensors(x)} | ({len(weight)} if weight is not None else set())
        if lengths != {len(y)}:
            found = " and ".join(str(length) for length in sorted(lengths)) or "none"
            raise ValueError(f"expected as many inputs as targets, got {found} and {len(y)}; pass one target per input")
        if seed is not None and not shuffle:
            raise ValueError(f"expected no seed without shuffle, got seed={seed}; pass shuffle=True, or no seed")
        self.x, self.y, self.weight = x, y, weight
        self.batch_size, self.shuffle, self.drop_last = integer("batch_size", batch_size), shuffle, drop_last
        self.augment = augment
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """State of the shuffling and the augmentation; `Batches` that load it continue with the same epochs."""
        augment: Any = self.augment
        return {
            "generator": None if self._generator is None else self._generator.get_state(),
            "augment": augment.state_dict() if hasattr(augment, "state_dict") else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of `Batches` that were built with the same arguments."""
        if (state["generator"] is None) != (self._generator is None):
            found = "one with a seed" if self._generator is None else "one without"
            raise ValueError(f"expected a state of Batches with the same arguments, got {found}; pass the same seed")
        if self._generator is not None:
            self._generator.set_state(state["generator"].cpu())
        augment: Any = self.augment
        if state["augment"] is not None and hasattr(augment, "load_state_dict"):
            augment.load_state_dict(state["augment"])

    def __len__(self) -> int:
        full, rest = divmod(len(self.y), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return map(self.at, self.rows())

    @property
    def divisible(self) -> bool:
        """Whether a row is the same without the others of its batch: nothing is done to batches but to take their rows."""
        return self.augment is None and type(self) is Batches

    def rows(self) -> Iterator[Any]:
        """The rows of each batch of an epoch, a range or (B,) numbers."""
        # Not a generator function: the order is drawn when the loop starts, not when its first batch is taken.
        order, count = self._order(), len(self.y)
        ends = ((start, min(start + self.batch_size, count)) for start in range(0, count, self.batch_size))
        return (range(*each) if order is None else order[slice(*each)] for each in islice(ends, len(self)))

    def at(self, rows: Any) -> tuple[Any, ...]:
        """The batch of these rows."""
        x, y = _take_rows(self.x, rows), _take_rows(self.y, rows)
        if self.augment is not None:
            x, y = self.augment(x, y) if getattr(self.augment, "joint", False) else (self.augment(x), y)
        return (x, y) if self.weight is None else (x, y, _take_rows(self.weight, rows))

    def replace_rows(self, make: Callable[[Iterable[Any]], tuple[Any, ...]]) -> Self:
        """The same loader with the first entry of make(unshuffled batches) in place of x."""
        if self.augment is not None:
            raise ValueError("expected Batches without augment, got some; features are made once: leave augment out")
        made = copy.copy(self)
        made.x = make(Batches(self.x, self.y, batch_size=self.batch_size))[0]
        return made

    def _order(self) -> Tensor | None:
        if not self.shuffle:
            return None
        generator = self._generator
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        order = torch.randperm(len(self.y), generator=generator)
        return order.to(_input_tensors(self.x)[0].device)  # one transfer an epoch, not a batch


class RawBatches:
    """Batches of raw inputs, tables included, for a posterior that has `inputs` and transforms them itself."""

    def __init__(self, x: Any, y: Any, **keywords: Any) -> None:
        check_index(x, y, keywords.get("weight"))
        self.x, self.rows = x, Batches(torch.arange(len(y)), y, **keywords)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return ((_take_raw_rows(self.x, index), *rest) for index, *rest in self.rows)


def _take_raw_rows(x: Any, index: Tensor) -> Any:
    if hasattr(x, "iloc"):
        return x.iloc[index.numpy()]
    if isinstance(x, dict):
        return {name: _take_raw_rows(column, index) for name, column in x.items()}
    return [x[i] for i in index.tolist()] if isinstance(x, list | tuple) else x[index]


def check_index(*given: Any) -> None:
    """Raises if the indices of frames and series differ: their rows would silently be paired by position."""
    held = [each for each in given if hasattr(each, "index") and hasattr(each, "iloc")]
    if any(not held[0].index.equals(each.index) for each in held[1:]):
        raise ValueError("expected inputs and targets with one index, got two; pass y.loc[x.index], or y.to_numpy()")


def _map_inputs(function: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, dict):
        return {name: function(value) for name, value in x.items()}
    return tuple(map(function, x)) if isinstance(x, tuple | list) else function(x)


def _input_tensors(x: BatchInputs) -> list[Tensor]:
    return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple | list) else [x]


def _take_rows(x: BatchInputs, rows: Any) -> Any:
    view = slice(rows.start, rows.stop) if isinstance(rows, range) else None
    return _map_inputs(lambda each: each[rows.to(each.device) if view is None else view], x)
