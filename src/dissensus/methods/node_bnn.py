"""Node-based BNNs: noise on nodes instead of weights (Trinh et al., ICML 2022; iBNN: Trinh, Kaski & Heinonen 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core import weights
from dissensus.core.alone import only
from dissensus.core.batch import Batch
from dissensus.core.functions import DrawnFunctions, mixture
from dissensus.core.likelihood import Likelihood
from dissensus.core.optimisation import Group
from dissensus.core.particles import Member, Particles, member_index
from dissensus.core.posterior import left_as_found
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.networks import placeholders
from dissensus.methods.parts.node_checks import (
    check_component,
    check_layers,
    warn_of_old_draw,
    warn_of_start,
)
from dissensus.methods.parts.node_functions import NodeFunctions, collapsed
from dissensus.methods.parts.node_inputs import check_repeatable, of_another_length, repeated, repeated_inputs
from dissensus.methods.parts.node_latents import (
    Bound,
    Complexity,
    Divergence,
    check_settings,
    for_examples,
    for_functions,
    kept,
    with_latents,
)
from dissensus.methods.parts.node_posterior import LatentPosterior
from dissensus.numerics.annealing import Annealing, annealing_or_constant
from dissensus.numerics.randomness import own_generator
from dissensus.numerics.tree import Tensors, TensorTree
from dissensus.surgery.conversion import uncut
from dissensus.surgery.frozen_norm import freeze_norms
from dissensus.surgery.nodes import Mode, by_layer, standing


class NodeBNN(LatentPosterior):
    """A network whose nodes are multiplied by latents z with a posterior; the weights stay point estimates.

        q(z) = (1/K) Σ_k N(μ_k, diag σ_k²),    p(z) = N(1, prior_std²)
        loss = mean over examples and samples of −log p(y | x, z) + β [KL(q ‖ p) − γ H(q)] / N

    The network is copied; `.account` says which layers were converted and which were not. In training each copy of each
    example has a component and noise of its own; a drawn function has one z.

    Args:
        networks: one module, or a list of M, of which each has latents of its own and gives `samples` functions.
        components: K.
        mode: latents on the layers' input nodes ("in", iBNN), output nodes ("out") or "both"; a channel is one node of
            a convolution.
        prior_std: standard deviation of the prior of z.
        init_std: σ at the start; None is `prior_std`, 0.1 suits a pretrained network.
        train_samples: copies of each example, all in one pass of B · train_samples examples.
        samples: functions of a draw, rounded up to a multiple of `components`, of which each gives as many.
        gamma: γ; above 0 a hot posterior.
        init_spread: standard deviation of μ around 1 at the start.
        annealing: β; None is constant 1.
        bias_latent: iBNN's scalar latent on each bias.
        layers: patterns of names of layers with latents; None is every linear and convolutional layer.
        batch_norm: "frozen" keeps the running statistics, as suits a pretrained network, "trained" lets them follow.
        bound: on the entropy: "joint" over layers; "per_layer", each layer a mixture of its own; "released", that with
            the 1/16 of the authors' code.
        divergence: "mixture", or iBNN's "surrogate".
        latent_lr: rate of the latents for one component; the group's is K times that, since each component gets 1/K of
            the gradient. None: the weights' rate.
        latent_momentum: momentum of the latents, 0 in the paper; None: the optimiser's.
        data_size: N, required.
        likelihood, prior, weight_prior_std: as in `Posterior`; the prior is on the weights.
    """

    name = "node_bnn"
    needed = ("data_size",)
    untrained: ClassVar[tuple[str, ...]] = ("samples", "stored")
    of_draw = ("stored", "stored_at")
    stored: TensorTree | None
    stored_at: Tensor | None

    def __init__(
        self,
        networks: nn.Module | Sequence[nn.Module],
        *,
        components: int = 4,
        mode: Mode = "out",
        prior_std: float = 0.3,
        init_std: float | None = None,
        train_samples: int = 4,
        samples: int = 32,
        gamma: float = 0.0,
        init_spread: float = 0.05,
        annealing: Annealing | None = None,
        bias_latent: bool = False,
        layers: Sequence[str] | None = None,
        batch_norm: Literal["frozen", "trained"] = "trained",
        bound: Bound = "joint",
        divergence: Divergence = "mixture",
        latent_lr: float | None = None,
        latent_momentum: float | None = 0.0,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        settings: dict[str, Any] = {
            "components": components,
            "mode": mode,
            "prior_std": prior_std,
            "init_std": init_std,
            "train_samples": train_samples,
            "gamma": gamma,
            "init_spread": init_spread,
            "bias_latent": bias_latent,
            "layers": layers if layers is None or isinstance(layers, str) else list(layers),
            "batch_norm": batch_norm,
            "bound": bound,
            "divergence": divergence,
            "latent_lr": latent_lr,
            "latent_momentum": latent_momentum,
        }
        check_settings(settings, samples=samples)
        particles, made = with_latents(networks, settings, likelihood)
        super().__init__(particles, **prior)
        self.settings = settings
        self.sites, self.account, self.latents = made.sites, made.account, made.latents
        self.complexity = Complexity(prior_std, gamma, bound, divergence, made.widths)
        self.components = components
        self.copies = train_samples  # of each example in a batch
        self.samples = -(-samples // components) * components
        self.annealing = annealing_or_constant(annealing)
        self.stored = None
        # μ when the draw was stored, or when training went on after it was read from a file
        self.register_buffer("stored_at", None, persistent=False)
        self._checked: set[tuple[torch.Size, ...]] = set()
        self._whole: set[int] = set()  # numbers of inputs that have no row per example
        if batch_norm == "frozen":
            freeze_norms(particles.template)
            self.train(self.training)

    # ------------------------------------------------------------------ the objective

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        size = batches.size(batch.x)
        weight = None if batch.weight is None else repeated(batch.weight, self.copies)
        x = repeated_inputs(batch.x, self.copies, whole=self._whole)
        several = Batch(x, repeated(batch.y, self.copies), weight)
        mean, std = params["latents.mean"], F.softplus(params["latents.raw_std"])
        nodes = by_layer(self.sites, for_examples(mean, std, size * self.copies))

        def nll(member: Member) -> Tensor:
            with standing(member.network, nodes):
                return member.nll(several)

        value, buffers = self.particles.call(nll, params, buffers)
        assert self.data_size is not None  # looked at when this was built
        complexity = self._beta() * self.complexity(mean, std) / self.data_size
        return value + self.penalty(params) + complexity, (), buffers

    def _beta(self) -> Tensor | float:
        step = self.steps - self.began if self.annealing.steps is None else self.steps
        return self.annealing(step, self.run_length)

    # ------------------------------------------------------------------ the posterior over latents

    def groups(self) -> list[Group]:
        rate = self.settings["latent_lr"]
        latents = Group(
            "latents",
            self._latent_parameters(),
            rate=None if rate is None else rate * self.components,
            momentum=self.settings["latent_momentum"],
            decay=False,
            decayed="draws the means of latents to 0 and their deviations to log 2 (the prior: to 1 and prior_std)",
            prior=False,
        )
        return [*super().groups(), latents]

    # ------------------------------------------------------------------ functions

    def draw(self) -> DrawnFunctions:
        stored = self.stored
        if stored is not None and self.stored_at is not None and not torch.equal(self.stored_at, self.mean):
            warn_of_old_draw()
        latents = self._sample() if stored is None else stored.get_buffer("own.latents")
        return mixture(
            NodeFunctions.fixed(self._network(m), self.sites, mine)
            for m, mine in enumerate(latents.chunk(self.particles.members))  # (S, D) of each
        )

    def current(self) -> DrawnFunctions:
        """Functions sampled anew, whatever draw is stored, with a graph to the weights: what `draw` will be like at the end."""
        each = enumerate(self._sample().chunk(self.particles.members))
        return mixture(NodeFunctions(only(self.particles, m), self.sites, mine) for m, mine in each)

    def _network(self, m: int) -> Particles:
        return self.particles if self.mean.ndim == 2 else only(self.particles, m)

    def store_draw(self, loader: Iterable[Any]) -> None:
        # Batch statistics stay those of training: estimated anew for one z, batch norm would divide it out of what it scales.
        self.stored, self.stored_at = kept(self._sample()), self.mean.detach().clone()

    @torch.no_grad()
    def _sample(self) -> Tensor:
        """(M · S, D) latents, network by network."""
        generator = own_generator(self.device)
        each = zip(*self._latents(), strict=True)
        return torch.cat([for_functions(mean.detach(), std, self.samples, generator) for mean, std in each])

    def collapse(self, component: int | None = None, *, network: int = 0) -> nn.Module:
        """An ordinary network with a component's mean latents folded into its weights; None: with the mean of all.

        Args:
            component: 0 to K − 1, or None.
            network: which of a list of networks.
        """
        network = member_index(network, self.particles.members)
        particles, mean = self._network(network), self._latents()[0][network]
        if component is None:
            return collapsed(particles, self.sites, mean.mean(0))
        check_component(component, self.components)
        return collapsed(particles, self.sites, mean[component])

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        x = batch.x
        if self.stored is not None and self.stored_at is None:
            self.stored_at = self.mean.detach().clone()
        shapes = tuple(tensor.shape[1:] for tensor in batches.tensors(x))
        if not self._checked and self.settings["batch_norm"] == "frozen":
            started_at = float(self.std.detach().mean()) if self.stored is None else None
            warn_of_start(self.particles.template.network, started_at)
        self._whole |= of_another_length(x)
        if shapes not in self._checked and batches.size(x):
            with left_as_found(self):
                if not self.draws_itself:
                    check_repeatable(self.particles, x, self._whole)
                check_layers(
                    self.particles, self.sites, x, whole=self._whole, like=self.mean, again=bool(self._checked)
                )
            self._checked.add(shapes)

    # ------------------------------------------------------------------ state and files

    def given(self) -> nn.Module:
        return uncut(self.particles.member(0))

    def config(self) -> dict[str, Any]:
        held = self.mean.ndim == 2
        return {
            **self.settings,
            "networks": None if held else self.particles.members,
            "samples": self.samples,
            "annealing": self.annealing.config(),
            **self.prior_config(),
            "stored": self.stored is not None,
            "frozen": [n for n, p in weights.parameters(self.particles).stored.items() if not p.requires_grad],
        }

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> NodeBNN:
        told = ("networks", "stored", "frozen", "annealing")
        keywords = {key: value for key, value in config.items() if key not in told}
        for name, parameter in network.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(name not in config["frozen"])
        several = config["networks"]
        networks = network if several is None else placeholders(network, several)
        posterior = cls(networks, likelihood=likelihood, annealing=Annealing(**config["annealing"]), **keywords)
        if config["stored"]:
            posterior.stored = posterior.blank_draw({})
        return posterior

    def blank_draw(self, state: Tensors) -> TensorTree:
        return kept(self.mean.detach().new_zeros(self.particles.members * self.samples, self.latents))
