"""SWAG and SWA: a Gaussian, or only the mean, of the weights along a training run.

Maddox, Garipov, Izmailov, Vetrov & Wilson, "A simple baseline for Bayesian uncertainty in deep learning", NeurIPS 2019.
Izmailov, Podoprikhin, Garipov, Vetrov & Wilson, "Averaging weights leads to wider optima", UAI 2018.
MultiSWAG: Wilson & Izmailov, "Bayesian deep learning and a probabilistic perspective of generalization", NeurIPS 2020.
"""

from collections.abc import Callable
from typing import Any, Unpack, final

import torch
from torch import Tensor

from dissensus.core.networks import MethodKeywords, Networks
from dissensus.core.weights import Weights
from dissensus.methods.parts.sampling_posterior import RecordingPosterior, stack_networks
from dissensus.methods.snapshots import SnapshotRecorder, Snapshots
from dissensus.utils.checks import integer, number
from dissensus.utils.sharding import gather_full_tensor, local_part, shard_last_axis, shard_like
from dissensus.utils.tensor_tree import Tensors


class MeanRecorder(SnapshotRecorder):
    """The mean of the snapshots of each network."""

    mean_vector: Tensor
    can_shard = True

    def __init__(self, source: Callable[[], Weights], snapshots: Snapshots) -> None:
        super().__init__(source, snapshots)
        self.register_buffer("mean_vector", torch.zeros_like(self.weights.flat()))  # (M, P)

    def with_members(self) -> list[tuple[Tensor, int]]:
        return [(self.mean_vector, 0)]

    def record(self, number: int) -> None:
        if number == 1:  # also after `begin` has reset an earlier run
            self.mean_vector.zero_()
        self.update_mean(self.weights.flat(self.mean_vector.dtype), number)

    def update_mean(self, weights: Tensor, number: int) -> Tensor:
        """Updates the mean with snapshot `number`; returns (M, P) the weights minus the mean before."""
        # mean_n = mean + (w − mean)/n. Not (n·mean + w)/(n + 1), which rounds: the mean of equal snapshots is their value.
        step = weights - self.mean_vector
        self.mean_vector.add_(step, alpha=1 / number)
        return step

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        self.snapshot_count()
        one = self.weights.first_member()

        def around(m: int) -> Tensors:
            drawn = self.weights.unflatten(gather_full_tensor(self.sample_network(m, samples, generator)))
            return {name: shard_like(each, one[name], before=1) for name, each in drawn.items()}  # (S, ...)

        return stack_networks(around, len(self.mean_vector))

    def sample_network(self, m: int, samples: int, generator: torch.Generator | None) -> Tensor:
        """(S, P) weights around those of network m."""
        return self.mean_vector[m].expand(samples, -1).clone()


class GaussianRecorder(MeanRecorder):
    """Mean, variance and last `rank` deviations D of the snapshots: N(mean, T · (diag(variance) + DᵀD / (held − 1)))."""

    square_sum: Tensor
    deviations: Tensor

    def __init__(self, source: Callable[[], Weights], snapshots: Snapshots, *, rank: int, temperature: float) -> None:
        super().__init__(source, snapshots)
        self.posterior_temperature = temperature
        self.register_buffer("square_sum", torch.zeros_like(self.mean_vector))  # (M, P) Σ (w − mean)²
        self.register_buffer("deviations", self.mean_vector.repeat(rank, 1, 1))  # (K, M, P), a ring buffer

    def with_members(self) -> list[tuple[Tensor, int]]:
        return [*super().with_members(), (self.square_sum, 0), (self.deviations, 1)]

    def record(self, number: int) -> None:
        if number == 1:
            for buffer in (self.mean_vector, self.square_sum, self.deviations):
                buffer.zero_()
        weights = self.weights.flat(self.mean_vector.dtype)  # (M, P)
        step = self.update_mean(weights, number)
        deviation = weights.sub_(self.mean_vector)  # from the mean so far, this snapshot included, as in the paper
        self.square_sum.addcmul_(step, deviation)  # not E[w²] − mean², which rounds: equal snapshots have variance 0
        self.deviations[(number - 1) % len(self.deviations)].copy_(deviation)

    def variance(self) -> Tensor:
        """(M, P) variance over the snapshots (divisor n)."""
        return self.square_sum / max(int(self.snapshots.taken), 1)

    def sample_network(self, m: int, samples: int, generator: torch.Generator | None) -> Tensor:
        held = min(self.snapshot_count(), len(self.deviations))
        # eq. (1): w = mean + √T (Σ_diag^½ z₁ + D z₂ / √(held − 1)). One z₂ for all tensors of a network: it carries the
        # correlations between layers. The divisor counts what is held; the authors' code has the largest rank there.
        mean, like = self.mean_vector[m], dict[str, Any](dtype=self.mean_vector.dtype, device=self.mean_vector.device)
        found = shard_last_axis(torch.empty(samples, len(mean), **like).normal_(generator=generator), mean)
        noise = local_part(found)  # every process draws that of all weights
        noise *= local_part((self.square_sum[m] / self.snapshot_count()).sqrt())
        z = torch.randn(samples, held, generator=generator, **like)
        noise.addmm_(z, local_part(self.deviations[:held, m]), alpha=max(held - 1, 1) ** -0.5)
        noise.mul_(self.posterior_temperature**0.5).add_(local_part(mean))
        return found


