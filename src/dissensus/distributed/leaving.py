"""SIGTERM, by which schedulers announce the end of a job: all ranks stop after the same step."""

import signal
import threading
from collections import deque
from types import FrameType
from typing import NoReturn, Self

import torch
from torch import Tensor, distributed

# Steps between a rank's word and what comes of it: as long as that, ranks that exchange nothing else may drift apart.
SLACK = 8


class Leaving:
    """Inside, SIGTERM only notes that the process should end: `due` says when, `leave` then lets the signal act.

    In other threads than the main one, where Python hears no signals, nothing is noted.
    """

    def __init__(self, *, hears: bool = True, group: distributed.ProcessGroup | None = None) -> None:
        """`hears`: False leaves the signal alone; `group`: of the ranks that stop together, None for a process alone."""
        self.mine = hears and threading.current_thread() is threading.main_thread()
        self.group = group if hears else None
        self.asked = self.agreed = False
        self.words: deque[tuple[Tensor, distributed.Work]] = deque()
        self.before: object = None

    def __enter__(self) -> Self:
        if self.mine:
            self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.mine:
            signal.signal(signal.SIGTERM, self.before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def due(self) -> bool:
        """Whether to stop now, the same on all ranks; to be called by each of them after every step."""
        if self.group is None:
            return self.asked
        word = torch.tensor(int(self.asked), dtype=torch.int32)
        # Not waited for: the answer of some steps ago is there already.
        work = distributed.all_reduce(word, op=distributed.ReduceOp.MAX, group=self.group, async_op=True)
        self.words.append((word, work))
        if len(self.words) > SLACK:
            word, work = self.words.popleft()
            work.wait()
            self.agreed = self.agreed or bool(word)
        return self.agreed

    def leave(self) -> NoReturn:
        """Does what SIGTERM would have done, and ends the process in any case."""
        self.__exit__()
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM)
