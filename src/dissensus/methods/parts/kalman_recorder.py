"""TRADI's recorder: mean and variance of every weight by Kalman filters, and correlated samples around the mean."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from dissensus.core.recorder import Recorder
from dissensus.core.weights import Weights
from dissensus.methods.parts.kalman import Drift, WeightFilters
from dissensus.methods.parts.sampling import by_network
from dissensus.numerics.flat import state_dtype
from dissensus.numerics.tree import Tensors

Covariance = Literal["shared", "diagonal", "released"]
Correlation = Literal["tensor", "layer"]
Init = Literal["current", "he"]


class KalmanRecorder(Recorder):
    """Mean μ and variance s of every weight by Kalman filters, elementwise, and samples around μ network by network."""

    def __init__(
        self,
        source: Callable[[], Weights],
        *,
        covariance: Covariance,
        correlation: Correlation,
        state_noise: tuple[float, float],
        measurement_noise: tuple[float, float],
        drift: Drift,
        init: Init,
        features: int,
        bandwidth: float,
    ) -> None:
        super().__init__(source)
        self.covariance = covariance
        self.correlation = correlation
        self.init = init
        self.features = features
        self.bandwidth = bandwidth
        self.filters = WeightFilters(
            self.weights.stored, state_noise=state_noise, measurement_noise=measurement_noise, drift=drift
        )
        self._start()

    def begin(self, steps: int, *, done: int = 0) -> None:
        self._start_here()

    def begin_unmeasured(self, epochs: int) -> None:
        self._start_here()

    def _start_here(self) -> None:
        if not self.ready:  # weights may have been loaded into the network since this was built
            self._start()

    def _start(self) -> None:
        stored = self.weights.stored
        if self.init == "current":
            # Not the paper's start, mean 0 and variance 2/fan_in: the filters take about a thousand steps to forget it.
            self.filters.start(stored, dict.fromkeys(stored, 0.0))
        else:
            zeros = {name: torch.zeros_like(weight) for name, weight in stored.items()}
            self.filters.start(zeros, {name: 2 / fan for name, fan in fan_in(self.weights.one()).items()})

    def observe(self, optimizer: Optimizer) -> None:
        self.filters.step(optimizer)

    @property
    def ready(self) -> bool:
        return int(self.filters.observed) > 0

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        if not self.ready:
            raise ValueError(
                "expected observed steps to sample from, got none; train with fit, or call observe(optimizer) after "
                "optimizer.step()"
            )
        means, variances = self.weights.lifted(self.filters.mean), self.weights.lifted(self.filters.variance)
        rows = self.weights.rows()

        def around(m: int) -> Tensors:
            drawn = {}
            for names in self._correlated():
                flat = torch.cat([rows[name][m].flatten() for name in names])
                noise = torch.stack([self._noise(flat, generator) for _ in range(samples)])  # (S, K)
                parts = torch.split(noise, [rows[name][m].numel() for name in names], dim=1)
                for name, part in zip(names, parts, strict=True):
                    deviation = part.view(samples, *rows[name].shape[1:]) * variances[name][m].sqrt()
                    drawn[name] = (means[name][m] + deviation).to(rows[name].dtype)
            return drawn

        return by_network(around, self.weights.members)

    def _correlated(self) -> list[list[str]]:
        """Names of the tensors whose weights are correlated with each other, group by group."""
        groups: dict[str, list[str]] = {}
        for name in self.weights.stored:
            groups.setdefault(name if self.correlation == "tensor" else layer_of(name), []).append(name)
        return list(groups.values())

    def _noise(self, weights: Tensor, generator: torch.Generator | None) -> Tensor:
        """(K,) noise of variance 1 with the correlations of these K weights."""
        like: dict[str, Any] = {"dtype": state_dtype([weights]), "device": weights.device, "generator": generator}
        if self.covariance == "diagonal":
            return torch.randn(len(weights), **like)
        # √(2/D) Σ_d cos(w Ω_d + φ_d) m_d with Ω ~ N(0, bandwidth²), φ ~ U[0, 2π), m ~ N(0, 1): over all three its
        # covariance is exp(−bandwidth² (w_k − w_l)² / 2) where φ is shared by the weights, else the identity.
        frequencies = self.bandwidth * torch.randn(self.features, **like)
        rows = len(weights) if self.covariance == "released" else 1
        phases = 2 * torch.pi * torch.rand(rows, self.features, **like)
        m = torch.randn(self.features, **like)
        features = torch.cos(weights.to(like["dtype"])[:, None] * frequencies + phases)  # (K, D)
        noise: Tensor = (2 / self.features) ** 0.5 * (features @ m)
        return noise


def layer_of(name: str) -> str:
    """Name of the layer that a parameter is of; what torch's parametrizations hold apart is one layer again."""
    layer, found, _ = f".{name}".partition(".parametrizations.")
    return layer if found else layer.rpartition(".")[0]


def fan_in(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Name of a parameter -> number of inputs of its layer; a bias has its layer's."""
    layers: dict[str, list[int]] = {}
    for name, parameter in parameters.items():
        if parameter.ndim > 1:
            layers.setdefault(name.rpartition(".")[0], []).append(parameter[0].numel())
    return {
        name: p[0].numel() if p.ndim > 1 else layers.get(name.rpartition(".")[0], [p.numel()])[0]
        for name, p in parameters.items()
    }
