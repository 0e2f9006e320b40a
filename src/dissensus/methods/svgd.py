"""Stein variational gradient descent (Liu & Wang, NeurIPS 2016), on weights or on functions (Wang et al., ICLR 2019)."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch
from dissensus.core.likelihood import Likelihood, full_precision
from dissensus.core.networks import StackedPosterior
from dissensus.core.particles import Member
from dissensus.core.prior import PriorKeywords
from dissensus.core.trainable import annealing_weight
from dissensus.methods.parts.repulsion import attach_to_graph, differentiate, outputs_as_points, trained_tensors
from dissensus.numerics import score_estimates
from dissensus.numerics.annealing import Annealing, annealing_or_constant
from dissensus.numerics.rbf_kernels import squared_distances
from dissensus.utils.checks import one_of
from dissensus.utils.tensor_tree import Tensors


@final
class SVGD(StackedPosterior):
    """M networks moved by kernel-weighted averages of all members' gradients and repelled by the kernel's gradient.

        φ_i = (1/M) Σ_j [a_t k(z_i, z_j) ∇ log p(z_j | D) + ∇_{z_j} k(z_i, z_j)]

    The loss is a mean over data, so φ is divided by N = `data_size`. Because of the paper's 1/M, plain SGD is M times
    slower than for an ensemble when members are far apart.

    Args:
        networks: M networks of one architecture, each initialised separately; copied.
        space: "weight" (z = weights) or "function" (z = outputs on the batch). In function space φ is pulled back to
            the weights, and a weight prior acts on each member's own weights, as strongly as the likelihood does.
        annealing: a_t; None is constant 1.
        data_size: N, required.
        likelihood, prior, weight_prior_std: as in `Posterior`.
    """

    name = "svgd"
    needed = ("data_size",)

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        space: Literal["weight", "function"] = "weight",
        annealing: Annealing | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, likelihood=likelihood, **prior)
        self.space = one_of("space", space, ("weight", "function"))
        if self.interaction is not None:
            self.interaction = "mix" if space == "weight" else "couple"
        self.annealing = annealing_or_constant(annealing)

    # ------------------------------------------------------------------ weight space: gradients are mixed

    def mix(self, gradients: Tensors) -> Tensors:
        """−φ/N = (1/M) [a_t K g + G/N], g the gradients of the mean loss."""
        own = self.particles.own_parameters()
        z = trained_tensors({name: tensor.detach() for name, tensor in own.items()}, own)
        kernel, h = score_estimates.kernel_and_bandwidth(squared_distances(z))
        count, size = self.particles.members, self.data_size or 1
        driving = score_estimates.apply_matrix(kernel * (annealing_weight(self, self.annealing) / count), gradients)
        slopes = score_estimates.slopes(kernel, h) / (count * size)
        repulsion = score_estimates.apply_matrix(slopes, {name: tensor - tensor.mean(0) for name, tensor in z.items()})
        return {**driving, **{name: force + driving.get(name, 0.0) for name, force in repulsion.items()}}

    # ------------------------------------------------------------------ function space: slopes at the outputs are mixed

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        if self.interaction != "couple":
            return super().member_loss(params, buffers, batch)

        def slope(member: Member) -> tuple[Tensor, Tensor, Tensor]:
            outputs = full_precision(batches.call_network(member.network, batch.x))
            nll = member.likelihood.nll(outputs, batch.y, batch.weight)
            (u,), _ = differentiate(lambda f: (member.likelihood.nll(f, batch.y, batch.weight), ()), outputs.detach())
            return nll, outputs, attach_to_graph(self.particles.exchange.scale_by_fraction(u), outputs)

        (nll, outputs, u), buffers = self.particles.call(slope, params, buffers)
        z = {"outputs": outputs, "points": outputs_as_points(outputs, batch.weight), "slopes": u}
        penalty = self.penalty(params)
        if isinstance(penalty, Tensor):
            z["penalty"] = penalty
        return nll + penalty, z, buffers

    def couple(self, z: Any) -> Any:
        """v = (1/M) [a_t K u + G/N] − u, with u_i the gradient of loss_i at its outputs, which the loss itself adds.

        A weight prior has no gradient at the outputs. It gets the same factor as the likelihood, (a_t/M) Σ_j k_ij: a_t if
        members are equal, a_t/M if they are far apart.
        """
        u, points = z["slopes"], z["points"]
        kernel, h = score_estimates.kernel_and_bandwidth(squared_distances(points))
        count, size = self.particles.members, self.data_size or 1
        driving = kernel * (annealing_weight(self, self.annealing) / count)
        slopes = score_estimates.slopes(kernel, h) / (count * size)
        repulsion = score_estimates.apply_matrix(slopes, points - points.mean(0))
        outputs = score_estimates.apply_matrix(driving, u) - u
        v = {"outputs": outputs, "points": repulsion, "slopes": torch.zeros_like(u)}
        return v | {"penalty": driving.sum(1).to(z["penalty"]) - 1} if "penalty" in z else v
