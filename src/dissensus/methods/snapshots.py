"""Snapshot ensembles: members are networks saved at several times of one training run.

Huang, Li, Pleiss, Liu, Hopcroft & Weinberger, "Snapshot ensembles: train 1, get M for free", ICLR 2017.
"""

from collections.abc import Callable, Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from dissensus.core import weights as named
from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords
from dissensus.core.weights import Weights
from dissensus.methods.parts.networks import Networks
from dissensus.methods.parts.recording_posterior import RecordingPosterior, SnapshotRecorder
from dissensus.methods.parts.trajectory import Snapshots, cosine_cycles
from dissensus.utils.checks import integer
from dissensus.utils.tensor_tree import Tensors, TensorTree


class LastSnapshots(SnapshotRecorder):
    """Keeps the last `kept` snapshots of the weights."""

    def __init__(self, source: Callable[[], Weights], snapshots: Snapshots, *, kept: int) -> None:
        super().__init__(source, snapshots)
        self.kept = kept
        self.recorded = TensorTree()
        for name, rows in self.weights.rows().items():
            self.recorded.add_tensor(name, rows.new_zeros(len(rows), kept, *rows.shape[1:]))  # (M, K, ...)

    def with_members(self) -> list[tuple[Tensor, int]]:
        return [(tensor, 0) for tensor in self.recorded.buffers()]

    def record(self, number: int) -> None:
        recorded, row = dict(self.recorded.named_buffers()), (number - 1) % self.kept
        for name, rows in self.weights.rows().items():
            recorded[name][:, row] = rows

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        taken = self.snapshot_count()
        held = torch.arange(max(0, taken - self.kept), taken) % self.kept  # in the order of the run
        return {name: rows[:, held] for name, rows in self.recorded.named_buffers()}


class SnapshotEnsemble(RecordingPosterior):
    """An ensemble of the last `members` snapshots of one training run, with their batch statistics and learned noise.

    `fit` divides the run into `members` equal cycles; in each, the learning rate follows a cosine to 0.

    Args:
        networks: one module, not copied, or a list of M; each network gives `members` functions.
        members: snapshots kept of each network.
        start, every: the optimiser steps (observe calls, counted from 0) that become snapshots; None takes one at the
            end of each cycle, from the run length that `fit` or `begin` gives.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "snapshot_ensemble"
    random = False
    recorder: LastSnapshots

    def __init__(
        self,
        networks: Networks,
        *,
        members: int = 5,
        start: int | None = None,
        every: int | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, samples=integer("members", members), likelihood=likelihood, **prior)
        self.start, self.every = start, every
        snapshots = Snapshots(start, every, wanted=members, tail=0.0)
        self.recorder = LastSnapshots(self.recorded_weights, snapshots, kept=members)

    def recorded_weights(self) -> Weights:
        """Trained parameters, learned noise and buffers, looked up anew: moving a network replaces its buffers."""
        noise = named.likelihood_parameters(self.particles)
        return super().recorded_weights().merge_with(named.network_buffers(self.particles)).merge_with(noise)

    def store_draw(self, loader: Iterable[Any]) -> None:
        """Nothing to do: the members are stored, with their batch statistics."""

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """A cosine from 1 to 0 in each of `members` equal cycles."""
        return lambda epoch: cosine_cycles(epoch / max(epochs, 1), cycles=self.samples)

    def config(self) -> dict[str, Any]:
        return {"members" if key == "samples" else key: value for key, value in super().config().items()}
