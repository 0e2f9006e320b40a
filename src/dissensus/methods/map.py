"""MAP: one network trained to the mode of its posterior, the baseline everything else is measured against."""

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.methods.parts.networks import NetworksPosterior


class MAP(NetworksPosterior):
    """One network. With a prior the loss is nll − log p(θ) / N: maximum a posteriori, not likelihood.

    Holds the caller's module itself, so the caller's optimiser and loop go on working.
    """

    name = "map"

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)
