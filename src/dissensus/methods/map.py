"""MAP: one network trained to the mode of its posterior, the baseline everything else is measured against."""

from typing import Any, Unpack

from torch import nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.networks import Networks, described, one_or_many, rebuilt


class MAP(Posterior):
    """One network. With a prior the loss is nll − log p(θ) / N: maximum a posteriori, not likelihood.

    Holds the caller's module itself, so the caller's optimiser and loop go on working.
    """

    name = "map"

    def __init__(
        self, networks: Networks, *, likelihood: Likelihood | None = None, **prior: Unpack[PriorKeywords]
    ) -> None:
        super().__init__(one_or_many(networks, likelihood), **prior)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        return {**described(self.particles), **self.prior_config()}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "MAP":
        networks, settings = rebuilt(network, config, likelihood)
        return cls(networks, likelihood=likelihood, **settings)
