"""Interruptions of a training run: the scheduler ends it (SIGTERM; all ranks stop after the same step), or a rank hangs."""

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, ReduceOp, Store  # type: ignore[attr-defined]

from dissensus.distributed import init
from dissensus.distributed.mesh import Mesh
from dissensus.utils.process_group import run_collective
from dissensus.utils.torch_private import default_store, group_timeout

log = logging.getLogger("dissensus")

STATUS = 70  # of a process that gives up waiting; torchrun then starts all of them again
WAITING = (os.path.dirname(distributed.__file__), os.path.dirname(__file__))  # whose code waits for other ranks
# Steps between a rank's word and what comes of it: as long as that, ranks that exchange nothing else may drift apart.
SLACK = 8


class Interruptions:
    """Around training: SIGTERM only notes that the process should end: `should_stop` says when, `terminate` lets it act.

    Outside the main thread, where Python hears no signals, nothing is noted. On a mesh, a rank that hangs ends the others.
    """

    def __init__(
        self, mesh: Mesh | None = None, *, resumable: bool = True, group: distributed.ProcessGroup | None = None
    ) -> None:
        """`resumable`: False leaves the signal alone; `group`: of the ranks that stop together, None for those of the mesh."""
        self.mesh, self.resumable = mesh, resumable
        self.handles_signal = resumable and threading.current_thread() is threading.main_thread()
        self.group = init.host_group() if mesh is not None and resumable else group
        self.is_requested = self.is_agreed = False
        self.pending_flags: deque[tuple[Tensor, distributed.Work]] = deque()
        self._inside = ExitStack()

    def __enter__(self) -> Self:
        if self.handles_signal:
            previous = signal.signal(signal.SIGTERM, self._note_signal)
            self._inside.callback(signal.signal, signal.SIGTERM, previous)
        if self.mesh is not None:
            axes, limit = (self.mesh.members, self.mesh.data), group_timeout(distributed.group.WORLD)
            self._inside.enter_context(HangDetector(
                PrefixStore("dissensus", default_store()), distributed.get_rank(), self.mesh.size,
                seconds=0.8 * limit.total_seconds(),  # before the collective itself fails, which names no line
                progress=lambda: [sum(axis.bytes_sent.values()) for axis in axes],
            ))  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True

    def should_stop(self) -> bool:
        """Whether to stop now, the same on all ranks; to be called by each of them after every step."""
        if self.group is None:
            return self.is_requested
        word = torch.tensor(int(self.is_requested), dtype=torch.int32)
        # Not waited for: the answer of some steps ago is there already.
        work = run_collective(distributed.all_reduce, word, op=ReduceOp.MAX, group=self.group, async_op=True)
        self.pending_flags.append((word, work))
        if len(self.pending_flags) > SLACK:
            word, work = self.pending_flags.popleft()
            work.wait()
            self.is_agreed = self.is_agreed or bool(word)
        return self.is_agreed

    def terminate(self) -> NoReturn:
        """Does what SIGTERM would have done, and ends the process in any case."""
        self._inside.close()
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM)


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
        self._send_heartbeat(0)  # so that all know where it is, whatever happens next
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_event.set()
        self.thread.join()

    def _watch_ranks(self) -> None:
        beat, waited, before = 0, 0.0, self.progress()
        while not self.stop_event.wait(self.pause):
            beat += 1
            sign, now = self._send_heartbeat(beat), self.progress()
            waited = waited + self.pause if sign.is_waiting and now == before else 0.0
            before = now
            if waited > self.seconds:
                waited = 0.0
                self._report_hang(beat)

    def _send_heartbeat(self, beat: int) -> Heartbeat:
        frame = sys._current_frames().get(self.main)
        line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        waits = False
        while frame is not None and not waits:
            waits, frame = frame.f_code.co_filename.startswith(WAITING), frame.f_back
        sign = Heartbeat(beat, waits, line, self.host)
        self.store.set(f"sign {self.rank}", json.dumps(sign))
        return sign

    def _read_heartbeats(self) -> list[Heartbeat | None]:
        keys = [f"sign {rank}" for rank in range(self.size)]
        return [Heartbeat(*json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]

    def _report_hang(self, beat: int) -> None:
        """Names the ranks that hang, and ends the process unless it has gone on meanwhile."""
        first, before = self._read_heartbeats(), self.progress()
        for more in range(1, 4):  # others must have had the time for a sign
            if self.stop_event.wait(self.pause):
                return
            self._send_heartbeat(beat + more)
        signs = self._read_heartbeats()
        if self.progress() != before:
            return
        silent = [rank for rank, sign in enumerate(signs) if sign is None or sign == first[rank]]
        hanging = silent or [rank for rank, sign in enumerate(signs) if sign is not None and not sign.is_waiting]
        speaker = next((rank for rank in range(self.size) if rank not in hanging), self.rank)
        if self.rank == speaker:
            places = ["" if sign is None else f" on {sign.host}, at {sign.line}" for sign in signs]
            each = "; ".join(f"rank {rank}{places[rank]}" for rank in (hanging or range(self.size)))
            one = "gives no sign of life" if silent else "does not join the others"
            what = one if hanging else "all wait for each other"
            log.critical("after %g s of waiting: %s: %s", self.seconds, what, each)
        else:
            self.stop_event.wait(3 * self.pause)  # for it to be heard before torchrun ends all
        os._exit(STATUS)
