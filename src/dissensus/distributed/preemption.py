"""Interruptions of a training run: the scheduler ends it (SIGTERM; all ranks stop after the same step), or a rank hangs."""

import signal
import threading
from collections import deque
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn, Self

import torch
from torch import Tensor, distributed

from dissensus.distributed import init
from dissensus.distributed.hang_detector import HangDetector
from dissensus.distributed.mesh import Mesh

# Steps between a rank's word and what comes of it: as long as that, ranks that exchange nothing else may drift apart.
SLACK = 8


class Interruptions:
    """Around training: SIGTERM only notes that the process should end: `should_stop` says when, `terminate` lets it act.

    In other threads than the main one, where Python hears no signals, nothing is noted. On a mesh, a rank that hangs ends
    the others.
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
        if self.mesh is not None and (joined := init.group_store()) is not None:
            store, timeout = joined
            axes = (self.mesh.members, self.mesh.data)
            # Before the collective itself fails, in words that name nobody.

            def bytes_sent() -> list[int]:
                return [sum(axis.bytes_sent.values()) for axis in axes]

            rank, size = distributed.get_rank(), self.mesh.size
            self._inside.enter_context(HangDetector(store, rank, size, seconds=0.8 * timeout, progress=bytes_sent))
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
        work = distributed.all_reduce(word, op=distributed.ReduceOp.MAX, group=self.group, async_op=True)
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
