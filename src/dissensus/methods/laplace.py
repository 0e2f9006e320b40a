"""Laplace: a Gaussian over the last layer of a trained network, or other layers, without further training.

MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation 1992.
Daxberger, Kristiadi, Immer, Eschenhagen, Bauer & Hennig, "Laplace Redux", NeurIPS 2021.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Literal, Self, Unpack, final, get_args

import torch
from torch import Tensor, nn

from dissensus.core.batch import Batch
from dissensus.core.likelihood import Likelihood, log_prob_sum, noise_warning
from dissensus.core.member import PREFIX
from dissensus.core.networks import MethodKeywords, Networks
from dissensus.core.particles import Particles, copy_likelihood
from dissensus.core.posterior import inference_context
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.core.prior import make_prior
from dissensus.engine.loader import Loader
from dissensus.methods.parts import last_layer as last_layers
from dissensus.methods.parts.last_layer import Curvature, CurvatureSums, LinearLayer, Precision, Structure
from dissensus.methods.parts.sampling_posterior import Families, SamplingPosterior
from dissensus.numerics.randomness import next_seed, own_generator
from dissensus.utils.checks import number, one_of
from dissensus.utils.tensor_tree import Tensors

log = logging.getLogger("dissensus")

FACTORS = [10 ** (i / 2) for i in range(-4, 9)]  # of the prior precision, tried where rows are held out
LOST = 0.1  # nats per row that a fit may cost its own rows beyond what a Gaussian accounts for
APART = 0.05  # of the fitting rows, accuracy less confidence, that a fit may add to that of the network
NUMBERS = 2**24  # outputs that are looked at after a fit


@final
class Laplace(SamplingPosterior):
    """A Gaussian over the last layer of a trained network, or over chosen layers, from the curvature of the loss.

    W ~ N(W*, T (G + δ)⁻¹) for the layers' weights and biases, with G the Gauss–Newton matrix of the data at W*.
    `fit_posthoc(loader)` computes G in one pass over the data and stores a draw; `fit` first trains the network as MAP
    does and then calls it. The layers before the first sampled one run once for all samples.

    Args:
        networks: one module, not copied, or a list of M, each with its own Gaussian.
        structure: "full" keeps all of a layer's G; "kron" approximates it by a Kronecker product, for wide layers; "auto" is
            "full" for up to 11,585 weights (1 GiB), above that "kron", with a line in the log. Layers are independent.
        covariance: "rows" samples the weights of each output independently, from that output's block of the covariance;
            "joint" samples all together, exactly: softmax ignores what outputs share, so confidence changes little, better for
            networks that are calibrated already, worse for overconfident ones. Several layers are each sampled jointly.
        prior_precision: δ, or "marginal_likelihood": the δ that maximises the evidence of the examples read.
        posterior_temperature: T; below 1 a cold posterior, above 1 a hot one. δ and the evidence are computed at T = 1.
        layers: name patterns ("*lora*", or a list) of linear layers or 1×1 convolutions; None is the last layer called. For
            inner layers, and if something follows the last one (a token is selected, a map is resized), G comes from backward
            passes: exact up to 256 outputs per example, above that an unbiased estimate from 64 random directions per batch.
        samples: functions per network and draw.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`; the prior is that of `fit`, not δ.
    """

    name = "laplace"
    draw_only_settings = (
        *SamplingPosterior.draw_only_settings,
        *("structure", "covariance", "prior_precision", "posterior_temperature", "layers", "fitted"),
    )
    draw_attributes = ("stored", "curvature")
    samples_frozen = True
    own_statistics = False  # batch norm comes before the last layer; other layers' samples use the network's statistics
    shares_unsampled = True  # the other layers are stored once for all functions of a network
    curvature: nn.ModuleList | None  # one Curvature per network and layer

    def __init__(
        self,
        networks: Networks,
        *,
        structure: Structure = "auto",
        covariance: Literal["rows", "joint"] = "rows",
        prior_precision: Precision = "marginal_likelihood",
        posterior_temperature: float = 1.0,
        layers: str | Sequence[str] | None = None,
        samples: int = 300,
        **prior: Unpack[MethodKeywords],
    ) -> None:
        if getattr(prior.get("likelihood"), "class_weights", None) is not None:
            advice = "train with class_weights and MAP, then pass the network with Classification()"
            raise ValueError(f"expected a likelihood without class_weights, got some; {advice}")
        super().__init__(networks, samples=samples, **prior)
        self.structure = one_of("structure", structure, get_args(Structure))
        self.covariance = one_of("covariance", covariance, ("rows", "joint"))
        self.prior_precision = last_layers.check_precision(prior_precision)
        self.posterior_temperature = number("posterior_temperature", posterior_temperature, above=0)
        self.layers = layers if layers is None or isinstance(layers, str) else list(layers)
        self.curvature = None
        self._by_held_out = False  # whether held-out rows chose the prior precision

    def fit_posthoc(
        self, loader: Iterable[Any], *, data_size: int | None = None, held_out: Iterable[Any] | None = None
    ) -> Self:
        """Fits the Gaussian at the present weights, chooses the prior precision, stores a draw, and returns the posterior.

        Warns where the fit makes rows of the loader's first batch much less likely, or less sure than right, than the network.

        Args:
            loader: batches (x, y) or (x, y, weight) of the training data; example weights are used.
            data_size: number of examples the network was trained on; if the loader holds part of them, G is scaled to it, the
                evidence is not. None is the posterior's own `data_size`; without one the length of the data set, if a
                DataLoader's sampler or `Subset` reads less than half of it, with a warning; else the examples in the loader.
            held_out: batches of data that the network was not trained on. δ is multiplied by the factor from 0.01 to 10,000
                that gives them the highest likelihood; a large factor leaves the network's own predictions. `ds.refresh` keeps
                the choice; after `ds.load` call this again instead.
        """
        make_prior(data_size=data_size)
        data = Loader.for_posterior(loader, self)
        return self._fit_gaussian(data, data_size or self.data_size or dataset_size(data), held_out)

    def _fit_gaussian(
        self, loader: Iterable[Any], data_size: int | None, held_out: Iterable[Any] | None = None
    ) -> Self:
        """As `fit_posthoc`, with the number of examples in the loader where data_size is None."""
        loader = Loader.complete(loader, self)
        if held_out is not None:
            held_out = Loader.complete(held_out, self)
        self.to(self.device)  # the parameters of the likelihood may be on another device than the network
        self._known.warn_once(noise_warning(self.particles))  # curvature and evidence depend on the noise
        with inference_context(self):
            curvature, first, rows = self._gather_curvatures(loader, data_size)
        before, self.curvature = (self.curvature, self.stored), nn.ModuleList(curvature)
        try:
            self._set_precision(self.prior_precision)
            self.stored = self.sample_families()
            if held_out is not None:
                self._scale_precision(held_out)
        except BaseException:
            self.curvature, self.stored = before
            raise
        self.uncalibrate("fit_posthoc")
        self._by_held_out = held_out is not None
        if held_out is None:
            self._warn_if_unsure(first, rows)
        return self

    def store_draw(self, loader: Iterable[Any]) -> None:
        kept = [curvature.precision.clone() for curvature in self._fitted_curvatures()] if self._by_held_out else []
        self._fit_gaussian(loader, self.data_size)  # `fit` has trained on the loader itself
        if kept:
            self._redraw(kept)
            self._by_held_out = True

    def use_prior_precision(self, prior_precision: Precision) -> None:
        """Replaces the stored draw, without data, by one with this prior precision: a number, or "marginal_likelihood"."""
        last_layers.check_precision(prior_precision)
        self._set_precision(prior_precision)
        self.prior_precision = prior_precision
        self._redraw()
        self.uncalibrate("another prior precision")

    def _set_precision(self, prior_precision: Precision) -> None:
        for mine in self._curvatures_by_network():
            found = last_layers.resolve_precision(prior_precision, mine)
            for curvature in mine:
                curvature.precision.fill_(found)

    def _redraw(self, precisions: Sequence[Tensor] = (), seed: int | None = None) -> None:
        """Replaces the stored draw by one with these prior precisions, or with the present ones; a seed is a draw's noise."""
        for curvature, precision in zip(self._fitted_curvatures(), precisions, strict=False):
            curvature.precision.copy_(precision)
        assert self.stored is not None  # stored and dropped together with the curvature
        # The network may have been trained since: the new last layers get the earlier layers of the stored draw. Functions
        # drawn before do not change.
        generator = own_generator(self.device) if seed is None else torch.Generator(self.device).manual_seed(seed)
        families, samples = [], self.sample(self.samples, generator)
        for m, family in enumerate(self.stored.each):
            own = copy.deepcopy(family.own)
            for name, sampled in samples.items():
                own.get_buffer(f"{PREFIX}{name}").copy_(sampled[m])
            families.append(Particles(family.copy_template(), own=own, shared=family.shared, members=family.members))
        self.stored = Families(families)

    def _scale_precision(self, held_out: Iterable[Any]) -> None:
        """Multiplies the prior precisions by the factor under which held-out rows are likeliest, and draws anew."""
        precisions, seed = [curvature.precision.clone() for curvature in self._fitted_curvatures()], next_seed()

        def score(factor: float) -> float:  # of the same noise for all, which is kept with the best
            self._redraw([factor * precision for precision in precisions], seed)
            functions, batches = self.draw(), map(self.prepare_batch, self.read(held_out, anywhere=True))
            return self._mean_log_prob((functions.predict(batch.x), batch) for batch in batches)

        scores = [score(factor) for factor in FACTORS]
        if any(map(math.isnan, scores)):
            raise ValueError("expected held-out rows that count, got none on a later reading; pass a loader with data")
        best = FACTORS[scores.index(max(scores))]
        self._redraw([best * precision for precision in precisions], seed)

    def _warn_if_unsure(self, batch: Batch, rows: float) -> None:
        """Warns where the batch, of the training data, is much less likely under the draw than under the network."""
        outputs = self.samples * self.particles.members * math.prod(self.output_shape(batch.x)[1:])
        most, size = max(1, NUMBERS // outputs), batch.size
        some = batch.map(lambda tensor: tensor[:most] if tensor.ndim and len(tensor) == size else tensor)
        with inference_context(self):
            plain, drawn = (functions.predict(some.x) for functions in (self.current(), self.draw()))
        network, fitted = (self._mean_log_prob([(predictive, some)]) for predictive in (plain, drawn))
        # Where −log p is quadratic, the mean over W ~ N(W*, T (G + δ)⁻¹) costs T/2 tr G (G + δ)⁻¹ of all rows; the log of
        # a mean is no less than the mean of logs.
        shares = (c.eigenvalues / (c.eigenvalues + c.precision) for c in self._fitted_curvatures())
        effective = sum(float(share.sum()) for share in shares) / self.particles.members
        if network - fitted > LOST + 0.5 * self.posterior_temperature * effective / rows:
            log.warning(
                "Laplace gives its own training rows a mean log-probability of %.3f, the network alone %.3f: it is too unsure, "
                "unless new rows are that hard for the network (prior precision %.3g); let held-out rows choose a higher one, "
                "fit_posthoc(loader, held_out=held_out_loader)",
                *(fitted, network, self.precision),
            )
        elif (gap := self._underconfidence(drawn, some)) > APART + max(0.0, self._underconfidence(plain, some)):
            log.warning(
                "on its own training rows Laplace is right %.3f more often than it is confident (prior precision %.3g): it is "
                "too unsure; pass data_size= if the loader holds a part of the training data, or let held-out rows choose a "
                "higher precision, fit_posthoc(loader, held_out=held_out_loader)", gap, self.precision,
            )  # fmt: skip

    def _underconfidence(self, predictive: Predictive, batch: Batch) -> float:
        """Accuracy less mean confidence of rows that count; 0 unless their targets are classes."""
        if not isinstance(predictive, CategoricalPredictive) or batch.y.shape != predictive.confidence.shape:
            return 0.0
        counted = self.likelihood.target_mask(batch.y)
        apart = (predictive.log_mean.argmax(predictive.class_axis) == batch.y).double() - predictive.confidence.double()
        return float((apart if counted is None else apart[counted]).mean())

    def _mean_log_prob(self, predicted: Iterable[tuple[Predictive, Batch]]) -> float:
        """Mean over rows that count of the log-probability of targets under the mixture."""
        total = weight = torch.zeros((), dtype=torch.float64, device=self.device)
        with inference_context(self):
            for predictive, batch in predicted:
                found, counted = log_prob_sum(self.likelihood, predictive, batch.y, batch.weight)
                total, weight = total + found, weight + counted
        return float(total / weight)

    @property
    def precision(self) -> float:
        """δ in use: as given, or chosen by the evidence; the mean over a list of networks."""
        return fmean(float(curvature.precision) for curvature in self._fitted_curvatures())

    def extra_repr(self) -> str:
        if self.curvature is None:
            return ""
        fitted = zip(self._fitted_layers(), self._curvatures_by_network()[0], strict=True)
        each = (f"layer '{layer.name}' ({one.structure}, {one.mean.numel():,} weights)" for layer, one in fitted)
        return f"fitted to {', '.join(each)}, prior precision {self.precision:.3g}"

    def log_marginal_likelihood(self, prior_precision: float | Tensor | None = None) -> Tensor:
        """() log evidence of the examples read, in nats; (M,) for a list of networks.

        It is exact for a linear network with fixed noise, at its mode.

        Args:
            prior_precision: δ; None is the one in use. For a tensor the result can be differentiated with respect to it.
        """
        if prior_precision is not None and not isinstance(prior_precision, Tensor):
            number("prior_precision", prior_precision, above=0)

        def evidence(one: Curvature) -> Tensor:  # of several layers, the first has the log-likelihood
            precision = one.precision if prior_precision is None else torch.as_tensor(prior_precision).to(one.precision)
            return one.log_marginal_likelihood(precision)

        each = [torch.stack([evidence(one) for one in mine]).sum() for mine in self._curvatures_by_network()]
        return torch.stack(each) if self.built_with.own else each[0]

    @property
    def mean(self) -> Tensors:
        """Name -> mean of a sampled weight or bias; (M, ...) for a list of networks."""
        return self.public_tensors(self._map_curvatures(lambda curvature: curvature.mean))

    @property
    def variance(self) -> Tensors:
        """Name -> marginal variance of a sampled weight or bias; (M, ...) for a list of networks."""
        found = self._map_curvatures(lambda curvature: self.posterior_temperature * curvature.variance())
        return self.public_tensors(found)

    def sampled_names(self) -> list[str]:
        return [] if self.curvature is None else [name for layer in self._fitted_layers() for name in layer.parameters]

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        rows = self.covariance == "rows" and len(self._fitted_layers()) == 1

        def around(one: Curvature) -> Tensor:
            noise = torch.randn(samples, *one.mean.shape, dtype=one.mean.dtype, device=self.device, generator=generator)
            deviations = one.sample_rows(noise) if rows else one.sample_joint(noise)
            return one.mean + math.sqrt(self.posterior_temperature) * deviations

        return self._map_curvatures(around)

    def _map_curvatures(self, function: Callable[[Curvature], Tensor]) -> Tensors:
        """Name -> (M, ...) tensors from a matrix of weights for every curvature."""
        found: Tensors = {}
        for layer, mine in zip(self._fitted_layers(), zip(*self._curvatures_by_network(), strict=True), strict=True):
            found |= layer.tensors(torch.stack([function(one) for one in mine]))
        return found

    def _gather_curvatures(self, loader: Iterable[Any], data_size: int | None) -> tuple[list[Curvature], Batch, float]:
        """(curvature of each network for `data_size` examples, first batch, number of examples); no precision is chosen yet."""
        particles = self.particles
        members = [(self.network, self.likelihood)]
        if self.built_with.own:
            members = [(particles.member(m), copy_likelihood(particles, m)) for m in range(particles.members)]
        gathered: list[tuple[list[LinearLayer], list[CurvatureSums]]] = []
        seen, first = 0.0, None
        for given in self.read(loader, anywhere=True):
            if given.size == 0:
                continue
            batch = self.prepare_batch(given)
            first = batch if first is None else first
            for network, _ in members[len(gathered) :]:
                layers = last_layers.choose_layers(network, batch.x, self.layers)
                each = [CurvatureSums(self.structure, layer.mean.shape, self.device) for layer in layers]
                if self.structure == "auto" and not gathered and any(sums.structure == "kron" for sums in each):
                    log.info("Laplace takes structure='kron' where a full curvature would exceed 1 GiB")
                gathered.append((layers, each))
            seen += batch.size * (1.0 if batch.weight is None else float(batch.weight.double().mean()))
            for (network, likelihood), (layers, sums) in zip(members, gathered, strict=True):
                last_layers.add_batch_curvature(sums, network, likelihood, layers, batch)
        if first is None or not bool(gathered[0][1][0].rows > 0):
            raise ValueError("expected at least one example with a weight above 0, got none; pass the training loader")
        times = (data_size or seen) / seen
        curvatures = [
            Curvature.from_sums(one, layer.mean, layer=list(network.modules()).index(layer.layer), times=times)
            for (network, _), (layers, sums) in zip(members, gathered, strict=True)
            for layer, one in zip(layers, sums, strict=True)
        ]
        return curvatures, first, times * float(gathered[0][1][0].rows)

    def _fitted_layers(self) -> list[LinearLayer]:
        return [self._layer_at(int(curvature.layer)) for curvature in self._curvatures_by_network()[0]]

    def _layer_at(self, number: int) -> LinearLayer:
        """Module number `number` with the first network's parameters (a stack's template has empty ones)."""
        name, layer = list(self.network.named_modules())[number]
        one = self.built_with.first_member()
        return LinearLayer(name, layer, {k: one[k] for k in last_layers.parameter_names(name, layer)})

    def _curvatures_by_network(self) -> list[list[Curvature]]:
        """The curvatures of each network, one per layer."""
        each = self._fitted_curvatures()
        layers = len(each) // self.particles.members
        return [each[start : start + layers] for start in range(0, len(each), layers)]

    def _fitted_curvatures(self) -> list[Curvature]:
        if self.curvature is None:
            raise ValueError("expected a fitted Laplace, got one that has seen no data; call fit_posthoc(loader)")
        return list(self.curvature)  # type: ignore[arg-type]

    def config(self) -> dict[str, Any]:
        fitted = None if self.curvature is None else [int(c.layer) for c in self._curvatures_by_network()[0]]
        return {**super().config(), "fitted": fitted}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Self:
        fitted = config["fitted"]
        plain = {key: value for key, value in config.items() if key != "fitted"} | {"stored": None}
        posterior = super().skeleton(network, plain, likelihood)
        if fitted is not None:
            each = ((posterior._layer_at(n).mean.shape, n) for n in fitted * posterior.particles.members)
            blanks = (Curvature.blank(posterior.structure, *shape, layer=n) for shape, n in each)
            posterior.curvature = nn.ModuleList(blanks)
            posterior.stored = posterior.blank_draw(config["stored"], {})
        return posterior

    def blank_draw(self, sizes: Sequence[int], state: Tensors) -> Families:
        each: dict[str, Tensors] = {}
        for name in state:
            room, _, rest = name.partition(".")
            number, _, key = rest.partition(".")
            if room == "curvature":
                each.setdefault(number, {})[key] = state[name].detach().clone().to(self.device)
        if state:
            self.curvature = nn.ModuleList(Curvature(each[number]) for number in sorted(each, key=int))
        return super().blank_draw(sizes, state)


def dataset_size(loader: Loader) -> int | None:
    """Rows of the data set of which a DataLoader's sampler or `Subset` reads less than half, with a warning; else None."""
    read, count = loader.row_counts or (0, 0)
    if not 0 < 2 * read < count:
        return None
    log.warning(
        "the loader reads %d of %d rows, so Laplace counts each %.3g times; pass data_size=%d if the network was trained on "
        "these alone", read, count, count / read, read,
    )  # fmt: skip
    return count
