"""Processes that `torchrun` started a bench in: which runs each trains, and who writes and prints.

With at least as many trainings as processes each trains whole runs by itself, and runs are what they are on one process, bit
for bit. With fewer, all processes share each run: they train it on a mesh and evaluate its batches in turns, and the first one
writes. In both cases the first one alone prints, and writes the report.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from torch import distributed

Item = TypeVar("Item")

LONGEST = timedelta(days=30)  # that processes wait for others' runs
SECONDS = 5.0  # in which the first process may say what is wrong everywhere


def connect() -> None:
    """Joins the processes that `torchrun` started; of one process nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from dissensus.distributed import start  # only here: it takes time that one process need not spend

        start()


def rank() -> int:
    return distributed.get_rank() if _connected() else 0


def size() -> int:
    return distributed.get_world_size() if _connected() else 1


def shared(trainings: int) -> bool:
    """Whether all processes share each of so many trainings."""
    return 1 < size() > trainings


def dealt(groups: Sequence[Item]) -> Sequence[Item]:
    """Those that this process trains alone."""
    return groups[rank() :: size()]


def mesh() -> Any:
    """The mesh of all processes; None of one."""
    return _mesh(distributed.group.WORLD) if size() > 1 else None


def wait() -> None:
    """Until all processes are here, however long their runs take."""
    if size() > 1:
        distributed.barrier(_patient(distributed.group.WORLD))


@contextmanager
def only_the_first_prints() -> Iterator[None]:
    """Inside, other processes print nothing and log nothing."""
    if rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def failed(text: str) -> str:
    """What a failing process says, with its number; not the first only where that one does not say the same and ends all."""
    if rank() == 0:
        return text
    time.sleep(SECONDS)
    return f"{text} (rank {rank()})"


def leave_but_the_first() -> None:
    """Ends all processes but the first, which writes the report of what all have done."""
    wait()
    if rank():
        sys.exit(0)


def _connected() -> bool:
    return distributed.is_available() and distributed.is_initialized()


@cache
def _mesh(world: Any) -> Any:
    from dissensus.distributed import mesh

    return mesh()


@cache
def _patient(world: Any) -> Any:
    return distributed.new_group(backend="gloo", timeout=LONGEST)
