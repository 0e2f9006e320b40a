"""Node-based BNNs: noise on nodes instead of weights (Trinh et al., ICML 2022; iBNN: Trinh, Kaski & Heinonen 2020)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, Unpack, get_args

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
from dissensus.methods.parts import node_batches
from dissensus.methods.parts.networks import own_settings, placeholders
from dissensus.methods.parts.node_functions import NodeFunctions, collapsed
from dissensus.methods.parts.node_latents import (
    Bound,
    Complexity,
    Divergence,
    for_examples,
    for_functions,
    with_latents,
)
from dissensus.methods.parts.stacked import annealed
from dissensus.methods.parts.stored_draw import StoringPosterior
from dissensus.numerics.annealing import Annealing, annealing_or_constant
from dissensus.numerics.checks import number, one_of, whole
from dissensus.numerics.randomness import own_generator
from dissensus.numerics.tree import Tensors, TensorTree
from dissensus.surgery.conversion import uncut
from dissensus.surgery.frozen_norm import freeze_norms
from dissensus.surgery.nodes import Mode, by_layer, standing

log = logging.getLogger("dissensus")


class NodeBNN(StoringPosterior):
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
        gamma: γ: the posterior's temperature is 1 + γ; above 0 hot, between −1 and 0 cold.
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
        std = number("prior_std", prior_std, above=0)
        if init_std is not None:
            std = number("init_std", init_std, above=0)
        spread = number("init_spread", init_spread, least=0)
        where: dict[str, Any] = {"mode": mode, "bias": bias_latent, "layers": layers}
        particles, made = with_latents(
            networks, likelihood, components=whole("components", components), std=std, spread=spread, **where
        )
        super().__init__(particles, **prior)
        self.sites, self.account, self.latents = made.sites, made.account, made.latents
        self.mode, self.bias_latent, self.layers = mode, bias_latent, None if layers is None else list(layers)
        self.prior_std, self.init_std, self.init_spread = prior_std, init_std, init_spread
        self.components, self.train_samples = components, whole("train_samples", train_samples)
        self.samples = -(-whole("samples", samples) // components) * components
        self.gamma = number("gamma", gamma, above=-1)
        self.bound = one_of("bound", bound, get_args(Bound))
        self.divergence = one_of("divergence", divergence, get_args(Divergence))
        self.complexity = Complexity(prior_std, bound, divergence, made.widths)
        self.batch_norm = one_of("batch_norm", batch_norm, ("frozen", "trained"))
        self.latent_lr = latent_lr if latent_lr is None else number("latent_lr", latent_lr, above=0)
        self.latent_momentum = latent_momentum
        if latent_momentum is not None:
            number("latent_momentum", latent_momentum, least=0, below=1, hint="0.9 is usual, 0 the paper's")
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
        size, copies, repeated = batches.size(batch.x), self.train_samples, node_batches.repeated
        weight = None if batch.weight is None else repeated(batch.weight, copies)
        x = node_batches.repeated_inputs(batch.x, copies, whole=self._whole)
        several = Batch(x, repeated(batch.y, copies), weight)
        mean, std = params["latents.mean"], F.softplus(params["latents.raw_std"])
        nodes = by_layer(self.sites, for_examples(mean, std, size * copies))

        def nll(member: Member) -> Tensor:
            with standing(member.network, nodes):
                return member.nll(several)

        value, buffers = self.particles.call(nll, params, buffers)
        assert self.data_size is not None  # looked at when this was built
        complexity = annealed(self, self.annealing) * self.complexity.kl(mean, std, self.gamma) / self.data_size
        return value + self.penalty(params) + complexity, (), buffers

    # ------------------------------------------------------------------ the posterior over latents

    @property
    def mean(self) -> Tensor:
        """(K, D) μ; of a list of networks (M, K, D)."""
        return self._latent_parameters()["latents.mean"]

    @property
    def std(self) -> Tensor:
        """(K, D) σ; of a list of networks (M, K, D)."""
        return F.softplus(self._latent_parameters()["latents.raw_std"])

    def kl(self) -> Tensor:
        """() KL(q ‖ p) in nats, not divided by N: an upper bound, or iBNN's surrogate; of a list of networks (M,)."""
        return self._of_each(self.complexity.kl)

    def entropy(self) -> Tensor:
        """() the bound on H(q) in nats; of a list of networks (M,)."""
        return self._of_each(self.complexity.entropy)

    def _of_each(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        found = torch.stack([function(mean, std) for mean, std in zip(*self._latents(), strict=True)])
        return found[0] if self.mean.ndim == 2 else found

    def _latents(self) -> tuple[Tensor, Tensor]:
        """(M, K, D) μ, σ."""
        mean, std = self.mean, self.std
        return (mean[None], std[None]) if mean.ndim == 2 else (mean, std)

    def _latent_parameters(self) -> Tensors:
        stored = {**self.particles.shared_parameters(), **self.particles.own_parameters()}
        return {name: parameter for name, parameter in stored.items() if name.startswith("latents.")}

    def groups(self) -> list[Group]:
        rate = self.latent_lr
        latents = Group(
            "latents",
            self._latent_parameters(),
            rate=None if rate is None else rate * self.components,
            momentum=self.latent_momentum,
            decay=False,
            decayed="draws the means of latents to 0 and their deviations to log 2 (the prior: to 1 and prior_std)",
            prior=False,
        )
        return [*super().groups(), latents]

    # ------------------------------------------------------------------ functions

    def draw(self) -> DrawnFunctions:
        stored = self.stored
        if stored is not None and self.stored_at is not None and not torch.equal(self.stored_at, self.mean):
            log.warning(
                "the draw that is stored has latents from before the last steps and would run with the weights of now; call "
                "ds.refresh(posterior, loader) after training on"
            )
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
        latents = self._sample()
        self.stored, self.stored_at = self.blank_draw({}), self.mean.detach().clone()
        self.stored.get_buffer("own.latents").copy_(latents)

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
        whole("component", component, least=-self.components, hint=f"this posterior has {self.components}")
        return collapsed(particles, self.sites, mean[component])

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        x = batch.x
        if self.stored is not None and self.stored_at is None:
            self.stored_at = self.mean.detach().clone()
        shapes = tuple(tensor.shape[1:] for tensor in batches.tensors(x))
        particles, again = self.particles, bool(self._checked)
        if not again and self.batch_norm == "frozen":
            started_at = float(self.std.detach().mean()) if self.stored is None else None
            node_batches.warn_of_start(particles.template.network, started_at)
        self._whole |= node_batches.of_another_length(x)
        if shapes not in self._checked and batches.size(x):
            with left_as_found(self):
                if not self.draws_itself and (tables := node_batches.tables_beside(particles, x, self._whole)):
                    raise ValueError(
                        f"expected inputs with a row for each example, got {tables} beside {batches.size(x)} examples, of "
                        "which the network reads one whole; NodeBNN repeats examples: keep a table in the network as a "
                        "buffer, compute what belongs to pairs of examples in forward, or let batches have another size"
                    )
                node_batches.examine_layers(particles, self.sites, x, whole=self._whole, like=self.mean, again=again)
            self._checked.add(shapes)

    # ------------------------------------------------------------------ state and files

    def given(self) -> nn.Module:
        return uncut(self.particles.member(0))

    def config(self) -> dict[str, Any]:
        held = self.mean.ndim == 2
        return {
            "networks": None if held else self.particles.members,
            **own_settings(self),
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
        tree = TensorTree()
        tree.plant("own.latents", self.mean.detach().new_zeros(self.particles.members * self.samples, self.latents))
        return tree
