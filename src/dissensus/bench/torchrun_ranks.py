"""A bench in several processes started by `torchrun`: which runs each process trains, and which process writes and prints.

With at least as many trainings as processes, each process trains whole runs alone; results equal those of one process, bit for
bit. With fewer trainings, all processes share each run: they train it on a mesh and evaluate its batches in turns, and the
first process writes. In both cases only the first process prints and writes the report.
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

from dissensus.utils.process_group import is_connected, run_collective, world_size

Item = TypeVar("Item")
size = world_size

LONGEST = timedelta(days=30)  # longest wait for other processes' runs
SECONDS = 5.0  # wait for the first process to report an error that all processes have


def connect() -> None:
    """Connects the processes that `torchrun` started; does nothing for one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from dissensus.distributed import start  # imported here, because it is slow and one process does not need it

        start()


def rank() -> int:
    return distributed.get_rank() if is_connected() else 0


def is_training_shared(trainings: int) -> bool:
    """Whether all processes share each training, given the number of trainings."""
    return 1 < size() > trainings


def groups_of_this_rank(groups: Sequence[Item]) -> Sequence[Item]:
    """The groups that this process trains alone."""
    return groups[rank() :: size()]


def mesh() -> Any:
    """The mesh of all processes; None for one process."""
    return _mesh(distributed.group.WORLD) if size() > 1 else None


def wait() -> None:
    """Waits for all processes, however long their runs take."""
    if size() > 1:
        run_collective(distributed.barrier, group=_patient_group(distributed.group.WORLD))


@contextmanager
def print_on_first_rank() -> Iterator[None]:
    """Context in which only the first process prints and logs."""
    if rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def failure_message(text: str) -> str:
    """The message of a failing process, with its rank; other ranks wait first, so that rank 0 can report a common error."""
    if rank() == 0:
        return text
    time.sleep(SECONDS)
    return f"{text} (rank {rank()})"


def exit_other_ranks() -> None:
    """Ends all processes except the first, which writes the report of all runs."""
    wait()
    if rank():
        sys.exit(0)


@cache
def _mesh(world: Any) -> Any:
    from dissensus.distributed import mesh

    return mesh()


@cache
def _patient_group(world: Any) -> Any:
    return distributed.new_group(backend="gloo", timeout=LONGEST)
