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
from torch._C._distributed_c10d import Store

log = logging.getLogger("dissensus")

STATUS = 70  # of a process that gives up waiting; torchrun then starts all of them again
WAITING = (os.path.dirname(distributed.__file__), os.path.dirname(__file__))  # whose code waits for other ranks


class Sign(NamedTuple):
    """A sign of life: its number, whether the rank waits for others, and the line that its main thread is at."""

    beat: int
    waits: bool
    line: str
    host: str


class Watch:
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
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dissensus watch", daemon=True)

    def __enter__(self) -> Self:
        self.store.set(
            f"sign {self.rank}", json.dumps(self._sign(0))
        )  # so that all know where it is, whatever happens next
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        beat, waited, before = 0, 0.0, self.progress()
        while not self.over.wait(self.pause):
            beat += 1
            sign, now = self._sign(beat), self.progress()
            self.store.set(f"sign {self.rank}", json.dumps(sign))
            waited = waited + self.pause if sign.waits and now == before else 0.0
            before = now
            if waited > self.seconds:
                waited = 0.0
                self._judge(beat)

    def _sign(self, beat: int) -> Sign:
        frame = sys._current_frames().get(self.main)
        line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        waits = False
        while frame is not None and not waits:
            waits, frame = frame.f_code.co_filename.startswith(WAITING), frame.f_back
        return Sign(beat, waits, line, self.host)

    def _signs(self) -> list[Sign | None]:
        keys = [f"sign {rank}" for rank in range(self.size)]
        return [Sign(*json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]

    def _judge(self, beat: int) -> None:
        """Names the ranks that hang, and ends the process unless it has gone on meanwhile."""
        first, before = self._signs(), self.progress()
        for more in range(1, 4):  # others must have had the time for a sign
            if self.over.wait(self.pause):
                return
            self.store.set(f"sign {self.rank}", json.dumps(self._sign(beat + more)))
        signs = self._signs()
        if self.progress() != before:
            return
        silent = [rank for rank, sign in enumerate(signs) if sign is None or sign == first[rank]]
        hanging = silent or [rank for rank, sign in enumerate(signs) if sign is not None and not sign.waits]
        speaker = next((rank for rank in range(self.size) if rank not in hanging), self.rank)
        if self.rank == speaker:
            log.critical("%s", self._word(signs, silent, hanging))
        else:
            self.over.wait(3 * self.pause)  # for it to be heard before torchrun ends all
        os._exit(STATUS)

    def _word(self, signs: list[Sign | None], silent: list[int], hanging: list[int]) -> str:
        def shown(rank: int) -> str:
            sign = signs[rank]
            return f"rank {rank}" if sign is None else f"rank {rank} on {sign.host}, at {sign.line}"

        each = "; ".join(shown(rank) for rank in (hanging or range(self.size)))
        what = "gives no sign of life" if silent else "does not join the others"
        return f"after {self.seconds:g} s of waiting: {f'{what}: {each}' if hanging else f'all wait for each other: {each}'}"
