"""Bayesian networks with noise on nodes instead of weights.

NodeBNN: Trinh et al., ICML 2022; iBNN: Trinh, Kaski & Heinonen 2020; RankOneBNN: Dusenberry et al., ICML 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, Unpack, final, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from dissensus.core.networks import MethodKeywords
from dissensus.layers.modulation import Modulation
from dissensus.layers.nodes import Mode
from dissensus.methods.parts.node_latents import Bound, Complexity, Divergence, Family
from dissensus.methods.parts.node_posterior import NodePosterior
from dissensus.numerics.annealing import Annealing
from dissensus.utils.checks import number, one_of


@final
class NodeBNN(NodePosterior):
    """A network whose nodes are multiplied by random latents z; z has a learned posterior, weights are point estimates.

        q(z) = (1/K) Σ_k N(μ_k, diag σ_k²),    p(z) = N(1, prior_std²)
        loss = mean over examples and samples of −log p(y | x, z) + β [KL(q ‖ p) − γ H(q)] / N

    The network is copied; `.account` lists the layers that were converted and those that were not. In training each copy
    of each example has its own component and noise; a drawn function has one fixed z.

    Args:
        networks: one module, or a list of M; each network has its own latents and gives `samples` functions.
        components: K.
        mode: latents on the layers' input nodes ("in", iBNN), output nodes ("out") or "both"; channels of a convolution.
        prior_std: standard deviation of the prior of z.
        init_std: σ at the start; None is `prior_std`. For a trained network see `of_trained`.
        train_samples: copies of each example, all in one pass of B · train_samples examples.
        samples: functions per draw, rounded up to a multiple of `components`; each component gives the same number.
        posterior_temperature: T = 1 + γ, with the paper's γ; below 1 a cold posterior, above 1 a hot one.
        init_spread: standard deviation of μ around 1 at the start.
        annealing: β; None is constant 1.
        bias_latent: whether each bias has a scalar latent, as in iBNN.
        layers: name patterns of the layers with latents; None is every linear and convolutional layer.
        batch_norm: "frozen" keeps the running statistics; "trained" updates them.
        bound: on the entropy: "joint" over all layers; "per_layer"; "released", per layer with the authors' factor 1/16.
        divergence: "mixture", or iBNN's "surrogate".
        latent_lr: learning rate of the latents for one component; their group uses K times that. None: the weights' rate.
        latent_momentum: momentum of the latents, 0 in the paper; None: that of the optimiser.
        lr: "curvature" makes `fit` without an optimizer use SGD with momentum, at a rate that it measures on the first
            batch: `theory.sharpness` becomes 1 − momentum. The latents' rate is K times the weights'. None: the default one.
        data_size: N, required.
        likelihood, prior, weight_prior_std: as in `Posterior`; the prior is on the weights.
    """

    name = "node_bnn"
    of_trained_settings: ClassVar[dict[str, Any]] = {
        "components": 8,
        "mode": "in",
        "init_std": 0.1,  # 0.3 wrecks a trained network
        "posterior_temperature": 11.0,
        "train_samples": 1,
        "latent_momentum": 0.9,
        "lr": "curvature",
    }

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
        posterior_temperature: float = 1.0,
        init_spread: float = 0.05,
        annealing: Annealing | None = None,
        bias_latent: bool = False,
        layers: Sequence[str] | None = None,
        batch_norm: Literal["frozen", "trained"] = "trained",
        bound: Bound = "joint",
        divergence: Divergence = "mixture",
        latent_lr: float | None = None,
        latent_momentum: float | None = 0.0,
        lr: Literal["curvature"] | None = None,
        **prior: Unpack[MethodKeywords],
    ) -> None:
        std = number("prior_std", prior_std, above=0)
        if init_std is not None:
            std = number("init_std", init_std, above=0)
        super().__init__(
            networks,
            components=components,
            std=std,
            start=Modulation.normal(1.0, number("init_spread", init_spread, least=0)),
            train_samples=train_samples,
            samples=samples,
            posterior_temperature=number("posterior_temperature", posterior_temperature, above=0),  # H[q, p] − T H[q]
            mode=mode,
            bias_latent=bias_latent,
            layers=layers,
            annealing=annealing,
            batch_norm=batch_norm,
            latent_lr=latent_lr,
            latent_momentum=latent_momentum,
            **prior,
        )
        self.lr = one_of("lr", lr, ("curvature", None))
        if lr is not None and latent_lr is not None:
            raise ValueError(f"expected latent_lr=None with lr={lr!r}, got {latent_lr}; leave out one of them")
        self.mode, self.bias_latent = mode, bias_latent
        self.prior_std, self.init_std, self.init_spread = prior_std, init_std, init_spread
        self.bound = one_of("bound", bound, get_args(Bound))
        self.divergence = one_of("divergence", divergence, get_args(Divergence))
        self.complexity = Complexity(prior_std, self.widths, bound, divergence)

    @classmethod
    def of_trained(cls, networks: nn.Module | Sequence[nn.Module], *, data_size: int, **settings: Any) -> Self:
        """A trained network made Bayesian by one recipe for all of them: `of_trained_settings`, then ten epochs of `ds.fit`.

            posterior = ds.NodeBNN.of_trained(network, data_size=len(training_set))
            ds.fit(posterior, loader, epochs=10)  # warns if this makes the first batch less likely

        Args:
            networks, data_size: as of the class.
            settings: of the class, in place of those of the recipe.
        """
        return cls(networks, data_size=data_size, **{**cls.of_trained_settings, **settings})

    def default_optimizer(self) -> Optimizer:
        """As of `Posterior`; with `lr="curvature"` SGD with momentum 0.9, whose rates are relative until `fit` has begun."""
        if self.lr is None:
            return super().default_optimizer()
        groups = self.parameter_groups(1.0, 1e-4)
        return torch.optim.SGD([{**group, "relative": True} for group in groups], lr=1.0, momentum=0.9, nesterov=True)


@final
class RankOneBNN(NodePosterior):
    """A network with random rank-one factors r and s in every layer; these have a learned posterior, weights do not.

    Each layer computes y = s ∘ (W (r ∘ x) + b), with a mixture posterior over all r and s, and point estimates W and b.

        q(r, s) = (1/K) Σ_k Π N(μ_k, σ_k²),    p(r, s) = Π N(1, prior_std²),    or Cauchy laws in both
        loss = mean over examples and samples of −log p(y | x, r, s) + β [H[q, p] − T H[q]] / N

    At T = 1 the bracket is KL(q ‖ p). The network is copied; `.account` lists the layers that were converted and those
    not. In training each copy of each example has its own component and noise; a drawn function has one fixed r and s.

    Args:
        networks, components, train_samples, samples, annealing, layers, data_size: as in `NodeBNN`.
        family: distribution of components and prior: "gaussian" or "cauchy" (σ is then a scale).
        prior_std: standard deviation (Cauchy: scale) of the prior of r and s.
        init_std: σ at the start.
        modulation: of the components' initial means; None is N(1, prior_std²), the authors' code has `Modulation.sign()`.
        posterior_temperature: T; below 1 a cold posterior, above 1 a hot one.
        batch_norm: "frozen" keeps the running statistics, for a pretrained network; "trained" updates them.
        latent_lr: learning rate of the factors for one component; their group uses K times that. None: the weights'.
        likelihood, prior, weight_prior_std: as in `Posterior`; the prior is on the weights (the paper's L2 term).
    """

    name = "rank_one_bnn"

    def __init__(
        self,
        networks: nn.Module | Sequence[nn.Module],
        *,
        components: int = 4,
        family: Family = "gaussian",
        prior_std: float = 0.1,
        init_std: float = 0.03,
        modulation: Modulation | None = None,
        train_samples: int = 4,
        samples: int = 32,
        posterior_temperature: float = 1.0,
        annealing: Annealing | None = None,
        layers: Sequence[str] | None = None,
        batch_norm: Literal["frozen", "trained"] = "trained",
        latent_lr: float | None = None,
        **prior: Unpack[MethodKeywords],
    ) -> None:
        number("prior_std", prior_std, above=0)
        start = Modulation.normal(1.0, prior_std) if modulation is None else modulation
        super().__init__(
            networks,
            components=components,
            std=number("init_std", init_std, above=0),
            start=start,
            train_samples=train_samples,
            samples=samples,
            posterior_temperature=number("posterior_temperature", posterior_temperature, above=0),
            mode="both",
            layers=layers,
            annealing=annealing,
            batch_norm=batch_norm,
            latent_lr=latent_lr,
            **prior,
        )
        self.prior_std, self.init_std, self.modulation = prior_std, init_std, start
        self.family = one_of("family", family, get_args(Family))
        # The paper's code sums the components' KLs; the bound on the mixture's has their mean, less a term for overlaps.
        self.complexity = Complexity(prior_std, self.widths, family=family)
