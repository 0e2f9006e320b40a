"""The group of processes: its size, and the one way to exchange in it, where a rank that waits in vain names the missing."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import distributed

from dissensus.utils.torch_private import default_store, group_timeout

# What gloo says of a rank that does not come, or has gone
LOST = re.compile(r"timed out|timeout|closed by peer|reset by peer|broken pipe|socket closed", re.IGNORECASE)


def is_connected() -> bool:
    """Whether this process is in a group."""
    return distributed.is_available() and distributed.is_initialized()


def world_size() -> int:
    """The number of processes of the group; 1 without one."""
    return distributed.get_world_size() if is_connected() else 1


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
        missing = _missing_ranks(group, seconds=min(max(limit / 10, 2.0), 30.0))
        got = f"no answer in {limit:g} s" if "time" in lost[0].lower() else "a closed connection"
        got += f" from rank {', '.join(map(str, missing))}" if missing else ", and all wait, in different calls"
        advice = "call fit, evaluate and the like on every rank, never inside `if mesh.is_first:`; or see its own error"
        raise MissingRankError(f"expected every rank in this exchange, got {got}; {advice}") from error


def _missing_ranks(group: Any, *, seconds: float) -> list[int]:
    """The ranks of the group, or else of all, that have not given up; `seconds`: for others to do so, which wait for them."""
    mine, ranks = distributed.get_rank(), distributed.get_process_group_ranks(group)
    missing, deadline = [*range(world_size())], time.time() + seconds
    with suppress(RuntimeError):  # the store may have gone with the rank that held it
        store = distributed.PrefixStore("gave up", default_store())  # type: ignore[attr-defined]
        store.set(str(mine), "")
        while len(missing := [rank for rank in missing if not store.check([str(rank)])]) > 1 and time.time() < deadline:
            time.sleep(0.05)
    return [rank for rank in ranks if rank in missing and rank != mine] or [rank for rank in missing if rank != mine]
