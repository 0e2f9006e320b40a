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


class SigtermHandler:
    """Inside, SIGTERM only notes that the process should end: `due` says when, `terminate` then lets the signal act.

    In other threads than the main one, where Python hears no signals, nothing is noted.
    """

    def __init__(self, *, hears: bool = True, group: distributed.ProcessGroup | None = None) -> None:
        """`hears`: False leaves the signal alone; `group`: of the ranks that stop together, None for a process alone."""
        self.handles_signal = hears and threading.current_thread() is threading.main_thread()
        self.group = group if hears else None
        self.is_requested = self.is_agreed = False
        self.pending_flags: deque[tuple[Tensor, distributed.Work]] = deque()
        self.previous_handler: object = None

    def __enter__(self) -> Self:
        if self.handles_signal:
            self.previous_handler = signal.signal(signal.SIGTERM, self._note_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self.handles_signal:
            signal.signal(signal.SIGTERM, self.previous_handler)  # type: ignore[arg-type]

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
        self.__exit__()
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM)


class Interruptions:
    """Around training. `mesh`: None for a process alone; `hears`: whether SIGTERM waits for a checkpoint to be written."""

    def __init__(self, mesh: Mesh | None, *, hears: bool) -> None:
        self.mesh, self.resumable = mesh, hears
        self.sigterm = SigtermHandler(hears=hears, group=init.host_group() if mesh is not None and hears else None)
        self._inside = ExitStack()

    def __enter__(self) -> Self:
        self._inside.enter_context(self.sigterm)
        if self.mesh is not None and (joined := init.group_store()) is not None:
            store, timeout = joined
            axes = (self.mesh.members, self.mesh.data)
            # Before the collective itself fails, in words that name nobody.

            def bytes_sent() -> list[int]:
                return [sum(axis.bytes_sent.values()) for axis in axes]

            rank, size = distributed.get_rank(), self.mesh.size
            self._inside.enter_context(HangDetector(store, rank, size, seconds=0.8 * timeout, progress=bytes_sent))
        return self

    def __exit__(self, *details: object) -> None:
        self._inside.close()

    def should_stop(self) -> bool:
        """Whether to stop here, in the middle of an epoch; to be asked by all ranks after every step."""
        return self.sigterm.should_stop()

    def terminate(self) -> NoReturn:
        """Ends the process as SIGTERM would have."""
        self.sigterm.terminate()
