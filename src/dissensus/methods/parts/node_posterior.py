"""The posterior over latents of node-based BNNs: a mixture of Gaussians for one network, or one for each of several."""

from abc import ABC
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.methods.parts.node_latents import Complexity
from dissensus.methods.parts.stored_draw import StoringPosterior
from dissensus.numerics.tree import Tensors


class LatentPosterior(StoringPosterior, ABC):
    """Base class of posteriors whose members have latents "mean" and "raw_std" (K, D)."""

    complexity: Complexity

    @property
    def mean(self) -> Tensor:
        """(K, D) μ; of a list of networks (M, K, D)."""
        return self._latent_parameters()["latents.mean"]

    @property
    def std(self) -> Tensor:
        """(K, D) σ; of a list of networks (M, K, D)."""
        return F.softplus(self._latent_parameters()["latents.raw_std"])

    def _latents(self) -> tuple[Tensor, Tensor]:
        """(M, K, D) μ, σ."""
        mean, std = self.mean, self.std
        return (mean[None], std[None]) if mean.ndim == 2 else (mean, std)

    def _latent_parameters(self) -> Tensors:
        stored = {**self.particles.shared_parameters(), **self.particles.own_parameters()}
        return {name: parameter for name, parameter in stored.items() if name.startswith("latents.")}

    def kl(self) -> Tensor:
        """() KL(q ‖ p) in nats, not divided by N: an upper bound, or iBNN's surrogate; of a list of networks (M,)."""
        return self._of_each(self.complexity.kl)

    def entropy(self) -> Tensor:
        """() the bound on H(q) in nats; of a list of networks (M,)."""
        return self._of_each(self.complexity.entropy)

    def _of_each(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        found = torch.stack([function(mean, std) for mean, std in zip(*self._latents(), strict=True)])
        return found[0] if self.mean.ndim == 2 else found
