"""What one process exchanges with others while members train; where there is one process, nothing.

`Particles.exchange` is asked in a few places of the way from a batch to the optimiser, and nowhere else: rows of a batch that
lie here (`rows`), how much of the whole they are (`weighed`), z of all members where they are coupled (`coupled`), gradients
that are complete (`completed`) and mixed (`mixed`), batch statistics that are shared (`averaged`), and whether any process has
met a number that is not finite (`any`, `agree`, `everywhere`). `dissensus.distributed` has the one for many processes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from dissensus.core.running import averaged
from dissensus.numerics.tree import Tensors


class Exchange:
    """One process, which exchanges nothing: every function gives back what it was given, and dispatches no operation."""

    ranks: int = 1  # that see different rows of a batch
    members: int | None = None  # M over all processes, where these hold only some of them

    def running(self, posterior: Any, batch: Any) -> AbstractContextManager[object]:
        """The context of everything that finds the gradients of a batch."""
        return nullcontext()

    def in_turn(self) -> AbstractContextManager[object]:
        """The context of one pass over this process's members, one after the other."""
        return nullcontext()

    def rows(self, size: int) -> tuple[int, slice]:
        """(rows of the whole batch, which of them lie here), asked with the number of those that do."""
        return size, slice(0, size)

    def weighed(self, value: Tensor) -> Tensor:
        """What a mean over the rows that lie here adds to the mean over all: value · (their weight / the whole weight)."""
        return value

    def counted(self, weight: Tensor) -> Tensor:
        """() the weight of the whole batch, asked with that of the rows that lie here."""
        return weight

    @property
    def share(self) -> Tensor | None:
        """() that factor; None for 1."""
        return None

    def coupled(self, couple: Callable[[Any], Any], z: Any) -> Any:
        """couple(z) of all members and all rows, cut to those that lie here."""
        return couple(z)

    def found(self, gradients: Any) -> Any:
        """One member's `Gradients`, in a pass over members: they may be exchanged while the next one's are found."""
        return gradients

    def completed(self, posterior: Any, found: Any) -> Any:
        """Losses and gradients (`core.gradients.Gradients`) of the whole batch, of shared tensors over all members."""
        return found

    def mixed(self, mix: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        """mix(gradients) of all members, cut to those that lie here."""
        return mix(gradients)

    def averaged(self, values: Tensor) -> Tensor:
        """The mean over all members of values (M, ...) of those that lie here."""
        return averaged(values)

    def any(self, here: bool) -> bool:
        """Whether it is so in any process."""
        return here

    def agree(self, flag: Tensor) -> None:
        """Sets the flag () in place where any process has set it; waits for nobody on the host."""

    def everywhere(self, values: Tensor) -> Tensor:
        """Values (K, M here) of all members, (K, M)."""
        return values


ALONE = Exchange()
