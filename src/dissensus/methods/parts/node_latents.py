"""The latents of a node-based BNN: initial values, samples, the KL term of their posterior, and the batches they train on.

    q(z) = (1/K) Σ_k N(z; μ_k, diag σ_k²),    p(z) = N(z; 1, s² I)

with one component index for the latents of all layers (Trinh et al., "Tackling covariate shift with node-based Bayesian neural
networks", ICML 2022), or Cauchy laws with scales σ and s in the place of both normal ones (Dusenberry et al., "Efficient and
scalable Bayesian neural nets with rank-1 factors", ICML 2020). μ and σ are (K, D), D counting the latents of all layers.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.networks import networks_to_convert, stack_members
from dissensus.core.particles import Member, Particles
from dissensus.layers import nodes as node_layers
from dissensus.layers.modulation import Modulation
from dissensus.layers.nodes import NodeLayer, NodeNetwork, Site
from dissensus.numerics.flat_weights import at_least_float32
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import first_names
from dissensus.utils.tensor_tree import TensorTree

log = logging.getLogger("dissensus")
WIDE = 0.2  # with 0.3 a CIFAR-10 ResNet-20 falls from 92 to 77 % before the first step, with 0.1 it does not

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
            # (1/K) Σ_k Σ_d log 4πσ, at most the entropy of the mixture
            return (math.log(4 * math.pi) + at_least_float32(std).log()).sum() / len(std)
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
    """(members with own latents, the first cut network). `start`: the law of μ; `where`: arguments of `add_node_latents`."""
    given, one = networks_to_convert(networks)
    cut = [node_layers.add_node_latents(each, **where) for each in given]
    latents = [initial_latents(each, components, std, start) for each in cut]
    if one:
        return Particles.wrap_network(cut[0].network, likelihood or Classification(), latents[0]), cut[0]
    return stack_members([each.network for each in cut], likelihood, latents), cut[0]


def initial_latents(cut: NodeNetwork, components: int, std: float, start: Modulation) -> TensorTree:
    """μ from `start` and ρ of σ = |N(std, 0.02²)|, both (K, D), as parameters "mean" and "raw_std"."""
    # Below std = 0.05, the smallest value in the papers, 0.02 would be too wide; 0.4 std takes its place.
    like = cut.network.get_submodule(cut.sites[0].layer).get_parameter("weight")
    mean = start.sample((components, cut.latents), dtype=like.dtype, device=like.device)
    deviation = (std + min(0.02, 0.4 * std) * torch.randn_like(mean)).abs().clamp(min=min(1e-4, 0.1 * std))
    tree = TensorTree()
    tree.add_tensor("mean", nn.Parameter(mean))
    tree.add_tensor("raw_std", nn.Parameter(inverse_softplus(deviation)))
    return tree


def sample_for_examples(
    mean: Tensor, std: Tensor, examples: int, noise: Noise = torch.randn, *, here: slice | None = None
) -> Tensor:
    """(examples, D) latents, or rows `here` of them: components in turn from a random one, so that all train equally."""
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


def cauchy_noise(*size: int, dtype: Any, device: Any, generator: torch.Generator | None = None) -> Tensor:
    """tan π (u − ½), u uniform."""
    return torch.tan(math.pi * (torch.rand(*size, dtype=dtype, device=device, generator=generator) - 0.5))


def component_entropies(std: Tensor) -> Tensor:
    """(K,) H[q_k] = Σ_d ½ log 2πe σ²."""
    return 0.5 * math.log(2 * math.pi * math.e) * std.shape[1] + std.log().sum(1)


def bhattacharyya(mean: Tensor, std: Tensor, *, factor: float = EXACT) -> Tensor:
    """(K, K, D) −log ∫ √(q_k q_r) by dimension: factor (μ_k − μ_r)² / (σ_k² + σ_r²) + ½ log (σ_k² + σ_r²) / (2 σ_k σ_r)."""
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

    This is the Gaussian of the components' average: they may spread around a mean of 1. It does not bound the mixture's KL.
    """
    centre, variance = mean.mean(0), std.square().sum(0) / len(std) ** 2
    ratio = variance / prior_std**2
    return 0.5 * ((centre - 1).square() / prior_std**2 + ratio - 1 - ratio.log()).sum()


def inverse_softplus(std: Tensor) -> Tensor:
    """ρ with softplus(ρ) = σ."""
    return std + torch.log(-torch.expm1(-std))


def repeat_inputs(x: Inputs, times: int, *, first: int | None = None, whole: Collection[int] = ()) -> Inputs:
    """x, or its first rows, each `times` times; not tensors without a row per example, nor those numbered in `whole`."""
    size, number = batches.count_examples(x), count()

    def one(tensor: Tensor) -> Tensor:
        mine = next(number) not in whole and tensor.ndim > 0 and len(tensor) == size
        return repeat_rows(tensor[:first], times) if mine else tensor

    return batches.map_tensors(x, one)


