"""Inputs that a network can take: of its dtype, with a batch axis. Tried once per shape, on the host."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.particles import Particles
from dissensus.core.running import first_line

log = logging.getLogger("dissensus")

Run = Callable[[Inputs], Tensor]


class KnownInputs:
    """Kinds of inputs (shapes without the batch axis, dtypes) that a network was tried on and takes."""

    def __init__(self) -> None:
        self.shapes: dict[tuple[Any, ...], torch.Size] = {}  # of outputs, without the batch axis
        self.taken: set[tuple[Any, ...]] = set()
        self.doubted = False  # whether a doubt was logged: once is enough

    def output_shape(self, x: Inputs, run: Run, dtype: torch.dtype) -> torch.Size:
        """(B, ...) shape of run(x), called once per kind of x and `dtype`, the network's, which may change."""
        key = _kind(x, dtype)
        if key not in self.shapes:
            self.shapes[key] = outputs_of(run, x).shape[1:]
        return torch.Size((batches.size(x), *self.shapes[key]))

    def doubt(self, word: str | None) -> None:
        """Logs a doubt about the outputs, once."""
        if word is not None and not self.doubted:
            log.warning("%s", word)
            self.doubted = True

    def check(self, x: Inputs, run: Run, dtype: torch.dtype) -> None:
        """Raises where run cannot take x, or x has no batch axis. Tries one example where that shows it."""
        key = _kind(x, dtype)
        if batches.size(x) == 0 or key in self.taken or key in self.shapes:
            return
        if not takes_fewer_examples(run, x):
            outputs_of(run, x)
        self.taken.add(key)


def _kind(x: Inputs, dtype: torch.dtype) -> tuple[Any, ...]:
    return (dtype, *((tuple(tensor.shape[1:]), tensor.dtype) for tensor in batches.tensors(x)))


def outputs_of(run: Run, x: Inputs) -> Tensor:
    """(B, ...) run(x), batch axis first; a clear error where x has none, which some layers let pass."""
    size = batches.size(x)
    try:
        outputs = run(x)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(x, Tensor) and _answer(run, x[None]) is not None:
            raise _without_batch_axis(x) from error
        raise
    kept = outputs.ndim > 0 and outputs.shape[0] == size
    # Linear layers take any number of axes in front, convolutions take single images: then the numbers of one example are
    # taken for examples. Running the first of them alone shows it, unless the network needs batches of a certain size.
    if isinstance(x, Tensor) and (not kept or not takes_fewer_examples(run, x)):
        one = _same_with_an_axis(run, x, outputs) and not _are_examples(run, torch.cat([x, x.flip(0), x]))
        if one:
            raise _without_batch_axis(x)
    if not kept:
        raise ValueError(
            f"expected outputs with the batch axis first ({size}, ...), got {tuple(outputs.shape)}; "
            "let the network keep the batch axis"
        )
    return outputs


def takes_fewer_examples(run: Run, x: Inputs) -> bool:
    """Whether run gives one output for the first row of x, or two for the first two (batch norm without statistics).

    Asked of single tensors only: rows of several may depend on each other.
    """
    if not isinstance(x, Tensor) or x.ndim == 0:
        return False
    for count in (1, 2):
        if count < len(x) or count == len(x) == 1:
            outputs = _answer(run, x[:count])
            if outputs is not None and outputs.ndim > 0 and outputs.shape[0] == count:
                return True
    return False


def _same_with_an_axis(run: Run, x: Tensor, outputs: Tensor) -> bool:
    """Whether run gives the same for x as one example as for its rows as examples."""
    alone = _answer(run, x[None])
    return alone is not None and alone.shape == (1, *outputs.shape) and _same(alone[0], outputs)


def _are_examples(run: Run, x: Tensor) -> bool:
    """Whether run takes the rows for examples, not for one example.

    To be asked of more rows than there were: batch norm without statistics makes ±1 of two, however they are read.
    """
    outputs = _answer(run, x)
    if outputs is None or outputs.ndim == 0 or len(outputs) != len(x):
        return False
    return not _same_with_an_axis(run, x, outputs)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-2, atol=1e-3 * _largest(b), equal_nan=True)


def _largest(tensor: Tensor) -> float:
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0


def _answer(run: Run, x: Inputs) -> Tensor | None:
    try:
        return run(x)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a network may say in any way that it does not take what was only tried
        return None


