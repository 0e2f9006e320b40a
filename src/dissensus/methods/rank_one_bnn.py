"""Rank-one BNNs: posteriors over BatchEnsemble's factors; the weights stay deterministic (Dusenberry et al., ICML 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, final, get_args

from torch import nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords
from dissensus.layers.modulation import Modulation
from dissensus.methods.parts.node_latents import Complexity, Family
from dissensus.methods.parts.node_posterior import NodePosterior
from dissensus.numerics.annealing import Annealing
from dissensus.utils.checks import number, one_of


@final
class RankOneBNN(NodePosterior):
    """A network with random rank-one factors r and s in every layer; these have a learned posterior, weights do not.

    Each layer computes y = s ∘ (W (r ∘ x) + b), with a mixture posterior over all r and s, and point estimates W and b.

        q(r, s) = (1/K) Σ_k Π N(μ_k, σ_k²),    p(r, s) = Π N(1, prior_std²),    or Cauchy laws in both
        loss = mean over examples and samples of −log p(y | x, r, s) + β [H[q, p] − T H[q]] / N

    At T = 1 the bracket is KL(q ‖ p). The network is copied; `.account` lists the layers that were converted and those
    that were not. In training each copy of each example has its own component and noise; a drawn function has one fixed
    r and s. The paper's L2 term is the weight decay, or `weight_prior_std`.

    Args:
        networks: one module, or a list of M; each network has its own factors and gives `samples` functions.
        components: K.
        family: distribution of components and prior: "gaussian" or "cauchy" (σ is then a scale).
        prior_std: standard deviation (Cauchy: scale) of the prior of r and s.
        init_std: σ at the start.
        modulation: distribution of the components' initial means; None is the prior's N(1, prior_std²). The authors'
            code uses `Modulation.sign()`.
        train_samples: copies of each example, all in one pass of B · train_samples examples.
        samples: functions per draw, rounded up to a multiple of `components`; each component gives the same number.
        posterior_temperature: T; below 1 a cold posterior, above 1 a hot one.
        annealing: β; None is constant 1.
        layers: name patterns of the layers with factors; None is every linear and convolutional layer.
        batch_norm: "frozen" keeps the running statistics, for a pretrained network; "trained" updates them.
        latent_lr: learning rate of the factors for one component; the parameter group uses K times that. None: the
            weights' rate.
        data_size: N, required.
        likelihood, prior, weight_prior_std: as in `Posterior`; the prior is on the weights.
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
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
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
            likelihood=likelihood,
            **prior,
        )
        self.prior_std, self.init_std, self.modulation = prior_std, init_std, start
        self.family = one_of("family", family, get_args(Family))
        # The paper's code sums the KLs of the components. The bound on the mixture's KL has their mean, less a term for
        # overlapping components.
        self.complexity = Complexity(prior_std, self.widths, family=family)
