"""Repulsive deep ensembles in weight space (D'Angelo & Fortuin, "Repulsive deep ensembles are Bayesian", NeurIPS 2021)."""

from collections.abc import Sequence
from typing import Unpack, final

from torch import nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.networks import StackedPosterior
from dissensus.core.prior import PriorKeywords
from dissensus.core.trainable import annealing_weight
from dissensus.methods.parts.comparison_spaces import trained_tensors
from dissensus.methods.parts.repulsion_strength import RepellingPosterior, Repulsion
from dissensus.numerics import rbf_kernels
from dissensus.numerics.annealing import Annealing, annealing_or_constant
from dissensus.numerics.rbf_kernels import squared_distances
from dissensus.utils.checks import one_of
from dissensus.utils.tensor_tree import Tensors


@final
class WeightRDE(RepellingPosterior, StackedPosterior):
    """M networks whose weights repel each other, so that together they approximate the posterior over weights.

    They follow the Wasserstein gradient flow of KL(q ‖ posterior), with the score of q estimated from the members:

        θ_i ← θ_i + η [a_t ∇ log p(θ_i | D) − ∇ log q(θ_i)]

    The loss here is a mean over data, so both terms are divided by N = `data_size`.

    Args:
        networks: M networks of one architecture, each initialised separately; copied.
        score: how ∇ log q is estimated: "kde", "stein" or "spectral_stein".
        annealing: a_t; None is constant 1.
        repulsion: factor of ∇ log q: "1/N" as above, "1/B" (stronger by N/B) or a number.
        batch_size: B in "1/B"; None is the largest batch seen in training.
        data_size: N, required.
        likelihood, prior, weight_prior_std: as in `Posterior`; without a prior, the optimiser's weight decay acts as one.
    """

    name = "weight_rde"
    needed = ("data_size",)

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        score: rbf_kernels.Score = "kde",
        annealing: Annealing | None = None,
        repulsion: Repulsion = "1/N",
        batch_size: int | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, likelihood=likelihood, **prior)
        self.score = one_of("score", score, rbf_kernels.SCORES)
        self.set_repulsion(repulsion, batch_size)
        self.annealing = annealing_or_constant(annealing)

    def mix(self, gradients: Tensors) -> Tensors:
        """a_t g + ∇ log q / N. Not `couple`: comparing weights needs no forward pass."""
        own = self.particles.own_parameters()
        z = trained_tensors({name: tensor.detach() for name, tensor in own.items()}, own)
        strength = self.strength(gathered=self.batches_per_step)
        matrix = rbf_kernels.score_matrix(self.score, squared_distances(z)) * strength
        repulsion = rbf_kernels.apply_matrix(matrix, {name: tensor - tensor.mean(0) for name, tensor in z.items()})
        weight = annealing_weight(self, self.annealing)
        driving = {name: gradient * weight for name, gradient in gradients.items()}
        # A tensor without a gradient gets no drive, but still counts in the distance between members.
        return driving | {name: force + driving.get(name, 0.0) for name, force in repulsion.items()}
