"""Running members: one function over rows of tensors by a loop or by vmap, and the one fallback from a way that fails."""

import logging
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from dissensus.core.modes import plain_attention
from dissensus.core.products import small_products, without_onednn
from dissensus.core.stacking import StackedLinear, has_own_convolution
from dissensus.core.turns import has_attention
from dissensus.numerics.randomness import random_state
from dissensus.numerics.tree import Tensors

log = logging.getLogger("dissensus")

How = Literal["loop", "vectorised"]
# (lane, join): lane(i) is the context (a CUDA stream) that member i runs in, join() waits for all.
MemberLanes = tuple[Callable[[int], AbstractContextManager[object]], Callable[[], None]]
ONE_LANE: MemberLanes = (lambda index: nullcontext(), lambda: None)


class Rows(NamedTuple):
    """Tensors with the member axis first: parameters, buffers and whatever else differs between functions."""

    own: Tensors
    buffers: Tensors
    varying: Tensors

    def at(self, index: int) -> "Rows":
        """One member's row."""
        return Rows(*({name: tensor[index] for name, tensor in part.items()} for part in self))


def loop(one: Callable[[Rows], Any], rows: Rows, count: int, lanes: MemberLanes = ONE_LANE) -> Any:
    """one(row) of each row in turn, results stacked along a new first axis."""
    results, (lane, join) = [], lanes
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


class Ways:
    """Ways to do one thing by name, the fastest first: one that fails is given up for the next, and `note` called with why.

    vmap and the compiler can fail in many ways, none of which must end a training run; running out of memory does. Random
    numbers are put back before the next way. The last one raises the caller's own error, if it was one: then none is given up.
    """

    def __init__(self, note: Callable[..., object], **ways: Callable[..., Any]) -> None:
        """`note(name, reason, *args)`: called with what was given up, why, and the arguments of the call."""
        self.note = note
        self.ways = ways

    @property
    def name(self) -> str:
        """The way that is taken now."""
        return next(iter(self.ways))

    def __call__(self, *args: Any) -> Any:
        failed: dict[str, str] = {}
        *others, last = self.ways
        for name in others:
            restore = random_state()
            try:
                result = self.ways[name](*args)
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                restore()
                failed[name] = first_line(error)
        else:
            result = self.ways[last](*args)
        for name, reason in failed.items():
            del self.ways[name]
            self.note(name, reason, *args)
        return result


def first_line(error: Exception) -> str:
    """What an error says first, for the log."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


class Runner:
    """How the members of one template run: all at once by vmap, or one after the other, from the first failure of vmap on.

    `own`: the ids of the template's tensors that each member has for itself. Networks with own convolutions run one after
    the other, own linear layers are stacked, and small products pass oneDNN by.
    """

    # Whether activations are computed again in the backward pass; None until it was looked at.
    recomputes: bool | None = None

    def __init__(self, template: nn.Module, own: Set[int]) -> None:
        self.how: How = "loop" if has_own_convolution(template, own) else "vectorised"
        self.attention = has_attention(template)
        self.linear = StackedLinear(template, own=own)
        self.small_products = small_products(template)
        self.lanes: tuple[int, MemberLanes] | None = None  # in use by the thread of this id
        self.plans: dict[Any, Any] = {}  # how training was found to be fastest, by what it was asked for

    def running(self) -> AbstractContextManager[object]:
        """The context of every run of members and of everything that finds their gradients."""
        return without_onednn(self.small_products)

    @contextmanager
    def vectorising(self, device: torch.device) -> Iterator[None]:
        """The context of vmap over members: layers in forms that vmap can handle and that are fast."""
        with plain_attention(self.attention), self.linear.on(device):
            yield

    @contextmanager
    def in_lanes(self, lanes: MemberLanes) -> Iterator[None]:
        """Inside, members of a loop run in these lanes."""
        self.lanes = (threading.get_ident(), lanes)
        try:
            yield
        finally:
            self.lanes = None

    def run(
        self, one: Callable[[Rows], Any], rows: Rows, count: int, *, device: torch.device, how: How | None = None
    ) -> Any:
        """one(row) of each of `count` rows, stacked: by vmap or by the loop, falling back to the loop where vmap cannot."""
        if (how or self.how) == "loop" or count == 1:
            owner, lanes = self.lanes or (None, ONE_LANE)
            return loop(one, rows, count, lanes if owner == threading.get_ident() else ONE_LANE)

        def at_once() -> Any:
            with self.vectorising(device):
                return torch.func.vmap(one, randomness="different")(rows)

        return Ways(self.note_fallback, vectorised=at_once, loop=lambda: loop(one, rows, count))()

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

    def note_fallback(self, _: str, reason: str, *args: object) -> None:
        """Runs members one after the other from now on, and logs why, once."""
        if self.how == "vectorised":
            self.how = "loop"
            log.info("members run one after the other: this network cannot be vectorised (%s)", reason)
