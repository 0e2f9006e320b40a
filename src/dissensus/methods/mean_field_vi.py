"""Mean-field variational inference: a mean and a standard deviation for every weight.

Blundell, Cornebise, Kavukcuoglu & Wierstra, "Weight uncertainty in neural networks", ICML 2015 (Bayes by backprop).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Unpack, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.member import PREFIX
from dissensus.core.member_runner import first_line
from dissensus.core.networks import networks_to_convert
from dissensus.core.particles import Member, Particles
from dissensus.core.posterior import inference_context
from dissensus.core.prior import GaussianPrior, PriorKeywords, make_prior, names_under_prior
from dissensus.core.trainable import annealing_weight
from dissensus.layers.conversion import ConversionReport, convert_layer, convertible_copy, restore_plain_layers
from dissensus.layers.factored import Kernel, can_take_kernel, features
from dissensus.layers.nodes import NodeLayer, record_outputs, set_temporarily
from dissensus.methods.parts.node_latents import inverse_softplus, repeat_inputs
from dissensus.methods.parts.sampling_posterior import SamplingPosterior, sample_normal, stack_networks
from dissensus.numerics.annealing import Annealing, annealing_or_constant
from dissensus.numerics.flat_weights import at_least_float32
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.checks import integer, number
from dissensus.utils.parameter_groups import Group
from dissensus.utils.tensor_tree import TensorPlaces, Tensors, TensorTree

log = logging.getLogger("dissensus")
LOOKS = 8


@final
class MeanFieldVI(SamplingPosterior):
    """An independent Gaussian q(w) = Π N(μ, σ²) over weights and biases, trained on the evidence lower bound.

        loss = E_q[mean −log p(y | x, w)] + β [H[q, p] − T H[q]] / N,    p(w) = Π N(0, prior std²)

    At T = 1 the bracket is KL(q ‖ p), in closed form. The network is copied, and its weights are the starting means, so
    a trained network can be used. Norm layers and other tensors without a prior stay point estimates.

    Every example has its own noise in layers that each example passes once: linear layers draw their outputs (local
    reparametrisation), convolutions use flipout. Everywhere else (embeddings, attention, layers called twice, custom
    layers) one draw of the weights is used for the whole batch. After the first batch, `.account` lists them.

    Args:
        networks: one module, or a list of M; each network has its own posterior and gives `samples` functions.
        init_std: σ at the start. It takes many steps to converge; a draw stored too early gives a warning.
        posterior_temperature: T; below 1 a cold posterior, above 1 a hot one.
        train_samples: forward passes per batch, each with its own noise; their losses are averaged.
        samples: functions per network and draw.
        annealing: β; None is constant 1.
        deviation_lr: learning rate of σ; None is that of the means.
        prior, weight_prior_std: the prior on the weights: a `GaussianPrior`, or its standard deviation as one number or
            a table by tensor names; N(0, 1) by default. Weights under the prior get no weight decay.
        data_size: N, required.
        likelihood: as in `Posterior`.
    """

    name = "mean_field_vi"
    needed = ("data_size",)

    def __init__(
        self,
        networks: nn.Module | Sequence[nn.Module],
        *,
        init_std: float = 0.01,
        posterior_temperature: float = 1.0,
        train_samples: int = 1,
        samples: int = 30,
        annealing: Annealing | None = None,
        deviation_lr: float | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        number("init_std", init_std, above=0)
        if prior.get("prior") is None and prior.get("weight_prior_std") is None:
            prior["weight_prior_std"] = 1.0
        each, one = networks_to_convert(networks)
        cut = [perturbed_copy(network) for network in each]
        latents, first = TensorTree(), cut[0][0]
        trained = {name: p for name, p in first.named_parameters() if p.requires_grad}
        under_prior = names_under_prior(_expect_gaussian(make_prior(**prior)), first, trained)
        spread_names = [name for name in trained if name in under_prior]
        for name in spread_names:
            raw = inverse_softplus(torch.full_like(trained[name].detach(), init_std))
            latents.add_tensor(f"{name}.raw_std", nn.Parameter(raw))
        given = first if one else [network for network, _ in cut]
        super().__init__(given, samples=samples, likelihood=likelihood, latents=latents, **prior)
        self.spread, self.account = spread_names, cut[0][1]
        self.init_std, self.train_samples = init_std, integer("train_samples", train_samples)
        self.posterior_temperature = number("posterior_temperature", posterior_temperature, above=0)
        self.annealing = annealing_or_constant(annealing)
        self.deviation_lr = None if deviation_lr is None else number("deviation_lr", deviation_lr, above=0)
        # Shapes of inputs -> layers where every example has its own noise
        self._apart: dict[tuple[torch.Size, ...], list[str]] = {}
        self._layers: list[str] = []

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        std = {name: F.softplus(params[_raw_std_name(name)]) for name in self.spread}
        total: Tensor | float = 0.0
        for _ in range(self.train_samples):
            noise = {name: each * torch.randn_like(each) for name, each in std.items()}
            # This one draw is used wherever noise is not drawn per example, also for weights read outside their layer.
            drawn = {**params, **{PREFIX + name: params[PREFIX + name] + each for name, each in noise.items()}}
            spreads = [_layer_spread(layer, params, std, noise) for layer in self._layers]

            def nll(member: Member, spreads: list[WeightSpread] = spreads) -> Tensor:
                with set_temporarily([member.network.get_submodule(name) for name in self._layers], "nodes", spreads):
                    return member.nll(batch)

            value, buffers = self.particles.call(nll, drawn, buffers)
            total = total + value / self.train_samples
        assert self.data_size is not None  # checked in the constructor
        mean = {name: params[PREFIX + name] for name in self.spread}
        cost = self._cross_entropy(mean, std) - self.posterior_temperature * _entropy(std)
        return total + annealing_weight(self, self.annealing) * cost / self.data_size, (), buffers

    def _cross_entropy(self, mean: Tensors, std: Tensors) -> Tensor:
        """() H[q, p] = Σ ½ log 2πs² + (μ² + σ²) / 2s²."""
        prior, terms = _expect_gaussian(self.prior), []
        for name in self.spread:
            scale = prior.deviation(name)
            assert scale is not None  # checked before the step
            squares = (at_least_float32(mean[name]).square() + at_least_float32(std[name]).square()).sum()
            terms.append(squares / (2 * scale**2) + 0.5 * math.log(2 * math.pi * scale**2) * mean[name].numel())
        return torch.stack(terms).sum()

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        covered = {name.removeprefix(PREFIX) for name in self.names_with_prior()}
        if not covered.issuperset(self.spread):
            lost = next(name for name in self.spread if name not in covered)
            advice = "its deviation would grow without bound: call use_prior(GaussianPrior(std))"
            raise ValueError(f"expected a Gaussian prior on every learned deviation, got none on '{lost}'; {advice}")
        shapes = tuple(tensor.shape[1:] for tensor in batches.input_tensors(batch.x))
        if shapes not in self._apart and batches.count_examples(batch.x):
            with inference_context(self):
                self._apart[shapes] = found = self._layers_called_once(batch.x)
            for name in self.account.converted.keys() - found:
                del self.account.converted[name]
                shared = "one weight draw per batch: tied, or not called exactly once per example"
                why = shared if self._has_deviation(name) else "a point estimate: frozen, or no prior"
                self.account.left[name] = why
        self._layers = self._apart.get(shapes, [])

    def _layers_called_once(self, x: Inputs) -> list[str]:
        """Layers that each example passes once, and that share no tensor: a second call must use the same weights."""
        particles = self.particles
        tied = {each for pair in TensorPlaces(particles.template.network).tied.items() for each in pair}
        layers = [n for n, layer in particles.template.network.named_modules() if isinstance(layer, PerturbedLayer)]
        names = [n for n in layers if self._has_deviation(n) and not tied.intersection(_tensor_names(n))]

        def lengths(rows: int) -> list[list[int]]:
            """For each layer, the number of rows it returned in every call."""

            def run(member: Member) -> list[list[int]]:
                layers: Any = [member.network.get_submodule(name) for name in names]
                with record_outputs(layers):
                    batches.call_network(member.network, repeat_inputs(x, rows, first=1))
                    return [[len(outputs) for outputs, _ in layer.seen] for layer in layers]

            return particles.call_first(run)

        try:
            two, three = lengths(2), lengths(3)
            with preserve_random_state(self.device):
                particles.train()  # in training mode a layer may be called more often
                training = lengths(3)
        except Exception as error:  # some networks fail on a batch of one example repeated two or three times
            why = "the network fails on two examples"
            log.info("one weight draw per batch for all layers: %s (%s)", why, first_line(error))
            return []
        rows = zip(names, two, three, training, strict=True)
        return [name for name, *each in rows if each[:2] == [[2], [3]] and each[2] in ([], [3])]

    def _has_deviation(self, layer: str) -> bool:
        return any(name in self.spread for name in _tensor_names(layer))

    @property
    def mean(self) -> Tensors:
        """Name -> μ; (M, ...) for a list of networks."""
        return self.public_tensors(self.trained.filter_tensors(lambda name, _: name in self.spread).rows())

    @property
    def variance(self) -> Tensors:
        """Name -> σ²; (M, ...) for a list of networks."""
        return self.public_tensors({name: std.square() for name, std in self._deviations().items()})

    def kl(self) -> Tensor:
        """() KL(q ‖ p) in nats, not divided by N; (M,) for a list of networks."""
        return self._per_network(lambda mean, std: self._cross_entropy(mean, std) - _entropy(std))

    def entropy(self) -> Tensor:
        """() H[q] in nats; (M,) for a list of networks."""
        return self._per_network(lambda _, std: _entropy(std))

    def _per_network(self, function: Any) -> Tensor:
        means, stds = self.trained.rows(), self._deviations()
        members = range(self.particles.members)
        each = [function(*({n: rows[n][m] for n in self.spread} for rows in (means, stds))) for m in members]
        return torch.stack(each) if self.built_with.own else each[0]

    def _deviations(self) -> Tensors:
        """Name -> (M, ...) σ, detached."""
        own, shared = self.particles.own_parameters(), self.particles.shared_parameters()
        raw = {name: own[key] if (key := _raw_std_name(name)) in own else shared[key][None] for name in self.spread}
        return {name: F.softplus(each.detach()) for name, each in raw.items()}

    def groups(self) -> list[Group]:
        *others, noise = super().groups()
        deviations = next(group.parameters for group in others if group.name == "latents")
        drawn = "pulls standard deviations towards log 2"
        mine = Group("deviations", deviations, rate=self.deviation_lr, decay=False, decayed=drawn, prior=False)
        return [*others, mine, noise]

    def store_draw(self, loader: Iterable[Any]) -> None:
        super().store_draw(loader)
        if self._deviations_grow(loader):
            found = torch.cat([each.flatten() for each in self._deviations().values()]).median()
            size = f"{float(found):.2g} ({self.init_std:.2g} at the start)"
            fix = "train longer, or pass a larger deviation_lr"
            log.warning("the standard deviations have not converged: their median is %s and still grows; %s", size, fix)

    def _deviations_grow(self, loader: Iterable[Any]) -> bool:
        """Whether σ clearly still grows, measured on one batch."""
        if self.annealing.schedule != "constant" and (self.annealing.steps or self.run_length) is None:
            return False  # β is unknown before a run begins
        with inference_context(self), preserve_random_state(self.device), torch.inference_mode(False):
            batch, weight = next(iter(self.read(loader)), None), float(annealing_weight(self, self.annealing))
            if batch is None or weight == 0:
                return False
            try:
                with torch.enable_grad():
                    found = [self._deviation_growth(self.prepare_batch(batch)) for _ in range(LOOKS)]
            except torch.OutOfMemoryError:  # a batch that fits in half precision may not fit here
                return False
        each = torch.stack(found) / weight
        return float(each.mean() - 2 * each.std() / LOOKS**0.5) > 0.5

    def _deviation_growth(self, batch: Batch) -> Tensor:
        """() −N ∂loss/∂log σ / T, mean over weights: 0 at the optimum, 1 where σ is too small for data or prior to matter."""
        params, buffers = self.particles.member_tensors(0)
        fixed = {name: each.detach() for name, each in params.items()}
        raw = {name: fixed[name].clone().requires_grad_() for name in map(_raw_std_name, self.spread)}
        slopes = torch.autograd.grad(self.member_loss(fixed | raw, buffers, batch)[0], list(raw.values()))
        by_log = (g * F.softplus(r) / r.sigmoid() for g, r in zip(slopes, raw.values(), strict=True))
        mean = torch.cat([at_least_float32(each).flatten() for each in by_log]).mean().detach()
        return -(self.data_size or 1) / self.posterior_temperature * mean

    def sampled_names(self) -> list[str]:
        return self.spread

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        means, stds = self.trained.rows(), self._deviations()

        def around(m: int) -> Tensors:
            noise = {name: std[m] * sample_normal(samples, std[m], generator) for name, std in stds.items()}
            return {name: means[name][m] + each for name, each in noise.items()}

        return stack_networks(around, self.particles.members)

    def current(self) -> DrawnFunctions:
        """The networks with the mean weights."""
        return MemberFunctions(self.particles, ordinary=restore_plain_layers)

    def make_family(self, samples: Tensors, networks: slice, *, apart: bool = False) -> Particles:
        family = super().make_family(samples, networks, apart=apart)
        restore_plain_layers(family.template.network)
        return family

    def plain_network(self) -> nn.Module:
        return restore_plain_layers(self.particles.member(0))


def _expect_gaussian(prior: Any) -> GaussianPrior:
    if not isinstance(prior, GaussianPrior):
        raise TypeError(f"expected a GaussianPrior, whose KL has a closed form, got {prior!r}; pass weight_prior_std=")
    return prior


def _layer_spread(layer: str, params: Tensors, std: Tensors, noise: Tensors) -> WeightSpread:
    weight, bias = _tensor_names(layer)
    mean = Kernel(params[PREFIX + weight], params.get(PREFIX + bias))
    return WeightSpread(mean, (std.get(weight), std.get(bias)), (noise.get(weight), noise.get(bias)))


def _raw_std_name(name: str) -> str:
    """Name of the parameter that holds a tensor's standard deviations before softplus."""
    return f"latents.{name}.raw_std"


