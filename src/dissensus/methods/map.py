"""MAP: one network trained to the mode of its posterior, the baseline everything else is measured against."""

from typing import Any

from torch import nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior


class MAP(Posterior):
    """One network. With `weight_prior_std` the loss is nll + ‖θ‖²/(2Nσ²): maximum a posteriori, not likelihood.

    Holds the caller's module itself, so the caller's optimiser and loop go on working.
    """

    name = "map"

    def __init__(
        self,
        module: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        particles = Particles.hold(module, likelihood or Classification())
        super().__init__(particles, weight_prior_std=weight_prior_std, data_size=data_size)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        return {"weight_prior_std": self.weight_prior_std, "data_size": self.data_size}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "MAP":
        return cls(network, likelihood=likelihood, **config)
