"""SWAG and SWA: a Gaussian, or just the mean, of the weights that training passes through.

Maddox, Garipov, Izmailov, Vetrov & Wilson, "A simple baseline for Bayesian uncertainty in deep learning", NeurIPS 2019.
Izmailov, Podoprikhin, Garipov, Vetrov & Wilson, "Averaging weights leads to wider optima", UAI 2018.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.likelihood import Likelihood
from dissensus.methods.recording import RecordingPosterior, nothing_recorded
from dissensus.methods.trajectory import Snapshots, constant_tail
from dissensus.numerics.checks import check_number, check_whole
from dissensus.numerics.flat import flatten, unflatten
from dissensus.numerics.tree import Tensors


class SWAG(RecordingPosterior):
    """w ~ N(mean, scale · (diag(variance) + DᵀD / (held − 1))), with mean, variance and D of snapshots of the weights.

    `rank`: deviations held, the last ones. `start`, `every`: which observe calls are snapshots, counted from 0; None lets
    `begin` (which `fit` calls) spread 2·rank of them over the last quarter of the run. All trained parameters take part,
    those of normalisation layers too. The network should go on moving while snapshots are taken: `fit`'s schedule for
    this method ends in a constant rate.
    """

    name = "swag"
    untrained = (*RecordingPosterior.untrained, "scale")
    mean_vector: Tensor
    square_sum: Tensor
    deviations: Tensor

    def __init__(
        self,
        module: nn.Module,
        *,
        rank: int = 20,
        samples: int = 30,
        start: int | None = None,
        every: int | None = None,
        scale: float = 0.5,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        check_whole("rank", rank)
        check_number("scale", scale)
        if rank < 1:
            raise ValueError(f"expected a rank of 1 or more, got {rank}; 20 is a usual number")
        if not scale >= 0:
            raise ValueError(f"expected a scale of 0 or more, got {scale}; 0.5 is the paper's, 0 leaves the mean alone")
        super().__init__(
            module, samples=samples, likelihood=likelihood, weight_prior_std=weight_prior_std, data_size=data_size
        )
        self.rank = rank
        self.scale = scale
        self.snapshots = Snapshots(start, every, wanted=2 * rank)
        zeros = torch.zeros_like(flatten(self._trained))  # (P,)
        self.register_buffer("mean_vector", zeros)
        self.register_buffer("square_sum", zeros.clone())  # Σ (w − mean)²
        self.register_buffer("deviations", zeros.repeat(rank, 1))  # (K, P), rows in turn

    @property
    def mean(self) -> Tensors:
        """Name -> mean over the snapshots."""
        return unflatten(self.mean_vector, self._trained)

    @property
    def variance(self) -> Tensors:
        """Name -> variance over the snapshots (divisor n), the diagonal part before scaling."""
        return unflatten(self.square_sum / max(int(self.snapshots.taken), 1), self._trained)

    def record(self, number: int) -> None:
        weights = flatten(self._trained, self.mean_vector.dtype)  # (P,)
        if number == 1:  # also after `begin` has forgotten an earlier run
            self.mean_vector.zero_()
            self.square_sum.zero_()
            self.deviations.zero_()
        # mean_n = mean + (w − mean)/n. Not (n·mean + w)/(n + 1) and E[w²] − mean², which round: the mean of equal
        # snapshots is their value and the variance 0, exactly.
        step = weights - self.mean_vector
        self.mean_vector.add_(step, alpha=1 / number)
        deviation = weights - self.mean_vector  # from the mean so far, this snapshot included, as in the paper
        self.square_sum.addcmul_(step, deviation)
        self.deviations[(number - 1) % self.rank] = deviation

    def sample(self, generator: torch.Generator | None = None) -> Tensors:
        n = int(self.snapshots.taken)
        if n == 0:
            raise nothing_recorded(self.snapshots)
        held = min(n, self.rank)
        # eq. (1): w = mean + √scale (Σ_diag^½ z₁ + D z₂ / √(held − 1)). One z₂ for all tensors: it carries the
        # correlations between layers. The divisor counts what is held; the authors' code has the largest rank there.
        mean = self.mean_vector
        like: dict[str, Any] = {"dtype": mean.dtype, "device": self.device, "generator": generator}
        noise = torch.randn(self.samples, len(mean), **like)
        noise *= (self.square_sum / n).sqrt()
        z = torch.randn(self.samples, held, **like)
        noise.addmm_(z, self.deviations[:held], alpha=max(held - 1, 1) ** -0.5)
        return unflatten(noise.mul_(self.scale**0.5).add_(mean), self._trained)

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """Constant, linear to one half, constant over the last quarter: the weights must not come to rest."""
        return lambda epoch: constant_tail(epoch / max(epochs, 1))

    def config(self) -> dict[str, Any]:
        start, every = self.snapshots.given
        return {**super().config(), "rank": self.rank, "start": start, "every": every, "scale": self.scale}


class SWA(RecordingPosterior):
    """The mean of the weights that training passes through: SWAG without its noise. A draw has one function.

    `start`, `every` as in SWAG; None spreads 40 snapshots over the last quarter of the run.
    """

    name = "swa"
    random = False
    mean_vector: Tensor

    def __init__(
        self,
        module: nn.Module,
        *,
        start: int | None = None,
        every: int | None = None,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        super().__init__(
            module, samples=1, likelihood=likelihood, weight_prior_std=weight_prior_std, data_size=data_size
        )
        self.snapshots = Snapshots(start, every, wanted=40)
        self.register_buffer("mean_vector", torch.zeros_like(flatten(self._trained)))  # (P,)

    @property
    def mean(self) -> Tensors:
        """Name -> mean over the snapshots."""
        return unflatten(self.mean_vector, self._trained)

    def record(self, number: int) -> None:
        weights = flatten(self._trained, self.mean_vector.dtype)
        if number == 1:
            self.mean_vector.zero_()
        self.mean_vector.add_(weights - self.mean_vector, alpha=1 / number)

    def sample(self, generator: torch.Generator | None = None) -> Tensors:
        if not self.ready:
            raise nothing_recorded(self.snapshots)
        return {name: mean[None].clone() for name, mean in self.mean.items()}

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """As SWAG's."""
        return lambda epoch: constant_tail(epoch / max(epochs, 1))

    def config(self) -> dict[str, Any]:
        start, every = self.snapshots.given
        return {**{k: v for k, v in super().config().items() if k != "samples"}, "start": start, "every": every}
