"""MAP: one network trained to the mode of its posterior, the baseline everything else is measured against."""

from typing import Any

from torch import nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods.networks import Networks, described, one_or_many, rebuilt


class MAP(Posterior):
    """One network. With `weight_prior_std` the loss is nll + ‖θ‖²/(2Nσ²): maximum a posteriori, not likelihood.

    Holds the caller's module itself, so the caller's optimiser and loop go on working.
    """

    name = "map"

    def __init__(
        self,
        networks: Networks,
        *,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        particles = one_or_many(networks, likelihood)
        super().__init__(particles, weight_prior_std=weight_prior_std, data_size=data_size)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        prior = {"weight_prior_std": self.weight_prior_std, "data_size": self.data_size}
        return {**described(self.particles), **prior}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "MAP":
        networks, settings = rebuilt(network, config, likelihood)
        return cls(networks, likelihood=likelihood, **settings)
