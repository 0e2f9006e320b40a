"""Ensembles whose members differ in their input gradients.

FoRDE: first-order repulsive deep ensembles, "Input-gradient space particle inference" (Trinh et al., ICLR 2024).
LIT: locally independent training (Ross, Pan, Celi & Doshi-Velez, AAAI 2020), a baseline of FoRDE.
"""

from __future__ import annotations  # compilers cannot evaluate the types of inner functions

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Unpack, final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.gradients import detached_state
from dissensus.core.likelihood import Likelihood
from dissensus.core.member_runner import FallbackChain, first_line
from dissensus.core.networks import MemberKeywords, MemberSource, StackedPosterior
from dissensus.core.particles import Member
from dissensus.kernels.double_backward import fast_second_derivatives
from dissensus.methods.parts import repulsion as spaces
from dissensus.methods.parts.repulsion import Gradient, RepellingPosterior, Repulsion
from dissensus.numerics.lengthscales import Lengthscales
from dissensus.numerics.randomness import preserve_random_state
from dissensus.numerics.rbf_kernels import BANDWIDTHS, Bandwidth, directions, input_gradient_force, to_kernel_precision
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.tensor_tree import Tensors

log = logging.getLogger("dissensus")

# Inputs whose gradients cannot be compared: (description, remedy)
_FEATURES = "give the network features of it, such as [x/2, (x/2)²] (dissensus.data.toy.quadratic_features)"
FEW_DIMENSIONS = (
    ("integers only", "pass x.float() / 255 of images, or let the network begin after the embedding"),
    ("only one: the gradient of one number has no direction but its sign", _FEATURES),
)


class InputGradientPosterior(StackedPosterior):
    """Base class: z = {"gradients": (B, D)}, with {"weight": (B,)} if examples have weights.

    One forward pass gives loss and gradient. Batch norm is in training mode, so an example's gradient includes its effect
    on other examples through the batch statistics, as in the authors' code of FoRDE.
    """

    def __init__(self, networks: MemberSource, *, gradient: Gradient, examples: int | None, **keywords: Any) -> None:
        super().__init__(networks, **keywords)
        self.gradient = one_of("gradient", gradient, ("logit", "log_prob"))
        self.examples = examples if examples is None else integer("examples", examples)
        self._known_to_be_differentiable = False
        self._forms: Callable[[], AbstractContextManager[None]] = fast_second_derivatives  # which form layers run in

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        if self.interaction != "couple":
            return super().member_loss(params, buffers, batch)

        def output_and_nll(member: Member, x: Inputs) -> tuple[Tensor, Tensor]:
            outputs, nll = member.outputs_and_nll(some._replace(x=x))
            return spaces.selected_output(member.likelihood, outputs, some.y, self.gradient), nll

        def of_inputs(x: Inputs) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            (chosen, nll), after = self.particles.call(output_and_nll, params, buffers, x)
            return chosen, (nll, after)

        fewer = self.examples is not None and self.examples < batches.count_examples(batch.x)
        some = batch.map(lambda tensor: tensor[: self.examples]) if fewer else batch
        whole = super().member_loss(params, buffers, batch) if fewer else None
        with sdpa_kernel(SDPBackend.MATH), self._forms():  # only plain attention can be differentiated twice
            g, (nll, after) = spaces.input_gradient(of_inputs, some.x)
        value, _, after = whole or (nll + self.penalty(params), (), after)
        z = {"gradients": g}
        weight = label_weights(self.likelihood, some)
        if weight is not None:
            z["weight"] = spaces.attach_to_graph(weight.to(g.dtype), g.sum(1))
        return value, z, after

    def check_batch(self, batch: Batch) -> None:
        # Checked before the network runs: many networks fail on integers with unclear messages. One member needs no check.
        if self.particles.total_members > 1 and (dimension := spaces.input_dimension(batch.x)) < 2:
            found, remedy = FEW_DIMENSIONS[dimension]
            raise ValueError(f"expected inputs of at least two floating-point features, got {found}; {remedy}")
        super().check_batch(batch)

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        if self.interaction == "couple" and torch.is_grad_enabled() and not self._known_to_be_differentiable:
            check_differentiable_twice(self, batch)
            self._known_to_be_differentiable = True


