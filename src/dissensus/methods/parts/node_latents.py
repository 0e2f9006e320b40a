"""The latents of a node-based BNN: how they start, how they are drawn, and what their posterior costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.particles import Particles
from dissensus.methods.parts.networks import stack_members
from dissensus.methods.parts.node_mixture import EXACT, RELEASED, cross_entropy, entropy_bound, raw_std, surrogate_kl
from dissensus.numerics.checks import number, one_of, whole
from dissensus.numerics.tree import TensorTree
from dissensus.surgery.nodes import NodedNetwork, with_nodes

Bound = Literal["joint", "per_layer", "released"]
Divergence = Literal["mixture", "surrogate"]
CHOICES = {"bound": get_args(Bound), "divergence": get_args(Divergence), "batch_norm": ("frozen", "trained")}


def check_settings(settings: Mapping[str, Any], *, samples: int) -> None:
    """Raises where a setting of NodeBNN can not be meant."""
    whole("samples", samples)
    for keyword in ("components", "train_samples"):
        whole(keyword, settings[keyword])
    for keyword, choices in CHOICES.items():
        one_of(keyword, settings[keyword], choices)
    number("prior_std", settings["prior_std"], above=0)
    for keyword in ("init_std", "latent_lr"):
        if settings[keyword] is not None:
            number(keyword, settings[keyword], above=0)
    for keyword in ("gamma", "init_spread"):
        number(keyword, settings[keyword], least=0)
    if settings["latent_momentum"] is not None:
        number("latent_momentum", settings["latent_momentum"], least=0, below=1, hint="0.9 is usual, 0 the paper's")


@dataclass(frozen=True)
class Complexity:
    """KL(q ‖ p) − γ H(q) of a mixture with means and deviations (K, D), by one of the bounds on its entropy."""

    prior_std: float
    gamma: float
    bound: Bound
    divergence: Divergence
    widths: tuple[int, ...]  # latents of each layer

    def __call__(self, mean: Tensor, std: Tensor) -> Tensor:
        """() in nats."""
        mean, std = _wide(mean), _wide(std)
        if self.divergence == "surrogate":
            kl = surrogate_kl(mean, std, self.prior_std)
            return kl if self.gamma == 0 else kl - self.gamma * self.entropy(mean, std)
        # H[q, p] − (1 + γ) Ĥ[q]
        return cross_entropy(mean, std, self.prior_std) - (1 + self.gamma) * self.entropy(mean, std)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """() H[q, p] − Ĥ[q], or iBNN's surrogate."""
        mean, std = _wide(mean), _wide(std)
        if self.divergence == "surrogate":
            return surrogate_kl(mean, std, self.prior_std)
        return cross_entropy(mean, std, self.prior_std) - self.entropy(mean, std)

    def entropy(self, mean: Tensor, std: Tensor) -> Tensor:
        """() Ĥ[q]."""
        widths = None if self.bound == "joint" else self.widths
        return entropy_bound(
            _wide(mean), _wide(std), widths=widths, factor=RELEASED if self.bound == "released" else EXACT
        )


def with_latents(
    networks: nn.Module | Sequence[nn.Module], settings: dict[str, Any], likelihood: Likelihood | None
) -> tuple[Particles, NodedNetwork]:
    """(members with latents of their own, the first network as it was cut), of copies of one network or many."""
    if isinstance(networks, Particles):
        raise TypeError(
            "expected a network or a list of them, got those of a run; NodeBNN cuts layers: train it on its own"
        )
    held = isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList)
    given: Sequence[Any] = [networks] if held else list(networks)  # type: ignore[arg-type]
    cut = [
        with_nodes(each, settings["mode"], bias=settings["bias_latent"], layers=settings["layers"]) for each in given
    ]
    std = settings["prior_std"] if settings["init_std"] is None else settings["init_std"]
    latents = [
        starting_latents(
            each.network.get_submodule(each.sites[0].layer).get_parameter("weight"),
            settings["components"],
            each.latents,
            std,
            spread=settings["init_spread"],
        )
        for each in cut
    ]
    if held:
        return Particles.hold(cut[0].network, likelihood or Classification(), latents[0]), cut[0]
    return stack_members([each.network for each in cut], likelihood, latents), cut[0]


def starting_latents(like: Tensor, components: int, latents: int, std: float, *, spread: float) -> TensorTree:
    """μ ~ N(1, spread²) and ρ of σ = |N(std, 0.02²)|, both (K, D), as parameters "mean" and "raw_std".

    Below std = 0.05, the smallest of the papers', 0.02 would be wider than what was asked for: there it is 0.4 std.
    """
    mean = 1 + spread * torch.randn(components, latents, dtype=like.dtype, device=like.device)
    deviation = (std + min(0.02, 0.4 * std) * torch.randn_like(mean)).abs().clamp(min=min(1e-4, 0.1 * std))
    tree = TensorTree()
    tree.plant("mean", nn.Parameter(mean))
    tree.plant("raw_std", nn.Parameter(raw_std(deviation)))
    return tree


def for_examples(mean: Tensor, std: Tensor, examples: int) -> Tensor:
    """(examples, D) latents: components in turn, from a random one on, so that all train alike whatever the batch."""
    components = len(mean)
    first = torch.randint(components, (1,), device=mean.device)
    order = (torch.arange(components, device=mean.device) + first) % components
    rounds = -(-examples // components)
    noise = torch.randn(rounds, *mean.shape, dtype=mean.dtype, device=mean.device)
    drawn = mean.index_select(0, order) + std.index_select(0, order) * noise  # (rounds, K, D)
    return drawn.flatten(0, 1)[:examples]


def for_functions(mean: Tensor, std: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """(samples, D) latents, components in turn: as many of each."""
    noise = torch.randn(samples, mean.shape[1], dtype=mean.dtype, device=mean.device, generator=generator)
    rounds = samples // len(mean)
    return mean.repeat(rounds, 1) + std.repeat(rounds, 1) * noise


def kept(latents: Tensor) -> TensorTree:
    """Latents (S, D) of a draw, to be saved with a posterior as "own.latents"."""
    tree = TensorTree()
    tree.plant("own.latents", latents)
    return tree


def _wide(tensor: Tensor) -> Tensor:
    """The tensor with at least 24 bits: sums over thousands of latents, whose differences count, need them."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
