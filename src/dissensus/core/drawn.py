"""Drawn functions: what a posterior gives when it is asked for M of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.likelihood import Likelihood
from dissensus.core.particles import Member, Particles
from dissensus.core.predictive import Predictive


class Drawn(nn.Module, ABC):
    """Functions drawn from a posterior, fixed: (B, *in) -> (M, B, *out)."""

    members: int
    particles: Particles  # whose tensors the functions are made of

    @abstractmethod
    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(member, *args) of each drawn function, stacked along a new first axis."""

    @abstractmethod
    def member(self, index: int) -> nn.Module:
        """One function as an ordinary module."""

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """What the functions' outputs mean."""

    def forward(self, x: Inputs) -> Tensor:
        with batches.unchanged(x):
            outputs: Tensor = self.each(_outputs, x)  # (M, B, ...)
        return outputs

    def predict(self, x: Inputs) -> Predictive:
        """The mixture of the functions."""
        with batches.unchanged(x):
            return self.likelihood.predictive(*self.describe(x))

    def predict_parts(self, x: Inputs) -> Iterator[Predictive]:
        """The mixture in parts, a few functions at a time: nothing grows with their number where they run in a loop."""
        yield self.predict(x)

    def describe(self, x: Inputs) -> tuple[Tensor, ...]:
        """What the likelihood says of each function's outputs, each tensor (M, B, ...)."""
        described: tuple[Tensor, ...] = self.each(_described, x)
        return described


class DrawnParticles(Drawn):
    """The stored members themselves."""

    def __init__(self, particles: Particles, *, ordinary: Callable[[nn.Module], nn.Module] | None = None) -> None:
        """`ordinary`: what makes a member's network an ordinary one, of methods that cut its layers."""
        super().__init__()
        self.particles = particles
        self.ordinary = ordinary
        self.members = particles.members
        self.training = particles.training

    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.particles.each(function, *args)

    def predict_parts(self, x: Inputs) -> Iterator[Predictive]:
        if self.particles.how == "vectorised":
            yield from super().predict_parts(x)
            return
        rows, shared = self.particles.rows(), self.particles.shared_parameters()
        common = self.particles.shared_buffers()
        for i in range(self.members):
            row = rows.at(i)
            with batches.unchanged(x):
                described, _ = self.particles.call(_described, {**shared, **row.own}, {**common, **row.buffers}, x)
            yield self.likelihood.predictive(*(tensor[None] for tensor in described))

    def member(self, index: int) -> nn.Module:
        network = self.particles.member(index)
        return network if self.ordinary is None else self.ordinary(network)

    @property
    def likelihood(self) -> Likelihood:
        return self.particles.likelihood


def _outputs(member: Member, x: Inputs) -> Tensor:
    return batches.call(member.network, x)


def _described(member: Member, x: Inputs) -> tuple[Tensor, ...]:
    return member.likelihood.describe(batches.call(member.network, x))
