"""Joining the processes that torchrun has started, and checks before they work together."""

import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dissensus.utils.checks import number
from dissensus.utils.torch_private import default_store, group_timeout, set_group_timeout

MEETING = 300.0  # least seconds that processes wait for others to start, some of which load large files first
# What gloo says where another rank does not come, or has gone.
LOST = re.compile(r"timed out|timeout|closed by peer|reset by peer|broken pipe|socket closed", re.IGNORECASE)


def start(*, timeout: float = 1800.0) -> bool:
    """Connects the processes that `torchrun` has started; returns whether there are several. Does nothing for one process.

    After a restart (`torchrun --max-restarts`) processes use new keys, so entries of killed processes are not read. Each
    process takes the GPU of its local rank; collectives use NCCL on GPUs and gloo on CPUs.

    Args:
        timeout: seconds that a rank waits for others before it names those that are missing: `fit` then ends the process,
            other functions raise `MissingRankError`.
    """
    number("timeout", timeout, above=0)
    if is_connected() or int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        return is_connected() and distributed.get_world_size() > 1
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=max(timeout, MEETING))
    plain, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    # torchrun keeps one store for all attempts, with addresses of processes that are no more.
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", plain)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    set_group_timeout(distributed.group.WORLD, timedelta(seconds=timeout))  # all have met
    return bool(size > 1)


def is_connected() -> bool:
    """Whether this process is in a group."""
    return distributed.is_available() and distributed.is_initialized()


def host_group() -> distributed.ProcessGroup:
    """A group of all ranks for tensors on the host; to be called by all of them."""
    if "gloo" in str(distributed.get_backend()):
        return distributed.group.WORLD  # type: ignore[return-value]
    return distributed.new_group(backend="gloo")  # type: ignore[no-any-return]


class MissingRankError(RuntimeError):
    """Other ranks did not come to an exchange; the message names them."""


def run_collective(collective: Callable[..., Any], *args: Any, group: Any = None, **keywords: Any) -> Any:
    """collective(*args, group=group, **keywords); raises `MissingRankError` if ranks of the group (None: all) stay away."""
    try:
        return collective(*args, group=group, **keywords)
    except RuntimeError as error:
        if not (lost := LOST.search(str(error))):
            raise
        group = group or distributed.group.WORLD
        limit = group_timeout(group).total_seconds()
        missing = _missing_ranks(group, seconds=min(max(limit / 10, 1.0), 30.0))
        got = f"no answer in {limit:g} s" if "time" in lost[0].lower() else "a closed connection"
        got += f" from rank {', '.join(map(str, missing))}" if missing else ", and all wait, in different calls"
        advice = "call fit, evaluate and the like on every rank, never inside `if mesh.is_first:`; or see its own error"
        raise MissingRankError(f"expected every rank in this exchange, got {got}; {advice}") from error


def _missing_ranks(group: Any, *, seconds: float) -> list[int]:
    """The ranks of the group, or else of all, that have not given up; `seconds`: for others to do so, which wait for them."""
    mine, ranks = distributed.get_rank(), distributed.get_process_group_ranks(group)
    missing, deadline = [*range(distributed.get_world_size())], time.time() + seconds
    with suppress(RuntimeError):  # the store may have gone with the rank that held it
        store = PrefixStore("gave up", default_store())
        store.set(str(mine), "")
        while len(missing := [rank for rank in missing if not store.check([str(rank)])]) > 1 and time.time() < deadline:
            time.sleep(0.05)
    return [rank for rank in ranks if rank in missing and rank != mine] or [rank for rank in missing if rank != mine]


def check_shared_folder(folder: Path, *, seconds: float = 10.0) -> None:
    """Raises, on all ranks, where one of them does not see what rank 0 writes into the folder, which is made if need be.

    `seconds`: how long to look, since network file systems show a new file late.
    """
    rank, name = distributed.get_rank(), [""]
    mark = folder / f".seen-{os.getpid()}-{time.time_ns()}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        name = [mark.name]
    try:
        run_collective(distributed.broadcast_object_list, name)
        deadline = time.monotonic() + seconds
        while not (seen := (folder / name[0]).exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        found: list[tuple[bool, str]] = [(False, "")] * distributed.get_world_size()
        run_collective(distributed.all_gather_object, found, (seen, socket.gethostname()))
    finally:
        if rank == 0:
            mark.unlink(missing_ok=True)
    if blind := [f"{number} ({host})" for number, (seen, host) in enumerate(found) if not seen]:
        got = f"{folder}, which rank {', '.join(blind)} does not share with rank 0"
        raise ValueError(f"expected a folder that all ranks share, got {got}; choose one that all machines mount")