def repeat_rows(tensor: Tensor, times: int) -> Tensor:
    """(B · times, ...): each row `times` times in succession."""
    return tensor if times == 1 else tensor[:, None].expand(-1, times, *tensor.shape[1:]).flatten(0, 1)


def find_input_tables(particles: Particles, x: Inputs, whole: Collection[int]) -> list[tuple[int, ...]]:
    """Shapes of the tensors after the first, if one of them is as long as the batch but has no row per example."""
    # A table, or a tensor of pairs of examples: outputs change when each example is repeated, x₁, x₁, x₂, x₂, ….
    size = batches.count_examples(x)
    others = [t for i, t in enumerate(batches.input_tensors(x)) if i and i not in whole]
    beside = [t for t in others if t.ndim and len(t) == size > 1]
    if not beside:
        return []

    def outputs(some: Inputs) -> Any:
        return particles.call_first(lambda member: batches.call_network(member.network, some))

    once = repeat_rows(outputs(x), 2)
    try:
        twice = outputs(repeat_inputs(x, 2, whole=whole))
    except (RuntimeError, ValueError, IndexError):
        twice = once[:0]
    rounding = 1e-3 * float(once.nan_to_num(0.0, 0.0, 0.0).abs().max())
    same = twice.shape == once.shape and torch.allclose(twice, once, rtol=0.0, atol=rounding, equal_nan=True)
    return [] if same else [tuple(tensor.shape) for tensor in beside]


def examine_layers(
    particles: Particles, sites: Sequence[Site], x: Inputs, *, whole: Collection[int], like: Tensor, again: bool
) -> None:
    """Raises if a layer's first axis is not the batch axis, tried with 2 and 3 rows; marks layers whose outputs are modified
    in place, and warns of layers that are not called. `whole`: tensors in x without a row per example. `again`: batches of
    other shapes were checked before. Call it in eval mode and set the mode again afterwards, because this changes it."""
    ones = like.new_ones(3, sum(site.width for site in sites))

    def find_called_layers(rows: int) -> tuple[set[str], set[str]]:
        """(layers that are called with this many rows, those of them whose outputs were modified in place)."""
        some, nodes = repeat_inputs(x, rows, first=1, whole=whole), node_layers.split_by_layer(sites, ones[:rows])

        def run(member: Member) -> tuple[set[str], set[str]]:
            layers = {name: part for name in nodes if isinstance(part := member.network.get_submodule(name), NodeLayer)}
            with node_layers.record_outputs(list(layers.values())), node_layers.use_latents(member.network, nodes):
                batches.call_network(member.network, some)
                passed = {name for name, layer in layers.items() if layer.seen}
                return passed, {name for name in passed if node_layers.has_changed_output(layers[name])}

        return particles.call_first(run)

    network, names = particles.template.network, list(node_layers.split_by_layer(sites, ones))
    find_called_layers(2)
    passed, written = find_called_layers(3)
    if not passed:
        got = f"{type(network).__name__}, which calls no layer with latents"
        raise ValueError(f"expected a network that calls its layers, got {got}; name others with layers=[...]")
    try:
        with preserve_random_state(like.device):
            particles.train()  # dropout and custom noise may modify outputs in training mode only
            now = find_called_layers(3)
            passed, written = passed | now[0], written | now[1]
    except Exception:  # the network may need other batches in training mode; the real batch will show that
        written = set(names)
    if not again and (unmet := [name for name in names if name not in passed]):
        why = "which forward does not call; if it only reads their weights, exclude them with layers=[...]"
        log.warning("latents have no effect in %s, %s", first_names(unmet), why)
    for name in passed:
        layer = network.get_submodule(name)
        layer.rewritten = name in written or (again and layer.rewritten)  # type: ignore[assignment]


def warn_of_start(network: nn.Module, std: float | None) -> None:
    """Warns of frozen batch statistics that saw no data, and of latents that start too wide: `std`, None after training."""
    blank = [
        name
        for name, layer in statistics_layers(network).items()
        if bool((layer.running_mean == 0).all()) and bool((layer.running_var == 1).all())  # type: ignore[union-attr]
    ]
    if blank:
        fix = 'for a network trained from scratch use "trained"'
        kept = 'batch_norm="frozen" keeps the initial batch statistics in %s, which saw no data; %s'
        log.warning(kept, first_names(blank), fix)
    elif std is not None and std > WIDE:
        why = 'with batch_norm="frozen" that is too much noise for a pretrained network: use init_std=0.1'
        log.warning("latents start with a standard deviation of %.2g; %s", std, why)
