"""The latents of a node-based BNN: initial values, samples, and the KL term of their posterior.

    q(z) = (1/K) Σ_k N(z; μ_k, diag σ_k²),    p(z) = N(z; 1, s² I)

with one component index for the latents of all layers (Trinh et al., "Tackling covariate shift with node-based Bayesian neural
networks", ICML 2022), or Cauchy laws with scales σ and s in the place of both normal ones (Dusenberry et al., "Efficient and
scalable Bayesian neural nets with rank-1 factors", ICML 2020). μ and σ are (K, D), D counting the latents of all layers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.particles import Particles
from dissensus.layers.modulation import Modulation
from dissensus.layers.nodes import NodeNetwork, add_node_latents
from dissensus.methods.parts.networks import networks_to_convert, stack_members
from dissensus.numerics.flat_weights import at_least_float32
from dissensus.utils.tensor_tree import TensorTree

Bound = Literal["joint", "per_layer", "released"]
Divergence = Literal["mixture", "surrogate"]
Family = Literal["gaussian", "cauchy"]
Noise = Callable[..., Tensor]  # torch.randn, or another distribution of location 0 and scale 1 with the same arguments
EXACT = 1 / 4  # of (μ_k − μ_r)² / (σ_k² + σ_r²) in the Bhattacharyya distance
RELEASED = 1 / 16  # the factor in the authors' code: still a lower bound, but a looser one


@dataclass(frozen=True)
class Complexity:
    """The KL term of a mixture with means and deviations (K, D), with one of the bounds on its entropy."""

    prior_std: float
    widths: tuple[int, ...]  # latents of each layer
    bound: Bound = "joint"
    divergence: Divergence = "mixture"
    family: Family = "gaussian"  # of components and prior; for Cauchy, the bound on the entropy is the components' mean

    def kl(self, mean: Tensor, std: Tensor, temperature: float = 1.0) -> Tensor:
        """() H[q, p] − T Ĥ[q] in nats, KL(q ‖ p) at T = 1; with divergence="surrogate", iBNN's in place of the KL."""
        mean, std = at_least_float32(mean), at_least_float32(std)
        if self.divergence == "mixture":
            cross = cross_entropy if self.family == "gaussian" else cauchy_cross_entropy
            return cross(mean, std, self.prior_std) - temperature * self.entropy(mean, std)
        kl = surrogate_kl(mean, std, self.prior_std)
        return kl if temperature == 1 else kl - (temperature - 1) * self.entropy(mean, std)

    def entropy(self, mean: Tensor, std: Tensor) -> Tensor:
        """() Ĥ[q]."""
        if self.family == "cauchy":
            return cauchy_entropies(at_least_float32(std)).mean()
        widths = None if self.bound == "joint" else self.widths
        factor = RELEASED if self.bound == "released" else EXACT
        return entropy_bound(at_least_float32(mean), at_least_float32(std), widths=widths, factor=factor)

    @property
    def noise(self) -> Noise:
        """The standard noise that deviations are multiplied by."""
        return torch.randn if self.family == "gaussian" else cauchy_noise


def build_with_latents(
    networks: nn.Module | Sequence[nn.Module],
    likelihood: Likelihood | None,
    *,
    components: int,
    std: float,
    start: Modulation,
    **where: Any,
) -> tuple[Particles, NodeNetwork]:
    """(members with their own latents, the first cut network), from copies of one network or many.

    `start`: the distribution of μ at the start. `where`: arguments of `add_node_latents` that choose the nodes with latents.
    """
    given, one = networks_to_convert(networks)
    cut = [add_node_latents(each, **where) for each in given]
    likes = (each.network.get_submodule(each.sites[0].layer).get_parameter("weight") for each in cut)
    pairs = zip(cut, likes, strict=True)
    latents = [initial_latents(like, components, each.latents, std, start) for each, like in pairs]
    if one:
        return Particles.wrap_network(cut[0].network, likelihood or Classification(), latents[0]), cut[0]
    return stack_members([each.network for each in cut], likelihood, latents), cut[0]


def initial_latents(like: Tensor, components: int, latents: int, std: float, start: Modulation) -> TensorTree:
    """μ from `start` and ρ of σ = |N(std, 0.02²)|, both (K, D), as parameters "mean" and "raw_std".

    Below std = 0.05, the smallest value in the papers, 0.02 would be too wide; 0.4 std takes its place.
    """
    mean = start.sample((components, latents), dtype=like.dtype, device=like.device)
    deviation = (std + min(0.02, 0.4 * std) * torch.randn_like(mean)).abs().clamp(min=min(1e-4, 0.1 * std))
    tree = TensorTree()
    tree.add_tensor("mean", nn.Parameter(mean))
    tree.add_tensor("raw_std", nn.Parameter(inverse_softplus(deviation)))
    return tree


