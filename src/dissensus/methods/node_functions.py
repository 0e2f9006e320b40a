"""Functions of a network with latents on its nodes: one set of latents for each, the weights common to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.functions import DrawnFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.modes import eval_mode
from dissensus.core.particles import Member, Particles, Rows, member_index
from dissensus.core.predictive import Predictive
from dissensus.numerics.tree import Tensors
from dissensus.surgery.conversion import DENSE, folded
from dissensus.surgery.nodes import Site, by_layer, folded_tensors, standing, tied_layers


class NodeFunctions(DrawnFunctions):
    """S functions in eval mode, given by latents (S, D).

    Where there are convolutions functions run one after the other with their latents folded into the weights, so that each
    costs one plain pass; a network of dense layers alone runs all at once, with weights in common and latents on activations.
    """

    def __init__(self, particles: Particles, sites: Sequence[Site], latents: Tensor) -> None:
        super().__init__()
        self.particles = particles
        self.sites = sites
        self.latents = latents
        self.members = len(latents)
        self.training = False
        network = particles.template.network
        layers = {site.layer: network.get_submodule(site.layer) for site in sites}
        particles.how = "vectorised" if all(isinstance(layer, DENSE) for layer in layers.values()) else "loop"
        tied = tied_layers(network, sites)
        alone = particles.how == "loop"
        self.foldable = {name: layer for name, layer in layers.items() if alone and name not in tied}

    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        particles = self.particles
        shared, common = particles.shared_parameters(), particles.shared_buffers()

        def one(row: Rows) -> Any:
            return self._call(function, row.varying["latents"], shared, common, *args)

        with particles.turn(), eval_mode(particles, particles.template):
            return particles.run(one, Rows({}, {}, {"latents": self.latents}), self.members)

    def predict_parts(self, x: Inputs) -> Iterator[Predictive]:
        particles = self.particles
        if particles.how == "vectorised":
            yield from super().predict_parts(x)
            return
        for latents in self.latents:
            with particles.turn(), eval_mode(particles, particles.template), batches.unchanged(x):
                described: tuple[Tensor, ...] = self._call(
                    _described, latents, particles.shared_parameters(), particles.shared_buffers(), x
                )
            yield self.likelihood.predictive(*(tensor[None] for tensor in described))

    def _call(self, function: Callable[..., Any], latents: Tensor, shared: Tensors, common: Tensors, *args: Any) -> Any:
        """function(member, *args) of the member with these latents (D,)."""
        nodes = by_layer(self.sites, latents)
        params = dict(shared)
        for name, layer in self.foldable.items():
            weight, bias = (f"network.{name}.{leaf}" if name else f"network.{leaf}" for leaf in ("weight", "bias"))
            found = folded_tensors(layer, shared[weight], shared.get(bias), nodes.pop(name))
            params |= {key: tensor for key, tensor in zip((weight, bias), found, strict=True) if tensor is not None}

        def with_latents(member: Member, *inner: Any) -> Any:
            with standing(member.network, nodes):
                return function(member, *inner)

        return self.particles.call(with_latents, params, common, *args)[0]

    def member(self, index: int) -> nn.Module:
        return collapsed(self.particles, self.sites, self.latents[member_index(index, self.members)]).eval()

    @property
    def likelihood(self) -> Likelihood:
        return self.particles.likelihood


def collapsed(particles: Particles, sites: Sequence[Site], latents: Tensor) -> nn.Module:
    """An ordinary network that computes what the members' network does with these latents (D,) on its nodes."""
    network = particles.member(0)
    for name, nodes in by_layer(sites, latents.detach()).items():
        network.get_submodule(name).nodes = nodes  # type: ignore[assignment]
    with torch.no_grad():
        return folded(network)


def _described(member: Member, x: Inputs) -> tuple[Tensor, ...]:
    return member.likelihood.describe(batches.call(member.network, x))
