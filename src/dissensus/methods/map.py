"""MAP: one network trained to the mode of its posterior, the baseline everything else is measured against."""

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.methods.parts.networks import NetworksPosterior


class MAP(NetworksPosterior):
    """One network. With a prior the loss is nll − log p(θ) / N: maximum a posteriori, not likelihood.

    Args:
        networks: one module, the caller's own and not a copy, so that the caller's optimiser and loop go on working; or
            a list of M of one architecture, copied into a stack.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "map"

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)
