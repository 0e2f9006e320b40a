"""Snapshot ensembles: members are networks saved at several times of one training run.

Huang, Li, Pleiss, Liu, Hopcroft & Weinberger, "Snapshot ensembles: train 1, get M for free", ICLR 2017.
"""

from collections.abc import Callable
from typing import Unpack, final

from dissensus.core.likelihood import Likelihood
from dissensus.core.networks import Networks
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.sampling_posterior import RecordingPosterior
from dissensus.methods.parts.trajectory import LastSnapshots, Snapshots, cosine_cycles
from dissensus.utils.checks import integer


@final
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
    records_all = True
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
        self.members, self.start, self.every = members, start, every
        snapshots = Snapshots(start, every, wanted=members, tail=0.0)
        self.recorder = LastSnapshots(self.recorded_weights, snapshots, kept=members)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """A cosine from 1 to 0 in each of `members` equal cycles."""
        return lambda epoch: cosine_cycles(epoch / max(epochs, 1), cycles=self.samples)
