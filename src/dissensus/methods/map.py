"""MAP: one network trained to the mode of its posterior, the baseline of all other methods."""

from typing import final

from dissensus.core.networks import NetworksPosterior


@final
class MAP(NetworksPosterior):
    """One network, trained as usual. With a prior the loss is nll − log p(θ) / N (maximum a posteriori).

    Args:
        networks: one module, not copied, so that your own training loop keeps working; a list of M,
            copied into a stack; or another posterior's `Particles`, shared.
        latents: a module with extra trained tensors; None has none.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "map"
