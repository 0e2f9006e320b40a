"""Finds ranks that hang: each rank reports its activity in the group's store, and checks the others if it waits too long."""

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple, Self

from torch import distributed
from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("dissensus")

STATUS = 70  # of a process that gives up waiting; torchrun then starts all of them again
WAITING = (os.path.dirname(distributed.__file__), os.path.dirname(__file__))  # whose code waits for other ranks


class Heartbeat(NamedTuple):
    """A sign of life: its number, whether the rank waits for others, and the line that its main thread is at."""

    beat: int
    is_waiting: bool
    line: str
    host: str


class HangDetector:
    """A thread beside training. Where this rank waits longer than the limit, ranks that hang are named and it ends.

    A rank hangs that gives no more signs of life (its process stands still, its machine is gone) or, where all do, that
    does not wait for others itself. The process ends because nothing else leaves a collective that waits. Those of NCCL
    wait on the GPU, out of sight: there torch's own watchdog ends the process.
    """

    def __init__(self, store: Store, rank: int, size: int, *, seconds: float, progress: Callable[[], object]) -> None:
        """`progress`: something that changes whenever an exchange begins."""
        self.store, self.rank, self.size = store, rank, size
        self.seconds, self.progress = seconds, progress
        self.host = socket.gethostname()
        self.main = threading.get_ident()
        self.pause = min(1.0, seconds / 5)
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self._watch_ranks, name="dissensus watch", daemon=True)

    def __enter__(self) -> Self:
        # so that all know where it is, whatever happens next
        self.store.set(f"sign {self.rank}", json.dumps(self._make_heartbeat(0)))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_event.set()
        self.thread.join()

    def _watch_ranks(self) -> None:
        beat, waited, before = 0, 0.0, self.progress()
        while not self.stop_event.wait(self.pause):
            beat += 1
            sign, now = self._make_heartbeat(beat), self.progress()
            self.store.set(f"sign {self.rank}", json.dumps(sign))
            waited = waited + self.pause if sign.is_waiting and now == before else 0.0
            before = now
            if waited > self.seconds:
                waited = 0.0
                self._report_hang(beat)

    def _make_heartbeat(self, beat: int) -> Heartbeat:
        frame = sys._current_frames().get(self.main)
        line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        waits = False
        while frame is not None and not waits:
            waits, frame = frame.f_code.co_filename.startswith(WAITING), frame.f_back
        return Heartbeat(beat, waits, line, self.host)

    def _read_heartbeats(self) -> list[Heartbeat | None]:
        keys = [f"sign {rank}" for rank in range(self.size)]
        return [Heartbeat(*json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]

    def _report_hang(self, beat: int) -> None:
        """Names the ranks that hang, and ends the process unless it has gone on meanwhile."""
        first, before = self._read_heartbeats(), self.progress()
        for more in range(1, 4):  # others must have had the time for a sign
            if self.stop_event.wait(self.pause):
                return
            self.store.set(f"sign {self.rank}", json.dumps(self._make_heartbeat(beat + more)))
        signs = self._read_heartbeats()
        if self.progress() != before:
            return
        silent = [rank for rank, sign in enumerate(signs) if sign is None or sign == first[rank]]
        hanging = silent or [rank for rank, sign in enumerate(signs) if sign is not None and not sign.is_waiting]
        speaker = next((rank for rank in range(self.size) if rank not in hanging), self.rank)
        if self.rank == speaker:
            log.critical("%s", self._hang_message(signs, silent, hanging))
        else:
            self.stop_event.wait(3 * self.pause)  # for it to be heard before torchrun ends all
        os._exit(STATUS)

    def _hang_message(self, signs: list[Heartbeat | None], silent: list[int], hanging: list[int]) -> str:
        def describe_rank(rank: int) -> str:
            sign = signs[rank]
            return f"rank {rank}" if sign is None else f"rank {rank} on {sign.host}, at {sign.line}"

        each = "; ".join(describe_rank(rank) for rank in (hanging or range(self.size)))
        what = "gives no sign of life" if silent else "does not join the others"
        return f"after {self.seconds:g} s of waiting: {f'{what}: {each}' if hanging else f'all wait for each other: {each}'}"
