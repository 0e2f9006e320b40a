"""Running members: one function over rows of tensors, by a loop or by vmap, with a fallback if vmap fails; a lock per network.

A member runs by putting its tensors into a template and changing its modes, hooks and forwards meanwhile: two threads in one
template would see each other's weights. So every run of a network takes that network's lock. Locks are stored outside the
networks, since a lock can be neither copied nor pickled; a thread that holds one may take it again.
"""

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from dissensus.kernels.cpu_products import StackedLinear, has_own_convolution, has_small_products, is_on_arm
from dissensus.numerics.randomness import save_random_state
from dissensus.utils.tensor_tree import OwnTensorsCache, Tensors, all_submodules
from dissensus.utils.torch_modes import plain_attention, set_attributes
from dissensus.utils.torch_private import TorchStateGuard, pytree, run_in_vmap, version_of, without_onednn

log = logging.getLogger("dissensus")

How = Literal["loop", "vectorised"]
# (lane, join): lane(i) is the context (a CUDA stream) that member i runs in, join() waits for all.
MemberLanes = tuple[Callable[[int], AbstractContextManager[object]], Callable[[], None]]
NOTHING: AbstractContextManager[None] = nullcontext()
ONE_LANE: MemberLanes = (lambda index: NOTHING, lambda: None)


class Rows(NamedTuple):
    """Tensors with the member axis first: parameters, buffers and whatever else differs between functions."""

    own: Tensors
    buffers: Tensors
    varying: Tensors

    def member_rows(self, count: int) -> list["Rows"]:
        """Each member's row."""
        return [Rows(*row) for row in cut_rows(self, count)]


def cut_rows(parts: Iterable[Tensors], count: int) -> list[list[Tensors]]:
    """The first rows of tensors (M, ...) by name, row after row: each has all parts."""
    # All at once: to index every tensor for every member takes as long as small layers.
    cut = [{n: t.unbind() if isinstance(t, Tensor) else t for n, t in part.items()} for part in parts]
    return [[{name: views[i] for name, views in part.items()} for part in cut] for i in range(count)]


def loop(one: Callable[[Rows], Any], rows: Iterable[Rows], lanes: MemberLanes = ONE_LANE) -> Any:
    """one(row) of each row in turn, results stacked along a new first axis."""
    results, (lane, join) = [], lanes
    for i, row in enumerate(rows):
        with lane(i):
            results.append(one(row))
    join()
    return stack_trees(results)


def run_by_vmap(one: Callable[[Rows], Any], rows: Rows, count: int) -> Any:
    """one(row) of all rows by vmap, results with a new first axis."""
    # What `torch.func.vmap` does, without its treatment of trees, which takes longer than a small network. Compilers
    # and exporters know only that one.
    if torch.compiler.is_compiling():
        return torch.func.vmap(one, randomness="different")(rows)
    return run_in_vmap(lambda *parts: one(Rows(*parts)), rows, count, map_trees)


def stack_trees(results: Sequence[Any]) -> Any:
    """Equal trees of tensors as one, its tensors stacked along a new first axis."""
    return map_trees(torch.stack, results)


def map_trees(function: Callable[[Any], Tensor], trees: Sequence[Any]) -> Any:
    """The tree of function([tensors that equal trees have at one place])."""
    # The trees that networks give without torch's pytree, which takes as long as a small layer.
    first = trees[0]
    if isinstance(first, Tensor):
        return function(trees)
    if type(first) is tuple:
        return tuple([map_trees(function, column) for column in zip(*trees, strict=True)])
    if type(first) is dict:
        return {name: map_trees(function, [each[name] for each in trees]) for name in first}
    return pytree.tree_map(lambda *column: function(column), *trees)


def first_axis_mean(values: Tensor) -> Tensor:
    """The mean over the first axis, exact if all values are equal; for integers the first value."""
    if not values.is_floating_point() or len(values) == 1:
        return values[0]
    return values[0] + (values - values[0]).mean(0)


class FallbackChain:
    """Named implementations of one function, fastest first: one that fails is dropped for the next, and `note` called."""

    # vmap and the compiler can fail in many ways, and no such failure may end a training run, except running out of
    # memory. The random state, and torch's own, are restored before the next attempt. If the last one fails, too, the
    # error is the caller's own: it is raised, and no implementation is dropped.

    def __init__(self, note: Callable[..., object] | str, **ways: Callable[..., Any]) -> None:
        """`note(name, reason, *args)`: called with the dropped one and the call's arguments; or a text with %s for the log."""
        self.note = note if callable(note) else lambda _, reason, *__: log.info(note, reason)
        self.implementations = ways

    @property
    def name(self) -> str:
        """Name of the implementation in use."""
        return next(iter(self.implementations))

    def __call__(self, *args: Any) -> Any:
        failed: dict[str, str] = {}
        *others, last = self.implementations
        for name in others:
            restore = save_random_state()
            try:
                with TorchStateGuard():
                    result = self.implementations[name](*args)
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                restore()
                failed[name] = first_line(error)
        else:
            result = self.implementations[last](*args)
        for name, reason in failed.items():
            del self.implementations[name]
            self.note(name, reason, *args)
        return result


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for the log."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


