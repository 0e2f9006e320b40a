"""Base class of FoRDE and LIT, which compare members by their input gradients."""

from __future__ import annotations  # compilers cannot evaluate the types of inner functions

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.gradients import detached_state
from dissensus.core.likelihood import Likelihood
from dissensus.core.member_runner import FallbackChain, first_line
from dissensus.core.networks import StackedPosterior
from dissensus.core.particles import Member
from dissensus.core.prior import PriorKeywords
from dissensus.kernels.double_backward import fast_second_derivatives
from dissensus.methods.parts import comparison_spaces
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.checks import integer, one_of
from dissensus.utils.tensor_tree import Tensors

log = logging.getLogger("dissensus")

# Inputs whose gradients cannot be compared: (description, remedy)
FEW_DIMENSIONS = (
    ("integers only", "pass x.float() / 255 of images, or let the network begin after the embedding"),
    (
        "only one: the gradient of one number has no direction but its sign",
        "give the network features of it, such as [x/2, (x/2)²] (dissensus.data.toy.quadratic_features)",
    ),
)


class InputGradientPosterior(StackedPosterior):
    """Base class: z = {"gradients": (B, D)}, with {"weight": (B,)} if examples have weights.

    One forward pass gives loss and gradient. Batch norm is in training mode, so an example's gradient includes its effect
    on other examples through the batch statistics, as in the authors' code of FoRDE.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        gradient: comparison_spaces.Gradient,
        examples: int | None,
        likelihood: Likelihood | None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(networks, likelihood=likelihood, **prior)
        self.gradient = one_of("gradient", gradient, ("logit", "log_prob"))
        self.examples = examples if examples is None else integer("examples", examples)
        self._known_to_be_differentiable = False
        self._forms: Callable[[], AbstractContextManager[None]] = fast_second_derivatives  # which form layers run in

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        if self.interaction != "couple":
            return super().member_loss(params, buffers, batch)

        def output_and_nll(member: Member, x: Inputs) -> tuple[Tensor, Tensor]:
            outputs = batches.call_network(member.network, x)
            chosen = comparison_spaces.selected_output(member.likelihood, outputs, some.y, self.gradient)
            return chosen, member.likelihood.nll(outputs, some.y, some.weight)

        def of_inputs(x: Inputs) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            (chosen, nll), after = self.particles.call(output_and_nll, params, buffers, x)
            return chosen, (nll, after)

        if self.examples is not None and self.examples < batches.count_examples(batch.x):
            value, _, after = super().member_loss(params, buffers, batch)
            some = batch.map(lambda tensor: tensor[: self.examples])
            with sdpa_kernel(SDPBackend.MATH), self._forms():  # only plain attention can be differentiated twice
                g, _ = comparison_spaces.input_gradient(of_inputs, some.x)
        else:
            some = batch
            with sdpa_kernel(SDPBackend.MATH), self._forms():
                g, (nll, after) = comparison_spaces.input_gradient(of_inputs, some.x)
            value = nll + self.penalty(params)
        z = {"gradients": g}
        weight = label_weights(self.likelihood, some)
        if weight is not None:
            z["weight"] = comparison_spaces.attach_to_graph(weight.to(g.dtype), g.sum(1))
        return value, z, after

    def check_batch(self, batch: Batch) -> None:
        # Checked before the network runs: many networks fail on integers with unclear messages. One member needs no check.
        if self.particles.total_members > 1 and (dimension := comparison_spaces.input_dimension(batch.x)) < 2:
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

    Tries the layer forms of `core.twice` first; if they fail, torch's own are used from then on. Uses `backward`, which
    raises for functions that are differentiable only once, while `torch.autograd.grad` silently leaves them out.
    """
    first = detached_state(posterior).member(0)
    stored = {**posterior.particles.shared_parameters(), **posterior.particles.own_parameters()}
    params = {
        name: tensor.detach().requires_grad_(stored[name].requires_grad)
        for name, tensor in first.parameters().items()
        if tensor.is_floating_point()
    }

    def run(forms: Callable[[], AbstractContextManager[None]], **tried: bool) -> None:
        posterior._forms = partial(forms, **tried)
        _, z, _ = posterior.member_loss(params, first.buffers(), batch.map(lambda tensor: tensor[:2]))
        if z["gradients"].requires_grad:
            z["gradients"].sum().backward()
        posterior._forms = forms

    # For any size: two examples may be small when a batch is not.
    written = partial(run, fast_second_derivatives, of_any_size=True)

    def note(_: str, reason: str) -> None:
        log.info("using torch's slow second derivatives: the library's fast ones fail for this network (%s)", reason)

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