def label_weights(likelihood: Likelihood, batch: Batch) -> Tensor | None:
    """(B,) example weights, 0 for examples without a counted label; None if all count the same."""
    counted = likelihood.target_mask(batch.y)
    if counted is None:
        return batch.weight
    some = counted.flatten(1).any(1) if counted.ndim > 1 else counted
    return some.to(torch.get_default_dtype()) if batch.weight is None else batch.weight * some


def check_differentiable_twice(posterior: InputGradientPosterior, batch: Batch) -> None:
    """Raises if a member's input gradient cannot be differentiated with respect to its weights; tried on two examples.

    Tries the layer forms of `kernels.double_backward` first, then torch's own. Uses `backward`, which raises for functions
    that are differentiable only once, while `torch.autograd.grad` silently leaves them out.
    """
    first = detached_state(posterior).members(1)[0]
    stored = posterior.particles.parameters_by_name()
    floating = {name: tensor.detach() for name, tensor in first.parameters().items() if tensor.is_floating_point()}
    params = {name: tensor.requires_grad_(stored[name].requires_grad) for name, tensor in floating.items()}

    def run(forms: Callable[[], AbstractContextManager[None]], **tried: bool) -> None:
        posterior._forms = partial(forms, **tried)
        _, z, _ = posterior.member_loss(params, first.buffers(), batch.map(lambda tensor: tensor[:2]))
        if z["gradients"].requires_grad:
            z["gradients"].sum().backward()
        posterior._forms = forms

    # For any size: two examples may be small when a batch is not.
    written = partial(run, fast_second_derivatives, of_any_size=True)
    note = "using torch's slow second derivatives: the library's fast ones fail for this network (%s)"
    try:
        with preserve_random_state(posterior.device):
            FallbackChain(note, written=written, torch=partial(run, nullcontext))()
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        got = f"one that cannot ({first_line(error)})"
        advice = "write custom functions with setup_context, and leave checkpointing and fused recurrent kernels out"
        raise ValueError(f"expected a network that can be differentiated twice, got {got}; {advice}") from error
    # Zero gradients are allowed (heads may start at zero); weights outside the graph have None.
    if all(tensor.grad is None for tensor in params.values()):
        advice = "remove no_grad, detach and numpy from the network's forward"
        raise ValueError(f"expected input gradients that depend on the trained weights, got some that do not; {advice}")


