"""Running members: one function over rows of tensors by a loop or by vmap, and the one fallback from a way that fails."""

import logging
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from dissensus.core.modes import plain_attention
from dissensus.core.turns import has_attention
from dissensus.numerics.randomness import random_state
from dissensus.numerics.tree import Tensors

log = logging.getLogger("dissensus")

How = Literal["loop", "vectorised"]
Lane = Callable[[int], AbstractContextManager[object]]  # the context (a CUDA stream) that member i runs in


class Rows(NamedTuple):
    """Tensors with the member axis first: parameters, buffers and whatever else differs between functions."""

    own: Tensors
    buffers: Tensors
    varying: Tensors

    def at(self, index: int) -> "Rows":
        """One member's row."""
        return Rows(*({name: tensor[index] for name, tensor in part.items()} for part in self))

    def repeated(self, members: int, samples: int) -> "Rows":
        """Each of M rows S times, side by side: (M·S, ...); with an index, so that vmap has an axis even if nothing is own."""
        if samples == 1:
            return self
        parts = [{name: t.repeat_interleave(samples, dim=0) for name, t in part.items()} for part in self]
        return Rows(*parts)._replace(varying={**parts[2], "": torch.arange(members * samples)})


def loop(
    one: Callable[[Rows], Any],
    rows: Rows,
    count: int,
    lane: Lane = lambda _: nullcontext(),
    join: Callable[[], None] = lambda: None,
) -> Any:
    """one(row) of each row in turn, results stacked along a new first axis. Row i runs in lane(i); join() waits for all."""
    results = []
    for i in range(count):
        with lane(i):
            results.append(one(rows.at(i)))
    join()
    structure = pytree.tree_structure(results[0])
    columns = zip(*(pytree.tree_leaves(result) for result in results), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in columns], structure)


def averaged(values: Tensor) -> Tensor:
    """The mean over the first axis: exact where all values are equal; of integers the first one."""
    if not values.is_floating_point() or len(values) == 1:
        return values[0]
    return values[0] + (values - values[0]).mean(0)


class Attempt:
    """A context for a way to run members that may fail: a failure ends the block, is kept, and random numbers are put back.

        with Attempt() as attempt:
            return one_way()
        return another()  # raises the caller's own error if it was one

    vmap and the compiler can fail in many ways, none of which must end a training run; running out of memory does.
    """

    failed = ""  # the reason

    def __enter__(self) -> "Attempt":
        self.restore = random_state()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
            return False
        self.restore()
        self.failed = first_line(error)
        return True


def first_line(error: Exception) -> str:
    """What an error says first, for the log."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


class Runner:
    """How the members of one template run: all at once by vmap, or one after the other from the first failure on.

    `own`: the ids of the template's tensors that each member has for itself. This one works everywhere; the engine puts a
    faster one in its place (`replace_runner`), which gives the same results.
    """

    how: How = "vectorised"
    recomputes: bool | None = (
        None  # whether activations are computed again in the backward pass; None until it was looked at
    )

    def __init__(self, template: nn.Module, own: Set[int]) -> None:
        self.attention = has_attention(template)

    def running(self) -> AbstractContextManager[object]:
        """The context of every run of members and of everything that finds their gradients."""
        return nullcontext()

    def vectorising(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of vmap over members: layers in forms that vmap can handle."""
        return plain_attention(self.attention)

    def one_by_one(self, one: Callable[[Rows], Any], rows: Rows, count: int) -> Any:
        """one(row) of each row in turn."""
        return loop(one, rows, count)

    def run(
        self, one: Callable[[Rows], Any], rows: Rows, count: int, *, device: torch.device, how: How | None = None
    ) -> Any:
        """one(row) of each of `count` rows, stacked: by vmap or by the loop, falling back to the loop where vmap cannot."""
        if (how or self.how) == "loop" or count == 1:
            return self.one_by_one(one, rows, count)
        with Attempt() as attempt, self.vectorising(device):
            return torch.func.vmap(one, randomness="different")(rows)
        result = loop(one, rows, count)
        self.note_fallback(attempt.failed)
        return result

    def differentiate(self, run: Callable[[], Any], in_place: Callable[[], tuple[Any, Tensors]]) -> Any:
        """A member's gradients: run(), or in_place(), which gives what checkpoints run on and change, its buffers, as well."""
        if self.recomputes is False:
            with suppress(RuntimeError):
                return run()
        try:
            found, buffers = in_place()
        except CheckpointError as error:
            where = "in the backward pass, got others there; leave activation checkpointing out"
            raise ValueError(f"expected activations that can be computed again {where}") from error
        self.recomputes = self.recomputes is not None or any(buffer._version for buffer in buffers.values())
        return found

    def note_fallback(self, reason: str) -> None:
        """Runs members one after the other from now on, and logs why, once."""
        if self.how == "loop":
            return
        self.how = "loop"
        log.info("members run one after the other: this network cannot be vectorised (%s)", reason)


_kind: type[Runner] = Runner


def replace_runner(kind: type[Runner]) -> type[Runner]:
    """The kind of runner used until now; from now on new particles get this kind."""
    global _kind
    before, _kind = _kind, kind
    return before


def runner(template: nn.Module, own: Set[int]) -> Runner:
    """A runner for the members of this template."""
    return _kind(template, own)
