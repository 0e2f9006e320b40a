"""Ensembles whose members repel each other: repulsive deep ensembles in weight, function and feature space, and SVGD.

D'Angelo & Fortuin, "Repulsive deep ensembles are Bayesian", NeurIPS 2021; in feature space Yashima, Suzuki, Ishikawa, Sato &
Kawakami, ICML 2022. Stein variational gradient descent: Liu & Wang, NeurIPS 2016, and on functions Wang et al., ICLR 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Classification, full_precision
from dissensus.core.member import PREFIX
from dissensus.core.networks import MemberKeywords, MemberSource, StackedPosterior
from dissensus.core.particles import Member, Particles
from dissensus.core.posterior import inference_context
from dissensus.core.trainable import annealing_weight
from dissensus.methods.parts import repulsion as spaces
from dissensus.methods.parts.repulsion import RepellingPosterior, Repulsion
from dissensus.numerics import rbf_kernels
from dissensus.numerics.annealing import Annealing, annealing_or_constant, scale_gradient
from dissensus.numerics.eigen import Order, extreme_eigenvectors
from dissensus.numerics.rbf_kernels import FLOOR, median, squared_distances, to_kernel_precision
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.tensor_tree import Tensors


@final
class WeightRDE(RepellingPosterior, StackedPosterior):
    """M networks whose weights repel each other, so that together they approximate the posterior over weights.

    They follow the Wasserstein gradient flow of KL(q ‖ posterior), with the score of q estimated from the members:

        θ_i ← θ_i + η [a_t ∇ log p(θ_i | D) − ∇ log q(θ_i)]

    The loss here is a mean over data, so both terms are divided by N = `data_size`.

    Args:
        networks, members, base: as in `DeepEnsemble`.
        score: how ∇ log q is estimated: "kde", "stein" or "spectral_stein".
        annealing: a_t; None is constant 1.
        repulsion: factor of ∇ log q: "1/N" as above, "1/B" (stronger by N/B, as in FeatureRDE and FoRDE) or a number.
        batch_size: B in "1/B"; None is the largest batch seen in training.
        data_size: N, required.
        likelihood, prior, weight_prior_std: as in `Posterior`; without a prior, the optimiser's weight decay acts as one.
    """

    name = "weight_rde"
    needed = ("data_size",)

    def __init__(
        self,
        networks: MemberSource,
        *,
        score: rbf_kernels.Score = "kde",
        annealing: Annealing | None = None,
        repulsion: Repulsion = "1/N",
        batch_size: int | None = None,
        **prior: Unpack[MemberKeywords],
    ) -> None:
        super().__init__(networks, **prior)
        self.score = one_of("score", score, rbf_kernels.SCORES)
        self.set_repulsion(repulsion, batch_size)
        self.annealing = annealing_or_constant(annealing)

    def mix(self, gradients: Tensors) -> Tensors:
        """a_t g + ∇ log q / N. Not `couple`: comparing weights needs no forward pass."""
        z = spaces.trained_weights(self.particles)
        strength = self.strength(gathered=self.batches_per_step)
        matrix = rbf_kernels.score_matrix(self.score, squared_distances(z)) * strength
        repulsion = rbf_kernels.apply_matrix(matrix, {name: tensor - tensor.mean(0) for name, tensor in z.items()})
        weight = annealing_weight(self, self.annealing)
        driving = {name: gradient * weight for name, gradient in gradients.items()}
        # A tensor without a gradient gets no drive, but still counts in the distance between members.
        return driving | {name: force + driving.get(name, 0.0) for name, force in repulsion.items()}


@final
class FunctionRDE(RepellingPosterior, StackedPosterior):
    """M networks whose outputs repel each other, so that together they approximate the posterior over functions.

    With F_i the outputs of member i on the batch,

        F_i ← F_i + η [a_t (∇ log p(D | F_i) + ∇ log p(F_i)) − ∇ log q(F_i)],

    pulled back to the weights, both terms divided by N = `data_size`.

    Args:
        networks, members, base: as in `DeepEnsemble`.
        score, annealing, repulsion, batch_size, data_size: as in `WeightRDE`.
        repel_at: inputs at which outputs are compared: the training "batch"; "noise", the batch plus noise; or your own.
        noise: standard deviation of that noise.
        outputs: compare "logits" (the raw outputs, for any likelihood) or, for classification, "probabilities", which is
            the default of the authors' code. With logits the equation above holds for every likelihood.
        functional_prior: True estimates ∇ log p(F) by spectral Stein from draws of the prior; False puts it on weights.
        output_prior: "cauchy" adds the mean over examples of Σ log(1 + a F²) over outputs to the loss (Trinh et al. 2024).
        prior_scale: a.
        likelihood, prior, weight_prior_std: as in `Posterior`.
    """

    name = "function_rde"
    needed = ("data_size",)

    def __init__(
        self,
        networks: MemberSource,
        *,
        score: rbf_kernels.Score = "kde",
        repel_at: Literal["batch", "noise"] | Inputs | InputBuffers = "batch",
        noise: float = 0.25,
        outputs: Literal["logits", "probabilities"] = "logits",
        functional_prior: bool = False,
        output_prior: Literal["cauchy", "none"] = "none",
        prior_scale: float = 1e-6,
        annealing: Annealing | None = None,
        repulsion: Repulsion = "1/N",
        batch_size: int | None = None,
        **prior: Unpack[MemberKeywords],
    ) -> None:
        super().__init__(networks, **prior)
        if outputs == "probabilities" and not isinstance(self.likelihood, Classification):
            raise ValueError('expected outputs="logits", got "probabilities"; only classification has probabilities')
        if functional_prior and self.prior is None:
            raise ValueError("expected a prior with functional_prior=True, got none; pass weight_prior_std= or prior=")
        self.score = one_of("score", score, rbf_kernels.SCORES)
        self.set_repulsion(repulsion, batch_size)
        self.repel_at: str | InputBuffers
        if isinstance(repel_at, str):
            self.repel_at = one_of("repel_at", repel_at, ("batch", "noise"), hint="or pass your own inputs")
        else:  # floating-point inputs get the dtype of the network's weights
            kind = next((weight.dtype for weight in self.parameters() if weight.is_floating_point()), None)
            self.repel_at = InputBuffers(repel_at.inputs() if isinstance(repel_at, InputBuffers) else repel_at).to(kind)
        self.noise = number("noise", noise, above=0, hint="pass a standard deviation")
        self.outputs = one_of("outputs", outputs, ("logits", "probabilities"))
        self.functional_prior = functional_prior
        self.output_prior = one_of("output_prior", output_prior, ("cauchy", "none"))
        self.prior_scale = number("prior_scale", prior_scale, above=0, hint='output_prior="none" turns the prior off')
        self.annealing = annealing_or_constant(annealing)

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        if self.interaction != "couple":
            return super().member_loss(params, buffers, batch)

        def nll_and_outputs(member: Member) -> tuple[Tensor, Tensor]:
            outputs, nll = member.outputs_and_nll(batch)
            return nll + self._output_penalty(outputs, batch.weight), self._comparison_values(outputs)

        (nll, outputs), after = self.particles.call(nll_and_outputs, params, buffers)
        z = {"outputs": spaces.outputs_as_points(outputs, batch.weight)}
        # Batch norm normalises these inputs in training mode, but keeps its running statistics.
        if self.repel_at != "batch":
            z["elsewhere"] = self._comparison_outputs(params, buffers, self._repulsion_inputs(batch.x))
            if self.repel_at == "noise":
                z["elsewhere"] = spaces.outputs_as_points(z["elsewhere"], batch.weight)
        if self.functional_prior:
            prior = self._comparison_outputs(self._prior_draw(params), buffers, batch.x)
            z["prior"] = spaces.attach_to_graph(spaces.outputs_as_points(prior, batch.weight), z["outputs"])
        loss = nll if self.functional_prior else nll + self.penalty(params)
        return scale_gradient(loss, annealing_weight(self, self.annealing)), z, after

    def couple(self, z: Any) -> Any:
        """(∇ log q − a_t ∇ log p) / N at the outputs."""
        where = "elsewhere" if "elsewhere" in z else "outputs"
        repelled = z[where]
        strength = self.strength(z["outputs"].shape[1], gathered=self.batches_per_step)
        matrix = rbf_kernels.score_matrix(self.score, squared_distances(repelled)) * strength
        v = {name: torch.zeros_like(tensor) for name, tensor in z.items()}
        v[where] = rbf_kernels.apply_matrix(matrix, repelled - repelled.mean(0))
        if "prior" in z:
            outputs, prior = z["outputs"], z["prior"]
            slope = rbf_kernels.spectral_stein_at(outputs.flatten(1), prior.flatten(1)).reshape(outputs.shape)
            v["outputs"] = v["outputs"] - slope * annealing_weight(self, self.annealing) / (self.data_size or 1)
        return v

    def check_batch(self, batch: Batch) -> None:
        super().check_batch(batch)
        if self.interaction == "couple" and isinstance(self.repel_at, InputBuffers):
            self.output_shape(self.repel_at.inputs())  # raises if the network rejects them

    def _comparison_values(self, outputs: Tensor) -> Tensor:
        probabilities = self.outputs == "probabilities"
        return self.likelihood.describe(outputs)[0].exp() if probabilities else full_precision(outputs)

    def _output_penalty(self, outputs: Tensor, weight: Tensor | None) -> Tensor | float:
        """() the weighted mean over examples of Σ log(1 + a F²); 0 without an output prior."""
        if self.output_prior == "none":
            return 0.0
        each = (self.prior_scale * full_precision(outputs).square()).log1p().flatten(1).sum(1)  # (B,)
        w = torch.ones_like(each) if weight is None else weight.to(each.dtype)
        return (w * each).sum() / w.sum().clamp(min=torch.finfo(w.dtype).tiny)

    def _comparison_outputs(self, params: Tensors, buffers: Tensors, x: Inputs) -> Tensor:
        outputs, _ = self.particles.call(lambda member: batches.call_network(member.network, x), params, buffers)
        return self._comparison_values(outputs)

    def _repulsion_inputs(self, x: Inputs) -> Inputs:
        if isinstance(self.repel_at, InputBuffers):
            return self.repel_at.inputs()

        def add_noise(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            size, here = self.particles.exchange.batch_rows(len(tensor))
            like = tensor if size == len(tensor) else tensor.new_empty(size, *tensor.shape[1:])
            drawn = spaces.normal_from_step(like, self.steps)
            return tensor + self.noise * (drawn if like is tensor else drawn[here])

        return batches.map_tensors(x, add_noise)

    def _prior_draw(self, params: Tensors) -> Tensors:
        """params with every trained tensor under the prior replaced by a draw from it."""
        names, prior = self.names_with_prior(), self.prior
        assert prior is not None  # checked in the constructor
        drawn = {name: prior.draw(name.removeprefix(PREFIX), params[name]) for name in names}
        return {name: tensor.detach() for name, tensor in params.items()} | drawn


class InputBuffers(nn.Module):
    """Copies of inputs (a tensor, or a tuple or dict of tensors) as buffers, moved and saved with the posterior."""

    def __init__(self, x: Inputs) -> None:
        super().__init__()
        self.form = "dict" if isinstance(x, Mapping) else "tuple" if isinstance(x, tuple | list) else "tensor"
        self.names = list(x) if isinstance(x, Mapping) else []
        values = list(x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x])
        if not values or not all(isinstance(value, Tensor) for value in values):
            wrong = next((value for value in values if not isinstance(value, Tensor)), x)
            kind = type(wrong).__name__
            raise TypeError(f"expected inputs as a tensor, tuple or dict of tensors, got {kind}; pass tensors (n, ...)")
        batches.check_finite(x, anywhere=True)
        for i, value in enumerate(values):
            if value.ndim == 0 or len(value) == 0:
                raise ValueError(f"expected inputs (n, ...), got shape {tuple(value.shape)}; pass at least one row")
            self.register_buffer(str(i), value.detach().clone())

    def inputs(self) -> Inputs:
        """The inputs, as they were given."""
        return _assemble_inputs(self.form, self.names, list(self.buffers()))

    def config(self) -> dict[str, Any]:
        """Structure, names, shapes and dtypes of the inputs, as JSON values."""
        kinds = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in self.buffers()]
        return {"form": self.form, "names": self.names, "tensors": kinds}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Zeros of these shapes, to be overwritten by the tensors of a file."""
        values = [torch.zeros(shape, dtype=getattr(torch, kind)) for shape, kind in config["tensors"]]
        return cls(_assemble_inputs(config["form"], config["names"], values))


