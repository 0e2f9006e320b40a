"""Interruptions of a training run: the scheduler ends it (SIGTERM), or a rank hangs."""

from contextlib import ExitStack
from typing import NoReturn, Self

from torch import distributed

from dissensus.distributed import joining
from dissensus.distributed.leaving import Leaving
from dissensus.distributed.mesh import Mesh
from dissensus.distributed.watch import Watch


class BadDays:
    """Around training. `mesh`: None for a process alone; `hears`: whether SIGTERM waits for a checkpoint to be written."""

    def __init__(self, mesh: Mesh | None, *, hears: bool) -> None:
        self.mesh = mesh
        self.leaving = Leaving(hears=hears, group=joining.host_group() if mesh is not None and hears else None)
        self._inside = ExitStack()

    def __enter__(self) -> Self:
        self._inside.enter_context(self.leaving)
        if self.mesh is not None and (joined := joining.joined()) is not None:
            store, timeout = joined
            axes = (self.mesh.members, self.mesh.data)
            # Before the collective itself fails, in words that name nobody.
            self._inside.enter_context(
                Watch(
                    store,
                    distributed.get_rank(),
                    self.mesh.size,
                    seconds=0.8 * timeout,
                    progress=lambda: [sum(axis.sent.values()) for axis in axes],
                )
            )
        return self

    def __exit__(self, *details: object) -> None:
        self._inside.close()

    def over(self) -> bool:
        """Whether to stop here, in the middle of an epoch; to be asked by all ranks after every step."""
        return self.leaving.due()

    def leave(self) -> NoReturn:
        """Ends the process as SIGTERM would have."""
        self.leaving.leave()