def sample_for_examples(
    mean: Tensor, std: Tensor, examples: int, noise: Noise = torch.randn, *, here: slice | None = None
) -> Tensor:
    """(examples, D) latents: components in turn, starting at a random one, so that all train equally for any batch size.

    `here`: the rows to return; None returns all.
    """
    components = len(mean)
    first = torch.randint(components, (1,), device=mean.device)
    order = (torch.arange(components, device=mean.device) + first) % components
    rounds = -(-examples // components)
    epsilon = noise(rounds, *mean.shape, dtype=mean.dtype, device=mean.device)
    drawn = mean.index_select(0, order) + std.index_select(0, order) * epsilon  # (rounds, K, D)
    return drawn.flatten(0, 1)[here or slice(examples)]


def sample_for_functions(
    mean: Tensor, std: Tensor, samples: int, generator: torch.Generator, noise: Noise = torch.randn
) -> Tensor:
    """(samples, D) latents, components in turn: the same number of each."""
    epsilon = noise(samples, mean.shape[1], dtype=mean.dtype, device=mean.device, generator=generator)
    rounds = samples // len(mean)
    return mean.repeat(rounds, 1) + std.repeat(rounds, 1) * epsilon


def cross_entropy(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """() H[q, p] = (1/K) Σ_k Σ_d [½ log 2πs² + ((μ − 1)² + σ²) / 2s²]."""
    constant = 0.5 * math.log(2 * math.pi * prior_std**2) * mean.shape[1]
    return constant + ((mean - 1).square() + std.square()).sum() / (2 * prior_std**2 * len(mean))


def cauchy_cross_entropy(mean: Tensor, scale: Tensor, prior_scale: float) -> Tensor:
    """() H[q, p] = (1/K) Σ_k Σ_d log π [(σ + s)² + (μ − 1)²] / s; minus the entropy it is the KL of two Cauchy laws."""
    reach = (scale + prior_scale).square() + (mean - 1).square()
    return (math.log(math.pi / prior_scale) + reach.log()).sum() / len(mean)


def cauchy_entropies(scale: Tensor) -> Tensor:
    """(K,) H[q_k] = Σ_d log 4πσ; their mean is at most the entropy of the mixture."""
    return math.log(4 * math.pi) * scale.shape[1] + scale.log().sum(1)


def cauchy_noise(*size: int, dtype: Any, device: Any, generator: torch.Generator | None = None) -> Tensor:
    """tan π (u − ½), u uniform."""
    return torch.tan(math.pi * (torch.rand(*size, dtype=dtype, device=device, generator=generator) - 0.5))


def component_entropies(std: Tensor) -> Tensor:
    """(K,) H[q_k] = Σ_d ½ log 2πe σ²."""
    return 0.5 * math.log(2 * math.pi * math.e) * std.shape[1] + std.log().sum(1)


def bhattacharyya(mean: Tensor, std: Tensor, *, factor: float = EXACT) -> Tensor:
    """(K, K, D) −log ∫ √(q_k q_r) in each dimension; their sum over d is the Bhattacharyya distance.

    factor (μ_k − μ_r)² / (σ_k² + σ_r²) + ½ log (σ_k² + σ_r²) / (2 σ_k σ_r)
    """
    both = std.square()[:, None] + std.square()[None]  # (K, K, D)
    log_std = std.log()
    apart = (mean[:, None] - mean[None]).square() / both
    return factor * apart + 0.5 * (both.log() - math.log(2.0) - log_std[:, None] - log_std[None])


def entropy_bound(mean: Tensor, std: Tensor, *, widths: Sequence[int] | None = None, factor: float = EXACT) -> Tensor:
    """() a lower bound on H[q] (Kolchinsky & Tracey 2017):

        Ĥ = (1/K) Σ_k H[q_k] − (1/K) Σ_k log (1/K) Σ_r BC(q_k, q_r)

    `widths`: latents of each layer, to bound each layer's mixture separately and add up, as the authors' code does. Distinct
    components then add log K once per layer, so the sum is no longer a bound on the entropy of the joint mixture.
    """
    single = component_entropies(std).mean()
    if len(mean) == 1:
        return single
    distance = bhattacharyya(mean, std, factor=factor)
    parts = [distance] if widths is None else distance.split_with_sizes(list(widths), dim=2)
    log_overlap = torch.stack([torch.logsumexp(-part.sum(2), dim=1) - math.log(len(mean)) for part in parts])
    return single - log_overlap.mean(1).sum()


def surrogate_kl(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """() KL(N(mean_k μ_k, Σ_k σ_k² / K²) ‖ N(1, s²)), summed over latents, as in the code of iBNN's authors.

    This is the Gaussian of the components' average, not of their mixture: components may spread as long as their mean stays
    at 1. It does not bound the mixture's KL.
    """
    centre, variance = mean.mean(0), std.square().sum(0) / len(std) ** 2
    ratio = variance / prior_std**2
    return 0.5 * ((centre - 1).square() / prior_std**2 + ratio - 1 - ratio.log()).sum()


def inverse_softplus(std: Tensor) -> Tensor:
    """ρ with softplus(ρ) = σ."""
    return std + torch.log(-torch.expm1(-std))
