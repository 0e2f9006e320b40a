"""Repulsive deep ensembles in function space (D'Angelo & Fortuin, NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, Unpack, final

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Classification, Likelihood, full_precision
from dissensus.core.member import PREFIX
from dissensus.core.networks import StackedPosterior
from dissensus.core.particles import Member
from dissensus.core.prior import PriorKeywords
from dissensus.core.trainable import annealing_weight
from dissensus.methods.parts.comparison_spaces import attach_to_graph, normal_from_step, outputs_as_points
from dissensus.methods.parts.repulsion_strength import RepellingPosterior, Repulsion
from dissensus.numerics import rbf_kernels
from dissensus.numerics.annealing import Annealing, annealing_or_constant, scale_gradient
from dissensus.numerics.rbf_kernels import squared_distances
from dissensus.utils.checks import number, one_of
from dissensus.utils.tensor_tree import Tensors


@final
class FunctionRDE(RepellingPosterior, StackedPosterior):
    """M networks whose outputs repel each other, so that together they approximate the posterior over functions.

    With F_i the outputs of member i on the batch,

        F_i ← F_i + η [a_t (∇ log p(D | F_i) + ∇ log p(F_i)) − ∇ log q(F_i)],

    pulled back to the weights, both terms divided by N = `data_size`.

    Args:
        networks: M networks of one architecture, each initialised separately; copied.
        score: how ∇ log q is estimated: "kde", "stein" or "spectral_stein".
        repel_at: inputs at which outputs are compared: "batch", the training batch; "noise", the batch plus normal
            noise; or your own inputs, in the form that the network takes.
        noise: standard deviation of that noise.
        outputs: compare "logits" (the raw outputs, for any likelihood) or, for classification, "probabilities", which is
            the default of the authors' code. With logits the equation above holds for every likelihood.
        functional_prior: True estimates ∇ log p(F) by spectral Stein from networks drawn from the prior at every step;
            False applies the prior or the optimiser's weight decay to the weights.
        output_prior: "cauchy" adds the mean over examples of Σ log(1 + a F²), over outputs F, to the loss, as in Trinh et
            al. (ICLR 2024); "none" adds nothing.
        prior_scale: a.
        annealing: a_t; None is constant 1.
        repulsion: factor of ∇ log q: "1/N" as above, "1/B" (stronger by N/B, as in FeatureRDE and FoRDE) or a number.
        batch_size: B in "1/B"; None is the largest batch seen in training.
        data_size: N, required.
        likelihood, prior, weight_prior_std: as in `Posterior`.
    """

    name = "function_rde"
    needed = ("data_size",)

    def __init__(
        self,
        networks: Sequence[nn.Module],
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
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, likelihood=likelihood, **prior)
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
            outputs = batches.call_network(member.network, batch.x)
            nll = member.likelihood.nll(outputs, batch.y, batch.weight)
            return nll + self._output_penalty(outputs, batch.weight), self._comparison_values(outputs)

        (nll, outputs), after = self.particles.call(nll_and_outputs, params, buffers)
        z = {"outputs": outputs_as_points(outputs, batch.weight)}
        # Batch norm normalises these inputs in training mode, but keeps its running statistics.
        if self.repel_at != "batch":
            z["elsewhere"] = self._comparison_outputs(params, buffers, self._repulsion_inputs(batch.x))
            if self.repel_at == "noise":
                z["elsewhere"] = outputs_as_points(z["elsewhere"], batch.weight)
        if self.functional_prior:
            prior = self._comparison_outputs(self._prior_draw(params), buffers, batch.x)
            z["prior"] = attach_to_graph(outputs_as_points(prior, batch.weight), z["outputs"])
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
        outputs = full_precision(outputs)
        return outputs.softmax(1) if self.outputs == "probabilities" else outputs

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
            drawn = normal_from_step(like, self.steps)
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
