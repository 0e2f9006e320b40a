"""TRADI: the distribution of every weight, tracked while one network trains.

Franchi, Bursuc, Aldea, Dubuisson & Bloch, "TRADI: tracking deep neural network weight distributions", ECCV 2020.
"""

import logging
from typing import Any, Unpack

import torch

from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords, norm_parameters
from dissensus.core.weights import Weights
from dissensus.methods.parts.kalman import Drift, WeightFilters
from dissensus.methods.parts.kalman_recorder import Correlation, Covariance, Init, KalmanRecorder
from dissensus.methods.parts.networks import Networks
from dissensus.methods.parts.recording import RecordingPosterior
from dissensus.numerics.checks import check_number, check_whole
from dissensus.numerics.tree import Tensors

log = logging.getLogger("dissensus")


class TRADI(RecordingPosterior):
    """w ~ N(μ, Σ), with the mean μ and variance s of each weight from two Kalman filters over the optimiser's steps.

    `covariance`: "shared", Σ_kl = √s_k √s_l exp(−bandwidth² (w_k − w_l)² / 2) by random Fourier features with phases
    shared by the weights, which the paper means; "diagonal"; or "released", the authors' program, whose phases differ
    from weight to weight, so that its covariance is diagonal too. `correlation`: what shares phases, each "tensor", as in
    that program, or each "layer", weight and bias together, as in the authors' talk. `state_noise`, `measurement_noise`:
    variances of the filters' noises, (mean, variance). `drift`: "gradient" predicts the next mean by a step of plain
    gradient descent, "none" by the last one. `init`: "current" starts at the weights there are, with variance 0, "he" at
    mean 0 and variance 2/fan_in. Parameters of normalisation layers keep their trained values.
    """

    name = "tradi"
    judged_by = "draw"
    # With the rate the variance would die, too. Of the tails that were tried on held-out rows of digits and MNIST this one
    # loses least in NLL over all of them (benchmarks/tradi_schedule.py): half of the rate is too much for MNIST.
    floor = 0.1
    recorder: KalmanRecorder
    untrained = (*RecordingPosterior.untrained, "covariance", "correlation", "features", "bandwidth")

    def __init__(
        self,
        networks: Networks,
        *,
        samples: int = 20,
        covariance: Covariance = "shared",
        correlation: Correlation = "tensor",
        state_noise: tuple[float, float] = (1e-4, 5e-5),
        measurement_noise: tuple[float, float] = (10.0, 10.0),
        drift: Drift = "gradient",
        init: Init = "current",
        features: int = 10,
        bandwidth: float = 1.0,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        _check_choice("covariance", covariance, ("shared", "diagonal", "released"))
        _check_choice("correlation", correlation, ("tensor", "layer"))
        _check_choice("drift", drift, ("gradient", "none"))
        _check_choice("init", init, ("current", "he"))
        _check_variances("state_noise", state_noise, zero=True)
        _check_variances("measurement_noise", measurement_noise, zero=False)
        check_whole("features", features)
        check_number("bandwidth", bandwidth)
        if features < 1:
            raise ValueError(f"expected at least one random feature, got {features}; 10 is the paper's number")
        if not bandwidth >= 0:
            raise ValueError(f"expected a bandwidth of 0 or more, got {bandwidth}; 1 is the paper's")
        super().__init__(networks, samples=samples, likelihood=likelihood, **prior)
        self._norms = norm_parameters(self.network)
        if not self.recorded().stored:
            raise ValueError(
                "expected a network with trainable weights outside normalisation layers, got none; there is nothing to track"
            )
        self.recorder = KalmanRecorder(
            self.recorded,
            covariance=covariance,
            correlation=correlation,
            state_noise=(float(state_noise[0]), float(state_noise[1])),
            measurement_noise=(float(measurement_noise[0]), float(measurement_noise[1])),
            drift=drift,
            init=init,
            features=features,
            bandwidth=bandwidth,
        )

    def recorded(self) -> Weights:
        """Trained parameters but those of normalisation layers."""
        return super().recorded().only(lambda name, _: name not in self._norms)

    @property
    def filters(self) -> WeightFilters:
        """The filters over the weights as they are stored."""
        return self.recorder.filters

    @property
    def mean(self) -> Tensors:
        """Name -> μ; of parameters that are not tracked the value; of a list of networks (M, ...)."""
        return self.plain({**self.built_with.rows(), **self.built_with.lifted(self.filters.mean)})

    @property
    def variance(self) -> Tensors:
        """Name -> s; of parameters that are not tracked 0; of a list of networks (M, ...)."""
        zeros = {name: torch.zeros_like(rows) for name, rows in self.built_with.rows().items()}
        return self.plain({**zeros, **self.built_with.lifted(self.filters.variance)})

    def sample(self, generator: torch.Generator | None = None) -> Tensors:
        if self.ready and (share := self.filters.memory_of_start) > 0.05:
            log.warning(
                "TRADI has observed %d steps, and %.0f %% of its mean still come from the weights it started at; train "
                "longer, or raise state_noise",
                int(self.filters.observed),
                100 * share,
            )
        return super().sample(generator)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "covariance": self.recorder.covariance,
            "correlation": self.recorder.correlation,
            "state_noise": list(self.filters.state_noise),
            "measurement_noise": list(self.filters.measurement_noise),
            "drift": self.filters.drift,
            "init": self.recorder.init,
            "features": self.recorder.features,
            "bandwidth": self.recorder.bandwidth,
        }


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} of {', '.join(choices)}, got {value!r}; pass one of them")


def _check_variances(name: str, pair: tuple[float, float], *, zero: bool) -> None:
    if not isinstance(pair, tuple | list):
        raise TypeError(
            f"expected {name} as two variances, of the mean's and the variance's filter, got {type(pair).__name__}; pass "
            "two numbers"
        )
    if len(pair) != 2 or not all(value > 0 or (zero and value == 0) for value in pair):
        raise ValueError(
            f"expected {name} as two variances, of the mean's and the variance's filter, got {pair}; pass two numbers "
            f"{'of 0 or more' if zero else 'above 0'}"
        )
