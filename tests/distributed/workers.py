"""Processes that stay up: `Workers.run` calls a function in 2 or 4 of them, joined in a gloo group made for that call.

They come from a server that has imported torch and the library once, since a start from nothing takes seconds.

    from workers import workers          # in a test file of this folder
    found = workers().run(2, function, argument)     # [what rank 0 returned, what rank 1 returned]

Functions go by name: they stand at the top of a module that the processes can import. Each call begins with the random
state of seed 0, and what it returns is sent as torch saves it.
"""

import atexit
import functools
import importlib
import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

HERE = Path(__file__).parent
LONGEST = 120  # seconds that a call may take


class Workers:
    """Gloo processes, started when they are first needed."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="workers")
        self.calls = 0
        self.started: list[tuple[Any, Any]] = []  # (process, connection)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) of each of `size` ranks of one group. Raises with every failing rank's traceback."""
        while len(self.started) < size:
            self.started.append(_start(len(self.started)))
        self.calls += 1
        store = os.path.join(self.folder.name, f"store{self.calls}")
        for rank, (_, connection) in enumerate(self.started[:size]):
            connection.send((rank, size, store, function.__module__, function.__qualname__, _packed(args)))
        found, failed = [], []
        for rank, (_, connection) in enumerate(self.started[:size]):
            if not connection.poll(LONGEST):
                failed.append(f"rank {rank} gave no answer in {LONGEST} s")
                continue
            good, packed = connection.recv()
            (found if good else failed).append(_unpacked(packed) if good else f"rank {rank}:\n{packed}")
        if failed:
            self.close()  # others may still wait for a rank that failed
            raise RuntimeError("\n".join(failed))
        return found

    def close(self) -> None:
        for process, connection in self.started:
            connection.close()
            process.terminate()
            process.join()
        self.started = []


@functools.cache
def workers() -> Workers:
    """The processes of this test session."""
    made = Workers()
    atexit.register(made.close)
    return made


def said(function: Callable[..., Any], *args: Any, **keywords: Any) -> str:
    """What an error says."""
    try:
        function(*args, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _start(number: int) -> tuple[Any, Any]:
    context = multiprocessing.get_context("forkserver")
    # What every process would import by itself, torch's compiler among it, which its dispatch modes ask for.
    ours = ("dissensus.training.fit", "dissensus.methods", "test_contract")
    heavy = ("torch._dynamo", *(f"torch.distributed.{part}" for part in ("device_mesh", "checkpoint", "fsdp")), *ours)
    context.set_forkserver_preload(list(heavy))
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True, name=f"worker {number}")
    process.start()
    theirs.close()
    return process, mine


def _serve(connection: Any, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    while True:
        try:
            rank, size, store, module, name, packed = connection.recv()
        except (EOFError, OSError):
            return
        try:
            torch.manual_seed(0)
            distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
            )
            found = functools.reduce(getattr, name.split("."), importlib.import_module(module))(*_unpacked(packed))
            answer = True, _packed(found)
        except BaseException:
            answer = False, traceback.format_exc()
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
        connection.send(answer)


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)
