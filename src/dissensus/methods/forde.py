"""FoRDE: first-order repulsive deep ensembles, "Input-gradient space particle inference" (Trinh et al., ICLR 2024)."""

from collections.abc import Sequence
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core.batch import Batch
from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.comparison_spaces import Gradient, input_dimension
from dissensus.methods.parts.input_gradients import InputGradientPosterior
from dissensus.methods.parts.repulsion_strength import RepellingPosterior, Repulsion
from dissensus.numerics.lengthscales import Lengthscales
from dissensus.numerics.rbf_kernels import BANDWIDTHS, Bandwidth, input_gradient_force
from dissensus.utils.checks import integer, one_of


@final
class FoRDE(RepellingPosterior, InputGradientPosterior):
    """M networks whose input gradients repel each other, so that they use different features for the same labels.

        loss = Σ_i [mean_b nll_ib + c r_i],   r_i = log Σ_j (1/B) Σ_b κ(s_ib, sg[s_jb]),   s = g / ‖g‖

    with g_ib the derivative of member i's true-class logit at input b (`numerics.kernels.input_gradient_log_density`).
    Inputs must be floating point with at least two features.

    Args:
        networks: M networks of one architecture, each initialised separately; copied.
        lengthscales: of the kernel: None (the identity) or the result of `pca_lengthscales`.
        bandwidth: "reference" (the authors' code), "sample" (eq. 17) or "algorithm" (algorithm 1).
        gradient: the differentiated output: the true-class "logit" (the authors' code; the mean for regression) or the
            "log_prob", which does not change when a function is added to all logits.
        repulsion: c: "1/B" (the paper), "1/N" (correct for the posterior; needs `data_size`) or a number.
        every: members repel at every k-th optimiser step only, with the same c; k > 1 turns off CUDA graphs.
        examples: number of examples per batch used for the repulsion, in a second forward pass; None is all of them.
        batch_size: B in "1/B"; None is the largest batch seen in training, so that a smaller last batch repels no
            more strongly than the others.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "forde"
    eigenvectors: Tensor | None
    precision: Tensor | None
    remainder: Tensor | None

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        lengthscales: Lengthscales | None = None,
        bandwidth: Bandwidth = "reference",
        gradient: Gradient = "logit",
        repulsion: Repulsion = "1/B",
        every: int = 1,
        examples: int | None = None,
        batch_size: int | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        if lengthscales is not None and not isinstance(lengthscales, Lengthscales):
            raise TypeError(f"expected Lengthscales, got {type(lengthscales).__name__}; make pca_lengthscales(inputs)")
        super().__init__(networks, gradient=gradient, examples=examples, likelihood=likelihood, **prior)
        self.bandwidth = one_of("bandwidth", bandwidth, BANDWIDTHS)
        self.set_repulsion(repulsion, batch_size)
        self.every = integer("every", every)
        self.capturable = every == 1
        self.register_buffer("eigenvectors", None if lengthscales is None else lengthscales.eigenvectors.clone())
        self.register_buffer("precision", None if lengthscales is None else lengthscales.precision.clone())
        remainder = None if lengthscales is None else lengthscales.precision.new_tensor(float(lengthscales.remainder))
        self.register_buffer("remainder", remainder)

    @property
    def lengthscales(self) -> Lengthscales | None:
        """The kernel's lengthscales, on the posterior's device; None is the identity."""
        if self.eigenvectors is None or self.precision is None or self.remainder is None:
            return None
        return Lengthscales(self.eigenvectors, self.precision, self.remainder)

    def couple(self, z: Any) -> Any:
        """c ∂r_i/∂g_i for every member."""
        g = z["gradients"]  # (M, B, D)
        weight = z["weight"][0] if "weight" in z else None  # (B,)

        force = input_gradient_force(g, self.lengthscales, self.bandwidth, weight=weight)
        force = self.strength(g.shape[1], weight, gathered=self.batches_per_step) * force
        return {name: force if name == "gradients" else torch.zeros_like(tensor) for name, tensor in z.items()}

    def before_step(self, batch: Batch) -> None:
        if self.every > 1 and self.particles.total_members > 1:
            # Decided here, on the host and before the step: the engines read `is_coupled` when they run the step.
            self.interaction = "couple" if int(self.steps) % self.every == 0 else None
        super().before_step(batch)

    def check_batch(self, batch: Batch) -> None:
        super().check_batch(batch)
        dimension = input_dimension(batch.x)
        if self.particles.total_members > 1 and self.eigenvectors is not None and len(self.eigenvectors) != dimension:
            got = f"{len(self.eigenvectors)}; make them from such inputs: pca_lengthscales(inputs)"
            raise ValueError(f"expected lengthscales of {dimension} dimensions for these inputs, got {got}")