def _without_batch_axis(x: Tensor) -> ValueError:
    return ValueError(
        f"expected inputs with a batch axis first, got one example of shape {tuple(x.shape)}; pass x[None], and targets so "
        "too, or let a loader make batches"
    )


@contextmanager
def explained(x: Inputs, particles: Particles) -> Iterator[None]:
    """Turns torch's own failure to run the network inside on x into an error that says what to convert, or where it failed."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        clear = _of_another_dtype(error, x, particles) or _in_a_layer(error, x, particles.template.network)
        if clear is None:
            raise
        raise clear from error


def _of_another_dtype(error: Exception, x: Inputs, particles: Particles) -> ValueError | None:
    if not isinstance(error, RuntimeError | TypeError) or not re.search(
        r"dtype|scalar type|input type", str(error), re.IGNORECASE
    ):
        return None
    state = (*particles.parameters(), *particles.buffers())
    own = next((tensor.dtype for tensor in state if tensor.is_floating_point()), None)
    found = [tensor.dtype for tensor in batches.tensors(x)]
    if "indices" in str(error):
        wrong = next((dtype for dtype in found if dtype not in (torch.int32, torch.int64)), None)
        wanted, remedy = "integer inputs for an embedding", "pass x.long()"
    else:
        wrong = next((dtype for dtype in found if dtype.is_floating_point and dtype != own), None)
        wrong = wrong or next((dtype for dtype in found if not dtype.is_floating_point), None)
        wanted = f"inputs of {own}, as the network's weights"
        remedy = f"pass x.to({own}), or bring the posterior to theirs with .to(dtype)"
        if wrong is not None and not wrong.is_floating_point:
            remedy = f"pass x.to({own}) (pixels: over 255), or convert them in the network's forward"
    return None if own is None or wrong is None else ValueError(f"expected {wanted}, got {wrong}; {remedy}")


def _in_a_layer(error: Exception, x: Inputs, network: nn.Module) -> ValueError | None:
    """The error, with the layer that raised it and the shapes it was given; None where somebody else's code did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    layer, home = inside[-1].f_locals["self"], inside[-1].f_globals["__name__"]
    name = next((name for name, part in network.named_modules() if part is layer), None)
    calls = [f.f_locals for f in inside if f.f_code.co_name == "_call_impl" and f.f_locals["self"] is layer]
    torchs = home.startswith("torch.nn.") or (home.startswith("dissensus.surgery.") and isinstance(error, RuntimeError))
    if (
        name is None
        or not calls
        or not torchs
        or type(error) not in (RuntimeError, ValueError, IndexError, AssertionError)
    ):
        return None
    given = batches.tensors((*calls[-1]["args"], *calls[-1]["kwargs"].values()))
    last = bool(given) and given[0].ndim > 2 and given[0].shape[-1] == getattr(layer, "in_channels", None)
    shapes = [", ".join(str(tuple(tensor.shape)) for tensor in each) for each in (batches.tensors(x), given)]
    where = f"layer '{name}'" if name else "the network"
    what = type(layer).__name__ if next(layer.children(), None) else str(layer)
    advice = (
        "channels come before height and width: pass x.movedim(-1, 1)" if last else "change the inputs or that layer"
    )
    return ValueError(
        f"expected inputs that the network can take, got {shapes[0]}: {where}, {what}, was given {shapes[1]} and said: "
        f"{first_line(error)}; {advice}"
    )


def check_loader(*loaders: Iterable[Any] | None) -> None:
    """Raises where a loader is a Dataset of single examples; a Dataset of whole batches is fine."""
    for loader in loaders:
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset) and not _gives_batches(loader):
            raise TypeError(
                f"expected a loader of batches, got {type(loader).__name__}, a Dataset of single examples; pass "
                "DataLoader(dataset, batch_size=...) or ds.data.Batches(x, y, batch_size=...)"
            )


def _gives_batches(dataset: Dataset[Any]) -> bool:
    try:
        x, y, *_ = dataset[0]
        return isinstance(y, Tensor) and y.ndim > 0 and len(y) == batches.size(x)
    except (TypeError, ValueError):
        return False
    except (IndexError, KeyError):  # empty, or not numbered from 0: left to the loop that reads it
        return True