@final
class SWAG(RecordingPosterior):
    """A Gaussian fitted to snapshots of the weights: w ~ N(mean, T · (diag(variance) + DᵀD / (held − 1))).

    It covers all trained parameters, also those of normalisation layers. The weights should keep moving while snapshots
    are taken, so `fit`'s schedule for this method ends with a constant learning rate.

    Args:
        networks: one module, not copied, or a list of M for a mixture of M such Gaussians (MultiSWAG).
        rank: rows of D: the number of last deviations from the mean that are kept.
        samples: functions per network and draw.
        start, every: the optimiser steps (observe calls, counted from 0) that become snapshots; None spreads 2·rank of
            them over the last quarter of the run, from the run length that `fit` or `begin` gives.
        posterior_temperature: T, the factor of the covariance (the paper's scale): 0.5 in the paper, 0 for the mean alone.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "swag"
    draw_only_settings = (*RecordingPosterior.draw_only_settings, "posterior_temperature")
    recorder: GaussianRecorder

    def __init__(
        self,
        networks: Networks,
        *,
        rank: int = 20,
        samples: int = 30,
        start: int | None = None,
        every: int | None = None,
        posterior_temperature: float = 0.5,
        **prior: Unpack[MethodKeywords],
    ) -> None:
        super().__init__(networks, samples=samples, **prior)
        self.rank, self.start, self.every = integer("rank", rank), start, every
        hint = "the paper uses 0.5; 0 gives the mean alone"
        self.posterior_temperature = number("posterior_temperature", posterior_temperature, least=0, hint=hint)
        plan = Snapshots(start, every, wanted=2 * rank)
        self.recorder = GaussianRecorder(self.recorded_weights, plan, rank=rank, temperature=posterior_temperature)

    @property
    def mean(self) -> Tensors:
        """Name -> mean over the snapshots; of a list of networks (M, ...)."""
        return self.public_tensors(self.trained.unflatten(gather_full_tensor(self.recorder.mean_vector)))

    @property
    def variance(self) -> Tensors:
        """Name -> variance over the snapshots (divisor n), the diagonal part before scaling; of a list (M, ...)."""
        return self.public_tensors(self.trained.unflatten(gather_full_tensor(self.recorder.variance())))


@final
class SWA(RecordingPosterior):
    """The mean of the weights along a training run: SWAG without noise. One function per network.

    Args:
        networks: one module, not copied, or a list of M.
        start, every: as in SWAG; None spreads 40 snapshots over the last quarter of the run.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "swa"
    random = False
    recorder: MeanRecorder

    def __init__(
        self, networks: Networks, *, start: int | None = None, every: int | None = None, **prior: Unpack[MethodKeywords]
    ) -> None:
        super().__init__(networks, samples=1, **prior)
        self.start, self.every = start, every
        self.recorder = MeanRecorder(self.recorded_weights, Snapshots(start, every, wanted=40))

    @property
    def mean(self) -> Tensors:
        """Name -> mean over the snapshots; of a list of networks (M, ...)."""
        return self.public_tensors(self.trained.unflatten(gather_full_tensor(self.recorder.mean_vector)))