@final
class FoRDE(RepellingPosterior, InputGradientPosterior):
    """M networks whose input gradients repel each other, so that they use different features for the same labels.

        loss = Σ_i [mean_b nll_ib + c r_i],   r_i = log Σ_j (1/B) Σ_b κ(s_ib, sg[s_jb]),   s = g / ‖g‖

    with g_ib the derivative of member i's true-class logit at input b (`numerics.rbf_kernels.input_gradient_force`).
    Inputs must be floating point with at least two features.

    Args:
        networks, members, base: as in `DeepEnsemble`.
        lengthscales: of the kernel: None (the identity) or the result of `pca_lengthscales`.
        bandwidth: "reference" (the authors' code), "sample" (eq. 17) or "algorithm" (algorithm 1).
        gradient: the differentiated output: the true-class "logit" (the authors' code; the mean for regression) or the
            "log_prob", which does not change when a function is added to all logits.
        repulsion: c: "1/B" (the paper), "1/N" (correct for the posterior; needs `data_size`) or a number.
        every: members repel at every k-th optimiser step only, with the same c; k > 1 turns off CUDA graphs.
        examples: number of examples per batch used for the repulsion, in a second forward pass; None is all of them.
        batch_size: B in "1/B"; None is the largest batch seen in training, also for a smaller last one.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "forde"
    eigenvectors: Tensor | None
    precision: Tensor | None
    remainder: Tensor | None

    def __init__(
        self,
        networks: MemberSource,
        *,
        lengthscales: Lengthscales | None = None,
        bandwidth: Bandwidth = "reference",
        gradient: Gradient = "logit",
        repulsion: Repulsion = "1/B",
        every: int = 1,
        examples: int | None = None,
        batch_size: int | None = None,
        **prior: Unpack[MemberKeywords],
    ) -> None:
        if lengthscales is not None and not isinstance(lengthscales, Lengthscales):
            raise TypeError(f"expected Lengthscales, got {type(lengthscales).__name__}; make pca_lengthscales(inputs)")
        super().__init__(networks, gradient=gradient, examples=examples, **prior)
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
        dimension = spaces.input_dimension(batch.x)
        if self.particles.total_members > 1 and self.eigenvectors is not None and len(self.eigenvectors) != dimension:
            got = f"{len(self.eigenvectors)}; make them from such inputs: pca_lengthscales(inputs)"
            raise ValueError(f"expected lengthscales of {dimension} dimensions for these inputs, got {got}")


@final
class LIT(InputGradientPosterior):
    """M networks trained with a penalty on parallel input gradients, in the same or in opposite directions.

        loss = Σ_i mean_b nll_ib + strength · Σ_{i<j} mean_b cos²(g_ib, g_jb)

    g_ib is the input gradient of the true-class logit, as in FoRDE.

    Args:
        networks, members, base: as in `DeepEnsemble`.
        strength: weight of each pair of members, so (M − 1) · strength in total for one member; 0 is a deep ensemble.
            FoRDE's c is a member's total: at strength = c, LIT's pairs weigh at least M − 1 times as much as FoRDE's.
        gradient: the differentiated output: the true-class "logit" (the mean for regression) or the "log_prob".
        examples: number of examples per batch that are penalised, in a second forward pass; None is all of them.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "lit"

    def __init__(
        self,
        networks: MemberSource,
        *,
        strength: float,
        gradient: Gradient = "logit",
        examples: int | None = None,
        **prior: Unpack[MemberKeywords],
    ) -> None:
        super().__init__(networks, gradient=gradient, examples=examples, **prior)
        self.strength = number("strength", strength, least=0, hint="0 is a deep ensemble")

    def couple(self, z: Any) -> Any:
        """strength · ∂/∂g_i Σ_{j≠i} mean_b cos²(g_ib, g_jb): the penalty's own gradient, since it is symmetric."""
        g = z["gradients"]  # (M, B, D)
        weight = z["weight"][0] if "weight" in z else None  # (B,)
        force = self.strength * torch.func.grad(lambda gradients: squared_cosines(gradients, weight).sum())(g)
        return {name: force if name == "gradients" else torch.zeros_like(tensor) for name, tensor in z.items()}


def squared_cosines(gradients: Tensor, weight: Tensor | None = None) -> Tensor:
    """(M,) Σ_{j≠i} mean_b cos²(g_ib, sg[g_jb]) of input gradients (M, B, D); weight (B,) weighs the mean."""
    unit = directions(to_kernel_precision(gradients)).transpose(0, 1)  # (B, M, D)
    squares = (unit @ unit.detach().transpose(1, 2)).square()  # (B, M, M)
    itself = torch.eye(squares.shape[1], dtype=torch.bool, device=squares.device)
    squares = squares.masked_fill(itself, 0.0).sum(2)  # (B, M)
    if weight is None:
        mean = squares.mean(0)
    else:
        share = weight.to(squares.dtype)
        mean = (share[:, None] * squares).sum(0) / share.sum().clamp(min=torch.finfo(squares.dtype).tiny)
    return mean.to(torch.promote_types(gradients.dtype, torch.float32))
