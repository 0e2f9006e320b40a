"""TRADI: the distribution of every weight, tracked while one network trains.

Franchi, Bursuc, Aldea, Dubuisson & Bloch, "TRADI: tracking deep neural network weight distributions", ECCV 2020.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dissensus.core.functions import DrawnFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import evaluation
from dissensus.core.prior import norm_parameters
from dissensus.methods.kalman import Drift, WeightFilters
from dissensus.methods.sampling import SampledFunctions, SamplingPosterior
from dissensus.methods.trajectory import constant_tail, spread
from dissensus.numerics.checks import check_number, check_whole
from dissensus.numerics.flat import state_dtype
from dissensus.numerics.randomness import own_generator
from dissensus.numerics.tree import Tensors
from dissensus.surgery.normalization import refresh_statistics

log = logging.getLogger("dissensus")

Covariance = Literal["shared", "diagonal", "released"]
Correlation = Literal["tensor", "layer"]
Init = Literal["current", "he"]
# Of the rate, in the tail. Of the tails that were tried on held-out rows of digits and MNIST it loses least in NLL over all of
# them (benchmarks/tradi_schedule.py): half of the rate is too much for MNIST.
FLOOR = 0.1
LOOKS = 10  # at most, of validation at what would be sampled


class TRADI(SamplingPosterior):
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
    untrained = (*SamplingPosterior.untrained, "covariance", "correlation", "features", "bandwidth")

    def __init__(
        self,
        module: nn.Module,
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
        weight_prior_std: float | None = None,
        data_size: int | None = None,
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
        super().__init__(
            module, samples=samples, likelihood=likelihood, weight_prior_std=weight_prior_std, data_size=data_size
        )
        self.covariance = covariance
        self.correlation = correlation
        self.init = init
        self.features = features
        self.bandwidth = bandwidth
        tracked = {name: self._built_with[name] for name in self.sampled_names()}
        if not tracked:
            raise ValueError(
                "expected a network with trainable weights outside normalisation layers, got none; there is nothing to track"
            )
        self.filters = WeightFilters(
            tracked,
            state_noise=(float(state_noise[0]), float(state_noise[1])),
            measurement_noise=(float(measurement_noise[0]), float(measurement_noise[1])),
            drift=drift,
        )
        self._start()

    def begin(self, steps_per_epoch: int, epochs: int, *, done: int = 0) -> None:
        super().begin(steps_per_epoch, epochs, done=done)
        self._start_here()

    def begin_unmeasured(self, epochs: int) -> None:
        super().begin_unmeasured(epochs)
        self._start_here()

    def _start_here(self) -> None:
        if not self.ready:  # weights may have been loaded into the network since this was built
            self._start()

    def observe(self, optimizer: Optimizer) -> bool:
        known = {id(p) for p in [*self._trained.values(), *self.likelihood.parameters()]}
        if any(id(p) not in known and p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            self.check_network()
        stepped = super().observe(optimizer)
        if stepped:
            self.filters.step(optimizer)
        return stepped

    def _start(self) -> None:
        weights = self.filters.weights
        if self.init == "current":
            # Not the paper's start, mean 0 and variance 2/fan_in: the filters take about a thousand steps to forget it.
            self.filters.start(weights, dict.fromkeys(weights, 0.0))
        else:
            zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            self.filters.start(zeros, {name: 2 / fan for name, fan in fan_in(self.network).items()})

    @property
    def ready(self) -> bool:
        return int(self.filters.observed) > 0

    @property
    def mean(self) -> Tensors:
        """Name -> μ; of parameters that are not tracked the value."""
        values = {name: parameter.detach() for name, parameter in self.network.named_parameters()}
        return {**values, **self.filters.mean}

    @property
    def variance(self) -> Tensors:
        """Name -> s; of parameters that are not tracked 0."""
        zeros = {name: torch.zeros_like(parameter) for name, parameter in self.network.named_parameters()}
        return {**zeros, **self.filters.variance}

    def looks(self, epoch: int, epochs: int) -> bool:
        """At most ten epochs of the last quarter, evenly spaced, the last one among them: a look costs a draw."""
        first, every = spread(epochs, LOOKS)
        return self.ready and epoch >= first and (epoch - first) % every == 0

    def look(self, epoch: int, epochs: int, validation: Iterable[Any]) -> DrawnFunctions | None:
        """Sampled networks, as they would be drawn at the end, but with batch statistics of the validation inputs.

        A pass over the training set for each look would cost more than the training. Statistics of the network itself
        will not do: on validation rows of digits they give an NLL of 0.73 where those of the training rows give 0.186 and
        those of the validation rows 0.185.
        """
        if not self.looks(epoch, epochs):
            return None
        with evaluation(self):
            drawn = self._particles_of(self._sampled(own_generator(self.device)))
            refresh_statistics(drawn, validation, self.device)
        return SampledFunctions(drawn)

    def sampled_names(self) -> list[str]:
        norms = norm_parameters(self.network)
        return [name for name in super().sampled_names() if name not in norms]

    def sample(self, generator: torch.Generator | None = None) -> Tensors:
        if not self.ready:
            raise ValueError(
                "expected observed steps to sample from, got none; train with fit, or call observe(optimizer) after "
                "optimizer.step()"
            )
        if (share := self.filters.memory_of_start) > 0.05:
            log.warning(
                "TRADI has observed %d steps, and %.0f %% of its mean still come from the weights it started at; train "
                "longer, or raise state_noise",
                int(self.filters.observed),
                100 * share,
            )
        return self._sampled(generator)

    def _sampled(self, generator: torch.Generator | None) -> Tensors:
        means, variances, weights = self.filters.mean, self.filters.variance, self.filters.weights
        samples = {}
        for names in self._correlated():
            flat = torch.cat([weights[name].detach().flatten() for name in names])
            noise = torch.stack([self._noise(flat, generator) for _ in range(self.samples)])  # (S, K)
            parts = torch.split(noise, [weights[name].numel() for name in names], dim=1)
            for name, part in zip(names, parts, strict=True):
                deviation = part.view(self.samples, *weights[name].shape) * variances[name].sqrt()
                samples[name] = (means[name] + deviation).to(weights[name].dtype)
        return samples

    def _correlated(self) -> list[list[str]]:
        """Names of the tensors whose weights are correlated with each other, group by group."""
        groups: dict[str, list[str]] = {}
        for name in self.filters.weights:
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

    def default_schedule(self, epochs: int) -> Callable[[int], float]:
        """Constant, linear to a tenth, constant over the last quarter: with the rate the variance would die, too."""
        return lambda epoch: constant_tail(epoch / max(epochs, 1), floor=FLOOR)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "covariance": self.covariance,
            "correlation": self.correlation,
            "state_noise": list(self.filters.state_noise),
            "measurement_noise": list(self.filters.measurement_noise),
            "drift": self.filters.drift,
            "init": self.init,
            "features": self.features,
            "bandwidth": self.bandwidth,
        }


def layer_of(name: str) -> str:
    """Name of the layer that a parameter is of; what torch's parametrizations hold apart is one layer again."""
    layer, found, _ = f".{name}".partition(".parametrizations.")
    return layer if found else layer.rpartition(".")[0]


def fan_in(network: nn.Module) -> dict[str, int]:
    """Name of a parameter -> number of inputs of its layer; a bias has its layer's."""
    fans = {}
    for prefix, layer in network.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        widths = [parameter[0].numel() for parameter in own.values() if parameter.ndim > 1]
        for name, parameter in own.items():
            width = parameter[0].numel() if parameter.ndim > 1 else widths[0] if widths else parameter.numel()
            fans[f"{prefix}.{name}" if prefix else name] = width
    return fans


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
