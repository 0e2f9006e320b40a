"""Joining the processes that torchrun has started, and checks before they work together."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dissensus.utils.checks import number
from dissensus.utils.process_group import is_connected, run_collective, world_size
from dissensus.utils.torch_private import set_group_timeout

MEETING = 300.0  # least seconds that processes wait for others to start, some of which load large files first


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
        return world_size() > 1
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


def host_group() -> distributed.ProcessGroup:
    """A group of all ranks for tensors on the host; to be called by all of them."""
    if "gloo" in str(distributed.get_backend()):
        return distributed.group.WORLD  # type: ignore[return-value]
    return distributed.new_group(backend="gloo")


def check_shared_folder(folder: Path, *, seconds: float = 10.0) -> None:
    """Raises, on all ranks, where one of them does not see what rank 0 writes into the folder, which is made if need be."""
    rank, name = distributed.get_rank(), [""]
    mark = folder / f".seen-{os.getpid()}-{time.time_ns()}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        name = [mark.name]
    try:
        run_collective(distributed.broadcast_object_list, name)
        deadline = time.monotonic() + seconds  # network file systems show a new file late
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
