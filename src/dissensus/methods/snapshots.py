"""Snapshot ensembles: members are the networks that one training run passes through.

Huang, Li, Pleiss, Liu, Hopcroft & Weinberger, "Snapshot ensembles: train 1, get M for free", ICLR 2017.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dissensus.core.likelihood import Likelihood
from dissensus.methods.recording import RecordingPosterior, nothing_recorded
from dissensus.methods.trajectory import Snapshots, cosine_cycles
from dissensus.numerics.checks import check_whole
from dissensus.numerics.tree import Tensors, TensorTree


class SnapshotEnsemble(RecordingPosterior):
    """The last `members` snapshots of a run, each with the batch statistics it had.

    `start`, `every`: which observe calls are snapshots, counted from 0. None: `begin` (which `fit` calls) puts one at the
    end of each of `members` equal parts of the run, and `fit`'s schedule for this method takes the learning rate down a
    cosine in each part.
    """

    name = "snapshot_ensemble"
    random = False
    tail = 0.0

    def __init__(
        self,
        module: nn.Module,
        *,
        members: int = 5,
        start: int | None = None,
        every: int | None = None,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        check_whole("members", members)
        if members < 1:
            raise ValueError(f"expected at least one member, got {members}; 5 is a usual number")
        super().__init__(
            module, samples=members, likelihood=likelihood, weight_prior_std=weight_prior_std, data_size=data_size
        )
        self.snapshots = Snapshots(start, every, wanted=members)
        self.recorded = TensorTree()
        for name, tensor in self._recordable().items():
            self.recorded.plant(name, tensor.detach().new_zeros(members, *tensor.shape))  # (M, ...)

    def record(self, number: int) -> None:
        row = (number - 1) % self.samples
        recorded = dict(self.recorded.named_buffers())
        for name, tensor in self._recordable().items():
            recorded[name][row] = tensor

    def sample(self, generator: torch.Generator | None = None) -> Tensors:
        if not self.ready:
            raise nothing_recorded(self.snapshots)
        held = min(int(self.snapshots.taken), self.samples)
        return {name: rows[:held].clone() for name, rows in self.recorded.named_buffers()}

    def store_draw(self, loader: Iterable[Any]) -> None:
        """Nothing to do: the members are stored, with their batch statistics."""

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """A cosine from 1 to 0 in each of `members` equal parts."""
        return lambda epoch: cosine_cycles(epoch / max(epochs, 1), cycles=self.samples)

    def config(self) -> dict[str, Any]:
        start, every = self.snapshots.given
        shared = {key: value for key, value in super().config().items() if key not in ("samples", "stored")}
        return {"members": self.samples, **shared, "start": start, "every": every}

    def _recordable(self) -> Tensors:
        """Name -> trained parameter or buffer of the network."""
        return {**self._trained, **dict(self.network.named_buffers())}
