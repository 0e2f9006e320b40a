"""Turns: a lock per network, so that only one thread at a time runs it.

A member runs by putting its tensors into a template and changing its modes, hooks and forwards meanwhile: two threads in one
template would see each other's weights. So every run of a network takes that network's lock. Locks are stored outside the
networks, since a lock can be neither copied nor pickled; a thread that holds one may take it again.
"""

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from dissensus.kernels.cpu_products import is_on_arm
from dissensus.utils.tensor_tree import all_submodules

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
        # On Arm small products switch oneDNN off (`core.products`), which would change what other networks compute.
        self.locks_process = is_on_arm() or has_attention(network)

    def __enter__(self) -> None:
        if self.locks_process:
            PROCESS.acquire()
        self.lock.acquire()
        if self.trainer not in (None, threading.get_ident()):
            self.__exit__()
            raise ValueError("expected a network that no other thread is training, got one in fit; wait, or use a copy")

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.lock.release()
        if self.locks_process:
            PROCESS.release()


_turns: dict[int, _NetworkLock] = {}  # by id of the network, until it is deleted
_making = threading.Lock()


def _lock_of(network: nn.Module) -> _NetworkLock:
    found = _turns.get(id(network))
    if found is None:
        with _making:
            found = _turns.get(id(network))
            if found is None:
                found = _NetworkLock(network)
                _turns[id(network)] = found
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