def _assemble_inputs(form: str, names: Sequence[str], values: list[Tensor]) -> Inputs:
    if form == "dict":
        return dict(zip(names, values, strict=True))
    return tuple(values) if form == "tuple" else values[0]


@final
class FeatureRDE(RepellingPosterior, StackedPosterior):
    """M encoders with one shared head; they repel each other in the feature directions that matter for the loss.

    F_i are the features of the batch and g_i the gradient of the loss there. V is an orthonormal basis of `projection`
    principal directions of {g_1 … g_M}, p_i = Vᵀ F_i, and

        gradient at F_i = ∂ mean nll + ∂ mean prior(F_i) + c V ∇_{p_i} log Σ_j exp(−‖p_i − p_j‖² / h_i).

    The defaults of `order` and `bandwidth` differ from the authors' code.

    Args:
        networks, members, base: as in `DeepEnsemble`.
        layer: name of the submodule whose output is the feature.
        head: name of the submodule that all members share, at first the first network's. Its gradient is the mean of theirs.
        projection: number of directions kept, at most M.
        feature_prior: "cauchy" Σ log(1 + a F²), "gaussian" a/2 Σ F², or "none"; a mean over examples, as the loss is.
        prior_scale: a.
        order: keep the directions of the "largest" eigenvalues, or, as the authors' code does, of the "smallest".
        bandwidth: "median" is h_i = median_j ‖p_i − p_j‖² / log M; "squared", as in the authors' code, squares it again.
        repulsion, batch_size: as in `FoRDE`.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "feature_rde"

    def __init__(
        self,
        networks: MemberSource,
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
        **prior: Unpack[MemberKeywords],
    ) -> None:
        super().__init__(networks, **prior)
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
            with spaces.add_to_output(member.network, self.layer, shift) as seen:
                nll = member.nll(batch)
            return nll, seen[0]

        def of_shift(shift: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
            (nll, feature), after = self.particles.call(at_feature, used, buffers, shift)
            return nll, (nll, feature, after)

        some = next(iter(params.values()))
        zeros = torch.zeros(self._feature_shape(batch.x), dtype=some.dtype, device=some.device)
        (slope,), (nll, feature, after) = spaces.differentiate(of_shift, zeros)
        slope = self.particles.exchange.scale_by_fraction(slope)
        z = {"features": feature, "slopes": spaces.attach_to_graph(slope, feature)}
        if batch.weight is not None:
            z["weight"] = spaces.attach_to_graph(batch.weight.to(feature.dtype), feature.flatten(1).sum(1))
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
        c = self.strength(shape[1], w[:, 0] if "weight" in z else None, gathered=self.batches_per_step)
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
        return force @ basis

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

            def shape(member: Member) -> torch.Size:
                after_layer: list[bool] = []  # one per call of the head; empty if other modules only read its weights
                with spaces.add_to_output(member.network, self.layer, None) as seen:
                    head = member.network.get_submodule(self.head)
                    with head.register_forward_pre_hook(lambda *_: after_layer.append(bool(seen))):
                        batches.call_network(member.network, x)
                if after_layer and not any(after_layer):
                    got = f"'{self.layer}', which runs after it; name the layer that feeds the head"
                    raise ValueError(f"expected a layer that runs before the head '{self.head}', got {got}")
                return seen[0].shape

            with inference_context(self):
                self._feature_shapes[key] = self.particles.call_first(shape)
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


@final
class SVGD(StackedPosterior):
    """M networks moved by kernel-weighted averages of all members' gradients and repelled by the kernel's gradient.

        φ_i = (1/M) Σ_j [a_t k(z_i, z_j) ∇ log p(z_j | D) + ∇_{z_j} k(z_i, z_j)]

    The loss is a mean over data, so φ is divided by N = `data_size`. By the 1/M, far members learn M times slower in SGD.

    Args:
        networks, members, base: as in `DeepEnsemble`.
        space: "weight" (z = weights) or "function" (z = outputs on the batch). In function space φ is pulled back to
            the weights, and a weight prior acts on each member's own weights, as strongly as the likelihood does.
        annealing, data_size: as in `WeightRDE`.
        likelihood, prior, weight_prior_std: as in `Posterior`.
    """

    name = "svgd"
    needed = ("data_size",)

    def __init__(
        self,
        networks: MemberSource,
        *,
        space: Literal["weight", "function"] = "weight",
        annealing: Annealing | None = None,
        **prior: Unpack[MemberKeywords],
    ) -> None:
        super().__init__(networks, **prior)
        self.space = one_of("space", space, ("weight", "function"))
        if self.interaction is not None:
            self.interaction = "mix" if space == "weight" else "couple"
        self.annealing = annealing_or_constant(annealing)

    def _matrices(self, squared: Tensor) -> tuple[Tensor, Tensor]:
        """(a_t K / M, G / MN), each (M, M), for squared distances between the members."""
        kernel, h = rbf_kernels.kernel_and_bandwidth(squared)
        count = self.particles.members
        driving = kernel * (annealing_weight(self, self.annealing) / count)
        return driving, rbf_kernels.slopes(kernel, h) / (count * (self.data_size or 1))

    def mix(self, gradients: Tensors) -> Tensors:
        """−φ/N = (1/M) [a_t K g + G/N], g the gradients of the mean loss."""
        z = spaces.trained_weights(self.particles)
        kernel, slopes = self._matrices(squared_distances(z))
        driving = rbf_kernels.apply_matrix(kernel, gradients)
        repulsion = rbf_kernels.apply_matrix(slopes, {name: tensor - tensor.mean(0) for name, tensor in z.items()})
        return {**driving, **{name: force + driving.get(name, 0.0) for name, force in repulsion.items()}}

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        if self.interaction != "couple":
            return super().member_loss(params, buffers, batch)

        def slope(member: Member) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
            def loss(f: Tensor) -> tuple[Tensor, tuple[()]]:
                return member.likelihood.nll(f, batch.y, batch.weight), ()

            outputs, auxiliary = member.outputs_and_auxiliary(batch)
            outputs = full_precision(outputs)
            (u,), _ = spaces.differentiate(loss, outputs.detach())
            u = self.particles.exchange.scale_by_fraction(u)
            return loss(outputs)[0], outputs, spaces.attach_to_graph(u, outputs), auxiliary

        (nll, outputs, u, auxiliary), buffers = self.particles.call(slope, params, buffers)
        z = {"outputs": outputs, "points": spaces.outputs_as_points(outputs, batch.weight), "slopes": u}
        penalty = self.penalty(params) + auxiliary
        if isinstance(penalty, Tensor):
            z["penalty"] = penalty
        return nll + penalty, z, buffers

    def couple(self, z: Any) -> Any:
        """v = (1/M) [a_t K u + G/N] − u, with u_i the gradient of loss_i at its outputs, which the loss itself adds.

        A weight prior and an auxiliary head, without gradient at the outputs, get the likelihood's factor (a_t/M) Σ_j k_ij:
        between a_t/M and a_t.
        """
        u, points = z["slopes"], z["points"]
        driving, slopes = self._matrices(squared_distances(points))
        repulsion = rbf_kernels.apply_matrix(slopes, points - points.mean(0))
        outputs = rbf_kernels.apply_matrix(driving, u) - u
        v = {"outputs": outputs, "points": repulsion, "slopes": torch.zeros_like(u)}
        return v | {"penalty": driving.sum(1).to(z["penalty"]) - 1} if "penalty" in z else v