def _tensor_names(layer: str) -> tuple[str, str]:
    under = f"{layer}." if layer else ""
    return f"{under}weight", f"{under}bias"


def _entropy(std: Tensors) -> Tensor:
    """() H[q] = Σ ½ log 2πe σ²."""
    constant = 0.5 * math.log(2 * math.pi * math.e)
    return torch.stack([at_least_float32(each).log().sum() + constant * each.numel() for each in std.values()]).sum()


class WeightSpread(NamedTuple):
    """Means, standard deviations and one draw of the noise for weight and bias of a layer; None is no noise."""

    mean: Kernel
    std: tuple[Tensor | None, Tensor | None]
    drawn: tuple[Tensor | None, Tensor | None]


class PerturbedLayer(NodeLayer):
    """A layer that gives every example its own draw of the weights if `nodes` is a `WeightSpread`; else it is plain.

    If examples share a draw of the weights, gradients share its noise. A layer that each example passes once gives it its own:

        a dense layer, one row per example    N(Wx + b, σ_W² x² + σ_b²): the outputs are drawn (local reparametrisation;
                                              Kingma, Salimans & Welling, NeurIPS 2015)
        positions that share weights          Wx + b + s ∘ (ΔW (r ∘ x) + Δb), ΔW one draw and r, s random signs per example
                                              (flipout; Wen, Vicol, Ba, Tran & Grosse, ICLR 2018)
    """

    nodes: WeightSpread | None = None  # type: ignore[assignment]

    def forward(self, input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if self.nodes is None:
            return super().forward(input, *args, **keywords)
        (mean, std, drawn), plain = self.nodes, nn.Linear
        outputs = self._with_kernel(mean, input, *args, **keywords)
        if isinstance(self, plain) and input.ndim == 2:
            weight, bias = (None if each is None else each.square() for each in std)
            square = input.square()
            variance = F.linear(square, torch.zeros_like(mean.weight) if weight is None else weight, bias)
            # Inputs that are all 0 have variance 0, where the square root has no derivative.
            deviation = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
            return outputs + deviation * torch.randn_like(deviation)
        signs = (torch.randint(0, 2, (len(input), count), device=input.device) for count in features(self))
        r, s = (each.to(input.dtype) * 2 - 1 for each in signs)
        weight, bias = drawn
        added = Kernel(torch.zeros_like(mean.weight) if weight is None else weight, bias)
        more = self._with_kernel(added, input * self._broadcast_factors(r, input), *args, **keywords)
        return outputs + more * self._broadcast_factors(s, more)


def perturbed_copy(network: nn.Module) -> tuple[nn.Module, ConversionReport]:
    """(a copy of the network whose layers can take noise for every example, the account)."""
    copied, found, account = convertible_copy(network, needed=False)
    for name, layer in found.items():
        if can_take_kernel(layer):
            convert_layer(layer, PerturbedLayer).known_as = name
            kind = "local reparametrisation, over positions flipout" if isinstance(layer, nn.Linear) else "flipout"
            account.converted[name] = f"noise for each example ({kind})"
        else:
            account.left[name] = f"{type(layer).__name__} has its own computation"
    account.left = {name: f"one weight draw per batch: {reason}" for name, reason in account.left.items()}
    return copied, account
