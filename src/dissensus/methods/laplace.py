"""Laplace: a trained network made Bayesian in its last layer, without training it any further.

MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation 1992.
Daxberger, Kristiadi, Immer, Eschenhagen, Bauer & Hennig, "Laplace Redux", NeurIPS 2021.
"""

import copy
import logging
from collections.abc import Iterable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core import noise
from dissensus.core.batch import Inputs
from dissensus.core.inputs import check_loader
from dissensus.core.likelihood import Likelihood, Regression, spread
from dissensus.core.particles import Particles
from dissensus.core.posterior import evaluation
from dissensus.core.prior import check_prior
from dissensus.methods.curvature import (
    STRUCTURES,
    Curvature,
    Gathered,
    Structure,
    check_known,
    output_curvature,
)
from dissensus.methods.last_layer import LastLayer, check_outputs, last_layer, watching
from dissensus.methods.sampling import SamplingPosterior
from dissensus.numerics.checks import is_finite
from dissensus.numerics.randomness import own_generator
from dissensus.numerics.tree import Tensors

log = logging.getLogger("dissensus")

Precision = float | Literal["marginal_likelihood"]


class Laplace(SamplingPosterior):
    """W ~ N(W*, (G + δ)⁻¹) for the last layer's weights and biases, with G the Gauss–Newton matrix of the data at W*.

    `fit_posthoc(loader)` finds G, in one pass, and stores a draw; `fit` trains the network as MAP does and calls it at its
    end. `structure`: G whole ("full") or as a Kronecker product ("kron"), for wide layers. `covariance`: "rows" samples the
    weights of each output by themselves, from their own block of the covariance, "joint" all together. Softmax does not
    see what all outputs have in common, and a sharp network stays nearly as sure as it was in "joint"; "rows" is what the
    usual probit formula, which reads the variances of outputs alone, stands for. `prior_precision`: δ, or
    "marginal_likelihood": the δ of the largest evidence. `layer`: the name of the last layer, a linear one or a 1×1
    convolution, where it should not be found by running. The rest of the network runs once for all samples.
    """

    name = "laplace"
    untrained = (*SamplingPosterior.untrained, "structure", "covariance", "prior_precision", "layer", "fitted")
    samples_frozen = True
    own_statistics = False  # the last layer comes after all of them
    curvature: Curvature | None

    def __init__(
        self,
        module: nn.Module,
        *,
        structure: Structure = "full",
        covariance: Literal["rows", "joint"] = "rows",
        prior_precision: Precision = "marginal_likelihood",
        layer: str | None = None,
        samples: int = 300,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        if structure not in STRUCTURES:
            raise ValueError(f'expected a structure of "full" or "kron", got {structure!r}; name one of them')
        if covariance not in ("rows", "joint"):
            raise ValueError(f'expected a covariance of "rows" or "joint", got {covariance!r}; name one of them')
        check_precision(prior_precision)
        super().__init__(
            module, samples=samples, likelihood=likelihood, weight_prior_std=weight_prior_std, data_size=data_size
        )
        check_known(self.likelihood)
        self.structure: Structure = structure
        self.covariance = covariance
        self.prior_precision: Precision = prior_precision
        self.layer = layer
        self.curvature = None

    def fit_posthoc(self, loader: Iterable[Any], *, data_size: int | None = None) -> Self:
        """This, fitted: curvature of the data in the loader at the network as it is, a prior precision, and a stored draw.

        The data are those that the network was trained on; weights of examples count. `data_size`: how many there are, where
        the loader gives a part of them: sums are scaled to it. None: the posterior's own, or each example of the loader once.
        """
        check_loader(loader)
        check_prior(None, data_size)
        self.to(self.device)  # a likelihood that learns its noise may not be where the network is
        self._known.doubt(noise.doubt(self.particles))  # curvature and evidence rest on it
        with evaluation(self):
            curvature = self._gathered(loader, data_size or self.data_size)
        curvature.precision.fill_(chosen(self.prior_precision, curvature))
        before, self.curvature = self.curvature, curvature
        try:
            with torch.no_grad():
                self.stored = self._particles_of(self.sample(own_generator(self.device)))
        except BaseException:
            self.curvature = before
            raise
        self.reset_temperature("fit_posthoc")
        return self

    def store_draw(self, loader: Iterable[Any]) -> None:
        self.fit_posthoc(loader)

    def use_prior_precision(self, prior_precision: Precision) -> None:
        """Draws anew with another prior precision; no data are needed."""
        check_precision(prior_precision)
        curvature, stored = self._fitted()
        curvature.precision.fill_(chosen(prior_precision, curvature))
        self.prior_precision = prior_precision
        # The network may have been trained since: around the new last layers is what was around the old ones. Functions
        # that were drawn from those stay as they are.
        own = copy.deepcopy(stored.own)
        for name, sampled in self.sample(own_generator(self.device)).items():
            own.get_buffer(f"network.{name}").copy_(sampled)
        self.stored = Particles(stored.copied_template(), own=own, shared=stored.shared, members=stored.members)
        self.reset_temperature("another prior precision")

    @property
    def precision(self) -> float:
        """δ in use: the one that was given, or found by the evidence."""
        return float(self._fitted()[0].precision)

    def log_marginal_likelihood(self, prior_precision: float | Tensor | None = None) -> Tensor:
        """() log evidence of the data that this was fitted to, in nats, at its prior precision or at another.

        Differentiable where that is a tensor. For a linear network with fixed noise at its mode it is exact.
        """
        curvature = self._fitted()[0]
        precision = curvature.precision if prior_precision is None else prior_precision
        if not isinstance(precision, Tensor):
            check_precision(precision)
        return curvature.log_marginal_likelihood(torch.as_tensor(precision).to(curvature.precision))

    @property
    def mean(self) -> Tensors:
        """Name -> the mean of the last layer's weights and biases."""
        return self._last().tensors(self._fitted()[0].mean)

    @property
    def variance(self) -> Tensors:
        """Name -> their marginal variances."""
        return self._last().tensors(self._fitted()[0].variance())

    def sampled_names(self) -> list[str]:
        return list(self._last().parameters)

    def sample(self, generator: torch.Generator | None = None) -> Tensors:
        curvature, _ = self._fitted(stored=False)
        mean = curvature.mean
        noise = torch.randn(self.samples, *mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        deviations = curvature.joint(noise) if self.covariance == "joint" else curvature.by_rows(noise)
        return self._last().tensors(mean + deviations)

    def _gathered(self, loader: Iterable[Any], data_size: int | None) -> Curvature:
        """The curvature of the data in the loader, as many as `data_size` says; its precision not chosen yet."""
        last: LastLayer | None = None
        rows = 0.0
        for batch in loader:
            x, y, weight = batches.unpack(batch)
            if batches.size(x) == 0:
                continue
            batches.check_finite(x, anywhere=True)
            x = batches.to(x, self.device)
            self.check_batch(x, y)
            if last is None:
                last = last_layer(self.network, x, self.layer)
                mean = last.matrix(last.parameters).detach()
                gathered = Gathered(self.structure, mean.shape[0], mean.shape[1], self.device)
            rows += batches.size(x) * (1.0 if weight is None else float(weight.double().mean()))
            self._gather(gathered, last, x, y.to(self.device), None if weight is None else weight.to(self.device))
        if last is None or not bool(gathered.weight > 0):
            raise ValueError("expected at least one example that counts, got none; pass the training loader")
        if data_size is not None:
            torch._foreach_mul_([*gathered.sums, gathered.log_likelihood, gathered.weight], data_size / rows)
        return Curvature.of(gathered, mean, layer=list(self.network.modules()).index(last.layer))

    def _gather(self, gathered: Gathered, last: LastLayer, x: Inputs, y: Tensor, weight: Tensor | None) -> None:
        """Adds what one batch has to say."""
        with watching(last) as seen, batches.unchanged(x):
            outputs = batches.call(self.network, x)
        if len(seen) != 1:  # the layer was found with the first batch
            raise ValueError(
                f"expected a last layer that every batch passes once, got '{last.name}' called {len(seen)} times in one; "
                "outputs are then not linear in its weights: give the network one last layer"
            )
        features, made = seen[0]
        if not bool(outputs.isfinite().all()):
            raise ValueError("expected finite outputs, got NaN or infinity; fit a network that is whole")
        check_outputs(last, made, outputs)
        if last.channels == -1 and made.ndim > 2 and not isinstance(self.likelihood, Regression):
            raise ValueError(
                f"expected outputs (B, C) of the last layer '{last.name}', got {tuple(made.shape)}, whose axis 1 is not the "
                "layer's; let a 1×1 convolution make outputs at positions"
            )
        counted = self.likelihood.counted(y)
        log_prob = self.likelihood.log_prob(outputs.double(), y if counted is None else torch.where(counted, y, 0))
        w = torch.ones_like(log_prob) if weight is None else spread(weight, log_prob)
        if counted is not None:
            w = w * counted
        gathered.log_likelihood += (w * log_prob).sum()
        positions = made.select(last.channels, 0)  # (B, ...)
        phi, rows = last.rows(features, made)  # (n, D), (n, C)
        w = w.reshape(*w.shape, *[1] * (positions.ndim - w.ndim)).expand_as(positions)
        gathered.add(phi, *output_curvature(self.likelihood, rows), w.reshape(-1).double())

    def _last(self) -> LastLayer:
        number = int(self._fitted(stored=False)[0].layer)
        name, layer = list(self.network.named_modules())[number]
        return LastLayer(name, layer)

    def _fitted(self, *, stored: bool = True) -> tuple[Curvature, Particles]:
        if self.curvature is None or (stored and self.stored is None):
            raise ValueError(
                "expected a Laplace that was fitted, got one that has seen no data; call fit_posthoc(loader) with the "
                "training data of the network"
            )
        return self.curvature, self.stored  # type: ignore[return-value]

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "structure": self.structure,
            "covariance": self.covariance,
            "prior_precision": self.prior_precision,
            "layer": self.layer,
            "fitted": None if self.curvature is None else int(self.curvature.layer),
        }

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "Laplace":
        number = config.get("fitted")
        plain = {key: value for key, value in config.items() if key != "fitted"}
        posterior = super().skeleton(network, {**plain, "stored": False}, likelihood)
        assert isinstance(posterior, Laplace)
        if (number is not None) != bool(config.get("stored")):
            raise ValueError(
                f"expected fitted and stored together, got {number!r} and {config.get('stored')!r}; save it again"
            )
        if number is not None:
            name, layer = list(network.named_modules())[number]
            last = LastLayer(name, layer)
            shape = last.matrix(last.parameters).shape
            posterior.curvature = Curvature.blank(posterior.structure, *shape, layer=number)
            posterior.stored = posterior._blank()
        return posterior

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """A state with a stored draw brings its curvature along, one without takes it away."""
        under = f"{prefix}curvature."
        held = {key.removeprefix(under): state_dict[key] for key in state_dict if key.startswith(under)}
        if not any(key.startswith(f"{prefix}stored.") for key in state_dict):
            self.curvature = None
            for name in held:
                del state_dict[f"{under}{name}"]
        elif held:
            self.curvature = Curvature({name: t.detach().clone().to(self.device) for name, t in held.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_precision(prior_precision: object) -> None:
    if prior_precision != "marginal_likelihood" and not (is_finite(prior_precision) and prior_precision > 0):
        raise ValueError(
            f'expected a prior precision above 0 or "marginal_likelihood", got {prior_precision!r}; pass 1/σ² of N(0, σ²)'
        )


def chosen(prior_precision: Precision, curvature: Curvature) -> float:
    """The prior precision as a number."""
    return curvature.best_precision() if prior_precision == "marginal_likelihood" else float(prior_precision)
