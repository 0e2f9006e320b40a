"""Feature-space repulsive ensembles (Yashima, Suzuki, Ishikawa, Sato & Kawakami, ICML 2022)."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Likelihood
from dissensus.core.networks import StackedPosterior
from dissensus.core.particles import Member, Particles
from dissensus.core.posterior import inference_context
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.comparison_spaces import add_to_output, attach_to_graph, differentiate
from dissensus.methods.parts.repulsion_strength import RepellingPosterior, Repulsion
from dissensus.numerics.annealing import scale_gradient
from dissensus.numerics.eigen import Order, extreme_eigenvectors
from dissensus.numerics.rbf_kernels import FLOOR, median, squared_distances, to_kernel_precision
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.tensor_tree import Tensors


@final
class FeatureRDE(RepellingPosterior, StackedPosterior):
    """M encoders with one shared head; they repel each other in the feature directions that matter for the loss.

    F_i are the features of the batch and g_i the gradient of the loss there. V is an orthonormal basis of `projection`
    principal directions of {g_1 … g_M}, p_i = Vᵀ F_i, and

        gradient at F_i = ∂ mean nll + ∂ mean prior(F_i) + c V ∇_{p_i} log Σ_j exp(−‖p_i − p_j‖² / h_i).

    The defaults of `order` and `bandwidth` differ from the authors' code.

    Args:
        networks: M networks of one architecture, each initialised separately; copied.
        layer: name of the submodule whose output is the feature.
        head: name of the submodule that all members share; it starts as the first network's. Its gradient is the mean
            over members, so it learns as fast as in one network.
        projection: number of directions kept, at most M.
        feature_prior: "cauchy" Σ log(1 + a F²), "gaussian" a/2 Σ F², or "none"; a mean over examples, as the loss is.
        prior_scale: a.
        order: keep the directions of the "largest" eigenvalues, or, as the authors' code does, of the "smallest".
        bandwidth: "median" is h_i = median_j ‖p_i − p_j‖² / log M; "squared", as in the authors' code, squares that
            median again, so its unit is not that of a squared distance.
        repulsion: c: "1/B" (the paper), "1/N" (correct for the posterior; needs `data_size`) or a number.
        batch_size: B in "1/B"; None is the largest batch seen in training, so that a smaller last batch repels no
            more strongly than the others.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "feature_rde"

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        layer: str,
        head: str,
        projection: int = 5,
        feature_prior: Literal["cauchy", "gaussian", "none"] = "cauchy",
        prior_scale: float = 0.005,
        order: Order = "largest",
        bandwidth: Literal["median", "squared"] = "median",
        repulsion: Repulsion = "1/B",
        batch_size: int | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, likelihood=likelihood, **prior)
        share_head(self.particles, layer=layer, head=head)
        self.layer, self.head = layer, head
        self.projection = integer("projection", projection)
        self.feature_prior = one_of("feature_prior", feature_prior, ("cauchy", "gaussian", "none"))
        self.prior_scale = number("prior_scale", prior_scale, above=0, hint='feature_prior="none" turns the prior off')
        self.order = one_of("order", order, ("largest", "smallest"))
        self.bandwidth = one_of("bandwidth", bandwidth, ("median", "squared"))
        self.set_repulsion(repulsion, batch_size)
        self._feature_shapes: dict[tuple[Any, ...], torch.Size] = {}

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        # The head gets gradients from all M members; divide their sum by M.
        shared = self.particles.shared_parameters()
        used = {n: scale_gradient(p, 1 / self.particles.total_members) if n in shared else p for n, p in params.items()}
        if self.interaction != "couple":
            return super().member_loss(params, buffers, batch)

        def at_feature(member: Member, shift: Tensor) -> tuple[Tensor, Tensor]:
            with add_to_output(member.network, self.layer, shift) as seen:
                nll = member.nll(batch)
            return nll, seen[0]

        def of_shift(shift: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
            (nll, feature), after = self.particles.call(at_feature, used, buffers, shift)
            return nll, (nll, feature, after)

        some = next(iter(params.values()))
        zeros = torch.zeros(self._feature_shape(batch.x), dtype=some.dtype, device=some.device)
        (slope,), (nll, feature, after) = differentiate(of_shift, zeros)
        z = {"features": feature, "slopes": attach_to_graph(self.particles.exchange.scale_by_fraction(slope), feature)}
        if batch.weight is not None:
            z["weight"] = attach_to_graph(batch.weight.to(feature.dtype), feature.flatten(1).sum(1))
        return nll + self.penalty(params), z, after

    def couple(self, z: Any) -> Any:
        """∂ mean prior + c V ∇ log q at the features."""
        shape = z["features"].shape
        features = to_kernel_precision(z["features"])
        features = features.flatten(2) if len(shape) > 2 else features[:, :, None]  # (M, B, c)
        slopes = to_kernel_precision(z["slopes"]).reshape(features.shape)
        w = to_kernel_precision(z["weight"][0])[:, None] if "weight" in z else features.new_ones(shape[1], 1)  # (B, 1)
        # Distances and gradients in the coordinates √w F: an example of weight two counts as two equal examples.
        root = w.sqrt()
        slopes = torch.where(root > 0, slopes / root, 0.0)
        force = self._repulsion((root * features).flatten(1), slopes.flatten(1)).reshape(features.shape)
        weight = w[:, 0] if "weight" in z else None
        c = self.strength(shape[1], weight, gathered=self.batches_per_step)
        v = w * self._prior_slope(features) / w.sum().clamp(min=torch.finfo(w.dtype).tiny) + c * root * force
        zeros = {name: torch.zeros_like(tensor) for name, tensor in z.items()}
        return zeros | {"features": v.reshape(shape).to(z["features"].dtype)}

    def _repulsion(self, points: Tensor, slopes: Tensor) -> Tensor:
        """(M, P) V ∇_{p_i} log Σ_j exp(−‖p_i − p_j‖² / h_i), p = Vᵀ points, V from the slopes."""
        members = len(points)
        # V_m = Σ_i u_im g_i / √λ_m from the Gram matrix of slopes, U diag(λ) Uᵀ
        gram = slopes @ slopes.T
        values, vectors = extreme_eigenvectors(gram, min(self.projection, members), self.order)
        inverse = torch.where(values > 1e-12 * gram.diagonal().sum(), values.clamp(min=1e-300).rsqrt(), 0.0)
        basis = (vectors * inverse).T @ slopes  # (k, P), orthonormal rows
        p = (points - points.mean(0)) @ basis.T  # (M, k)
        squared = squared_distances(p)
        middle = median(squared, 1)  # (M, 1)
        h = ((middle if self.bandwidth == "median" else middle.square()) / math.log(members)).clamp(min=FLOOR)
        share = torch.softmax(-squared / h, dim=1)
        force: Tensor = (2 / h) * (share @ p - p)  # (M, k)
        lifted: Tensor = force @ basis
        return lifted

    def _prior_slope(self, features: Tensor) -> Tensor:
        """The derivative of the prior's −log density, elementwise."""
        a = self.prior_scale
        if self.feature_prior == "cauchy":
            return 2 * a * features / (1 + a * features.square())
        return a * features if self.feature_prior == "gaussian" else torch.zeros_like(features)

    def _feature_shape(self, x: Inputs) -> torch.Size:
        """(B, ...) shape of the layer's output; found by running one member once per shape of x."""
        key = tuple((tuple(t.shape), t.dtype) for t in batches.input_tensors(x))
        if key not in self._feature_shapes:
            particles, row = self.particles, self.particles.rows().member_row(0)

            def shape(member: Member) -> torch.Size:
                after_layer: list[bool] = []  # one per call of the head; empty if other modules only read its weights
                with add_to_output(member.network, self.layer, None) as seen:
                    head = member.network.get_submodule(self.head)
                    handle = head.register_forward_pre_hook(lambda *_: after_layer.append(bool(seen)))
                    try:
                        batches.call_network(member.network, x)
                    finally:
                        handle.remove()
                if after_layer and not any(after_layer):
                    got = f"'{self.layer}', which runs after it; name the layer that feeds the head"
                    raise ValueError(f"expected a layer that runs before the head '{self.head}', got {got}")
                return seen[0].shape

            with inference_context(self):
                params = {**particles.shared_parameters(), **row.own}
                found, _ = particles.call(shape, params, {**particles.shared_buffers(), **row.buffers})
            self._feature_shapes[key] = found
        return self._feature_shapes[key]


def share_head(stacked: Particles, *, layer: str, head: str) -> None:
    """Makes all members use the first member's parameters of `head`; each member keeps its own buffers of it."""
    network = stacked.template.network
    known = [name for name, _ in network.named_modules() if name]
    for what, name in (("layer", layer), ("head", head)):
        one_of(what, name, known, hint="name a submodule")
    inside = {id(parameter) for parameter in network.get_submodule(head).parameters()}
    if not inside:
        raise ValueError(f"expected a head with parameters to share, got '{head}', which has none; name another layer")
    owners = [(name, id(parameter) in inside) for name, parameter in network.named_parameters(remove_duplicate=False)]
    tied = [name for name, within in owners if within and not name.startswith(f"{head}.")]
    if tied:
        raise ValueError(f"expected a head that shares no parameters, got '{tied[0]}' tied to '{head}'; untie them")
    if stacked.divided:
        raise NotImplementedError("expected undivided networks for FeatureRDE, got divided ones; leave shard out")
    stacked.store_once([name for name in stacked.own_parameters() if name.startswith(f"network.{head}.")])
    encoders = [p.detach().reshape(len(p), -1) for p in stacked.own.parameters() if p.requires_grad]
    if not encoders:
        got = f"them all in the head '{head}'"
        raise ValueError(f"expected encoders with trainable parameters, got {got}; name a smaller head, or thaw layers")
    if len(torch.unique(torch.cat(encoders, dim=1), dim=0)) < stacked.members:  # rows of (M, P)
        raise ValueError("expected encoders that start at different weights, got equal ones; initialise each network")
