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
from dissensus.surgery.conversion import DENSE, folded
from dissensus.surgery.nodes import Site, by_layer, standing


class NodeFunctions(DrawnFunctions):
    """S functions in eval mode, given by latents (S, D).

    Where there are convolutions functions run one after the other with their latents folded into the kernels, so that each
    costs one plain pass; a network of dense layers alone runs all at once, with weights in common and latents on activations.
    """

    def __init__(self, particles: Particles, sites: Sequence[Site], latents: Tensor) -> None:
        super().__init__()
        self.particles = particles
        self.sites = sites
        self.latents = latents
        self.members = len(latents)
        self.training = False
        layers = [particles.template.network.get_submodule(site.layer) for site in sites]
        particles.how = "vectorised" if all(isinstance(layer, DENSE) for layer in layers) else "loop"

    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        particles = self.particles

        def all_of(member: Member) -> Any:  # the weights are put in once for all
            def one(row: Rows) -> Any:
                with standing(member.network, by_layer(self.sites, row.varying["latents"])):
                    return function(member, *args)

            return particles.run(one, Rows({}, {}, {"latents": self.latents}), self.members)

        with particles.turn(), eval_mode(particles, particles.template):
            return particles.call(all_of, particles.shared_parameters(), particles.shared_buffers())[0]

    def predict_parts(self, x: Inputs) -> Iterator[Predictive]:
        particles = self.particles
        if particles.how == "vectorised":
            yield from super().predict_parts(x)
            return
        for latents in self.latents:
            nodes = by_layer(self.sites, latents)

            def described(member: Member, nodes: Any = nodes) -> tuple[Tensor, ...]:
                with standing(member.network, nodes):
                    return member.likelihood.describe(batches.call(member.network, x))

            with particles.turn(), eval_mode(particles, particles.template), batches.unchanged(x):
                found = particles.call(described, particles.shared_parameters(), particles.shared_buffers())[0]
            yield self.likelihood.predictive(*(tensor[None] for tensor in found))

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
