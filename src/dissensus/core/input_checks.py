"""Checks that a network accepts its inputs (dtype, batch axis), once per shape."""

import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.member_runner import first_line
from dissensus.core.particles import Particles

log = logging.getLogger("dissensus")

Forward = Callable[[Inputs], Tensor]


class KnownInputs:
    """Kinds of inputs (shapes without the batch axis, dtypes) that a network was tried with and accepts."""

    # the last single tensor's shape, dtypes and layout, and the shape of its outputs
    _same: tuple[tuple[Any, ...], torch.Size] | None = None

    def __init__(self) -> None:
        self.shapes: dict[tuple[Any, ...], torch.Size] = {}  # shapes of outputs, without the batch axis
        self.taken: set[tuple[Any, ...]] = set()
        self.last: tuple[Any, ...] | None = None  # shape and dtypes of the last tensor that was accepted
        self.doubted = False  # whether a warning about the outputs was logged

    def output_shape(self, x: Inputs, run: Forward, dtype: torch.dtype) -> torch.Size:
        """(B, ...) shape of run(x); run is called once per kind of x and dtype of the network."""
        exact = (x.shape, x.dtype, x.layout, dtype) if isinstance(x, Tensor) else None
        if exact is not None and self._same is not None and self._same[0] == exact:
            return self._same[1]
        key = _kind_of_inputs(x, dtype)
        if key not in self.shapes:
            self.shapes[key] = batched_outputs(run, x).shape[1:]
        found = torch.Size((batches.count_examples(x), *self.shapes[key]))
        self._same = None if exact is None else (exact, found)
        return found

    def warn_once(self, word: str | None) -> None:
        """Logs a warning about the outputs, once."""
        if word is not None and not self.doubted:
            log.warning("%s", word)
            self.doubted = True

    def check(self, x: Inputs, run: Forward, dtype: torch.dtype) -> None:
        """Raises if run fails on x. For a single tensor it tries only the first example, if the network accepts that."""
        last = (x.shape, x.dtype, dtype) if isinstance(x, Tensor) else None
        if last is not None and last == self.last:
            return
        key = _kind_of_inputs(x, dtype)
        if key not in self.taken and key not in self.shapes and batches.count_examples(x) > 0:
            if not isinstance(x, Tensor) or not _accepts_inputs(run, x[:1]):
                batched_outputs(run, x)
            self.taken.add(key)
        self.last = last


def _kind_of_inputs(x: Inputs, dtype: torch.dtype) -> tuple[Any, ...]:
    found: list[Any] = [dtype]
    for tensor in batches.input_tensors(x):
        found += tensor.shape[1:], tensor.dtype
    return tuple(found)


def batched_outputs(run: Forward, x: Inputs) -> Tensor:
    """(B, ...) run(x); raises if the batch axis is not first, as for a single example that some layers accept."""
    outputs, size = run(x), batches.count_examples(x)
    if outputs.ndim == 0 or outputs.shape[0] != size:
        got, hint = tuple(outputs.shape), "pass a single example as x[None]"
        raise ValueError(f"expected outputs with the batch axis first ({size}, ...), got {got}; {hint}")
    return outputs


def _accepts_inputs(run: Forward, x: Tensor) -> bool:
    try:
        return bool(batched_outputs(run, x).shape)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # batch norm without statistics, or a forward for a fixed batch size, may fail on one example
        return False


@contextmanager
def explain_input_errors(x: Inputs, particles: Particles) -> Iterator[None]:
    """Turns torch's error for a network run on x into one that names the layer and what to convert."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        clear = _layer_error(error, x, particles)
        if clear is None:
            raise
        raise clear from error


def _layer_error(error: Exception, x: Inputs, particles: Particles) -> ValueError | None:
    """The error with the layer that raised it and the shapes of its inputs; None if no layer raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    layer, home = inside[-1].f_locals["self"], inside[-1].f_globals["__name__"]
    name = next((name for name, part in particles.template.network.named_modules() if part is layer), None)
    calls = [f.f_locals for f in inside if f.f_code.co_name == "_call_impl" and f.f_locals["self"] is layer]
    torchs = home.startswith("torch.nn.") or (home.startswith("dissensus.layers.") and isinstance(error, RuntimeError))
    if name is None or not calls or not torchs or type(error) is NotImplementedError:
        return None
    given = batches.input_tensors((*calls[-1]["args"], *calls[-1]["kwargs"].values()))
    shapes = [", ".join(str(tuple(tensor.shape)) for tensor in each) for each in (batches.input_tensors(x), given)]
    where = f"layer '{name}'" if name else "the network"
    what = type(layer).__name__ if next(layer.children(), None) else str(layer)
    return ValueError(
        f"expected inputs that the network can take, got {shapes[0]}: {where}, {what}, got {shapes[1]} and raised: "
        f"{first_line(error)}; {_remedy(str(error), layer, given, particles)}"
    )


def _remedy(said: str, layer: nn.Module, given: list[Tensor], particles: Particles) -> str:
    if "indices" in said:
        return "pass x.long()"
    own = next((tensor.dtype for tensor in particles.parameters() if tensor.is_floating_point()), None)
    if re.search(r"dtype|scalar type|input type", said, re.IGNORECASE) and own is not None:
        floating = all(tensor.is_floating_point() for tensor in given)
        pixels = "convert the posterior with .to(x.dtype)" if floating else "divide pixels by 255 in its forward"
        return f"pass x.to({own}), or {pixels}"
    if given and given[0].ndim > 2 and given[0].shape[-1] == getattr(layer, "in_channels", None):
        return "channels must come before height and width: pass x.movedim(-1, 1)"
    return "change the inputs (pass a single example as x[None]) or that layer"
