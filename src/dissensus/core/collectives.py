"""What processes exchange while they train members together; a single process exchanges nothing.

`Particles.exchange` is called at a few places between a batch and the optimiser, and nowhere else.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from dissensus.core.member_runner import first_axis_mean
from dissensus.utils.tensor_tree import Tensors


class Exchange:
    """What processes exchange, in the form for one of them; `distributed.mesh_collectives.MeshExchange` is that for several."""

    ranks: int = 1  # number of processes that see different rows of a batch
    members: int | None = None  # M over all processes, if each process holds only some members

    def gradient_context(self, posterior: Any, batch: Any) -> AbstractContextManager[object]:
        """The context in which the gradients of a batch are computed."""
        return nullcontext()

    def loop_context(self) -> AbstractContextManager[object]:
        """The context of a loop over this process's members."""
        return nullcontext()

    def take_rows(self, batch: Any) -> Any:
        """The rows of the batch that lie here."""
        return batch

    def batch_rows(self, size: int) -> tuple[int, slice]:
        """(number of rows of the whole batch, which of them this process has); `size`: the number of rows it has."""
        return size, slice(0, size)

    def scale_by_fraction(self, value: Tensor) -> Tensor:
        """This process's part of a mean over the whole batch: value · (weight of its rows / weight of all rows)."""
        return value

    def total_batch_weight(self, weight: Tensor) -> Tensor:
        """() the weight of the whole batch; `weight`: that of this process's rows."""
        return weight

    @property
    def batch_fraction(self) -> Tensor | None:
        """() the factor of `scale_by_fraction`; None for 1."""
        return None

    def couple_members(self, couple: Callable[[Any], Any], z: Any) -> Any:
        """couple(z) over all members and all rows, cut to those of this process."""
        return couple(z)

    def submit_gradients(self, gradients: Any) -> Any:
        """One member's `Gradients`, in a loop over members: they may be exchanged while the next member runs."""
        return gradients

    def reduce_gradients(self, posterior: Any, found: Any) -> Any:
        """Losses and gradients (`core.gradients.Gradients`) of the whole batch; shared tensors' summed over all members."""
        return found

    def mix_gradients(self, mix: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        """mix(gradients) over all members, cut to those of this process."""
        return mix(gradients)

    def average_members(self, values: Tensor) -> Tensor:
        """The mean over the members of all processes; `values` (M, ...): those of this process."""
        return first_axis_mean(values)

    def any_process(self, here: bool) -> bool:
        """Whether `here` is true in any process."""
        return here

    def reduce_flag(self, flag: Tensor) -> None:
        """Sets the flag () in place if any process has set it, without blocking the host."""

    def gather_members(self, values: Tensor) -> Tensor:
        """(K, M) values of all members; `values`: (K, M of this process)."""
        return values


ALONE = Exchange()
