"""MAP: one network trained to the mode of its posterior, the baseline of all other methods."""

from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
from dissensus.core.networks import NetworksPosterior


class MAP(NetworksPosterior):
    """One network, trained as usual. With a prior the loss is nll − log p(θ) / N (maximum a posteriori).

    Args:
        networks: one module, not copied, so that your own training loop keeps working; or a list of M, copied into a stack.
        latents: a module with extra trained tensors, for subclasses; None has none.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "map"

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)