class Runner:
    """How the members of one template run: all at once by vmap, or, once vmap has failed, one after the other.

    `own`: ids of the template's tensors that each member has for itself. Networks with own convolutions run one after the
    other, own linear layers are stacked, and small products avoid oneDNN.
    """

    # Whether activations are recomputed in the backward pass; None if not yet known.
    recomputes: bool | None = None

    def __init__(self, template: nn.Module, own: Set[int]) -> None:
        self.how: How = "loop" if has_own_convolution(template, own) else "vectorised"
        self.attention = has_attention(template)
        self.linear = StackedLinear(template, own=own)
        self.small_products = has_small_products(template)
        self.lanes: tuple[int, MemberLanes] | None = None  # in use by the thread of this id
        self.own_tensors = OwnTensorsCache()
        self.plans: dict[Any, Any] = {}  # the fastest plans found for training, by request

    def run_context(self) -> AbstractContextManager[object]:
        """The context in which members run and their gradients are computed."""
        return without_onednn() if self.small_products else NOTHING

    @contextmanager
    def vmap_context(self, device: torch.device) -> Iterator[None]:
        """The context of vmap over members: layers take forms that vmap supports and that are fast."""
        with plain_attention() if self.attention else nullcontext(), self.linear.use_stacked_forwards(device):
            yield

    def use_lanes(self, lanes: MemberLanes) -> AbstractContextManager[None]:
        """Inside, members of a loop run in these lanes."""
        return set_attributes(self, lanes=(threading.get_ident(), lanes))

    def run(
        self, one: Callable[[Rows], Any], rows: Rows, count: int, *, device: torch.device, how: How | None = None
    ) -> Any:
        """one(row) for each of `count` rows, stacked, by vmap, or by a loop if vmap fails."""
        if (how or self.how) == "loop" or count == 1:
            owner, lanes = self.lanes or (None, ONE_LANE)
            return loop(one, rows.member_rows(count), lanes if owner == threading.get_ident() else ONE_LANE)

        def run_vectorised() -> Any:
            with self.vmap_context(device):
                return run_by_vmap(one, rows, count)

        return FallbackChain(
            self.note_fallback, vectorised=run_vectorised, loop=lambda: loop(one, rows.member_rows(count))
        )()

    def differentiate(self, run: Callable[[], Any], in_place: Callable[[], tuple[Any, Tensors]]) -> Any:
        """A member's gradients by run(), or, with activation checkpointing, by in_place(), which also returns buffers."""
        if self.recomputes is False:
            with suppress(RuntimeError):
                return run()
        try:
            found, buffers = in_place()
        except CheckpointError as error:
            where = "in the backward pass, got other values; remove activation checkpointing"
            raise ValueError(f"expected activations that can be recomputed {where}") from error
        self.recomputes = self.recomputes is not None or any(version_of(buffer) for buffer in buffers.values())
        return found

    def note_fallback(self, _: str, reason: str, *args: object) -> None:
        """Runs members one after the other from now on, and logs why, once."""
        if self.how == "vectorised":
            self.how = "loop"
            log.info("members run one after the other: this network cannot be vectorised (%s)", reason)


# The lock for torch's global state: backend switches, and the capture of CUDA graphs. A thread that needs this lock and a
# network's takes this one first, except for a capture, since no other run waits for its network.
PROCESS = threading.RLock()

ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def has_attention(network: nn.Module) -> bool:
    """Whether the network contains torch's attention, whose inference fast path is switched for the whole process."""
    return any(isinstance(part, ATTENTION) for part in all_submodules(network))


class _NetworkLock:
    """One network's lock, and the thread that trains it, if one does."""

    def __init__(self, network: nn.Module) -> None:
        self.lock = threading.RLock()
        self.trainer: int | None = None
        # On Arm small products switch oneDNN off (`kernels/cpu_products.py`), which would change what other networks compute.
        self.locks_process = is_on_arm() or has_attention(network)

    def __enter__(self) -> None:
        if self.locks_process:
            PROCESS.acquire()
        self.lock.acquire()
        if self.trainer not in (None, threading.get_ident()):
            self.__exit__()
            raise ValueError("expected a network that no other thread is training, got one in fit; wait, or use a copy")

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if self.locks_process:
            PROCESS.release()


_turns: dict[int, _NetworkLock] = {}  # by id of the network, until it is deleted
_making = threading.Lock()


def _lock_of(network: nn.Module) -> _NetworkLock:
    with _making:
        if (found := _turns.get(id(network))) is None:
            found = _turns[id(network)] = _NetworkLock(network)
            weakref.finalize(network, _turns.pop, id(network), None).atexit = False
    return found


def network_lock(network: nn.Module) -> AbstractContextManager[object]:
    """Locks the network against other threads. In compiled code it does nothing: the caller holds the lock."""
    return nullcontext() if torch.compiler.is_dynamo_compiling() else _turns.get(id(network)) or _lock_of(network)


Module = TypeVar("Module", bound=nn.Module)


def locked_deepcopy(module: Module, memo: dict[int, Any], network: nn.Module) -> Module:
    """`copy.deepcopy` of a module that runs this network, but not while another thread runs it."""
    with network_lock(network):
        made = type(module).__new__(type(module))
        memo[id(module)] = made
        made.__setstate__(copy.deepcopy(module.__dict__, memo))  # type: ignore[no-untyped-call]
    return made


@contextmanager
def lock_for_training(network: nn.Module) -> Iterator[None]:
    """Inside, using the network in another thread raises: between two steps it would see half-trained weights."""
    mine = _lock_of(network)
    with mine:
        before, mine.trainer = mine.trainer, threading.get_ident()
    try:
        yield
    finally:
        mine.trainer = before
