"""What repulsive methods share: the spaces in which members are compared, and the strength of their repulsion.

Weight space: a member's trainable tensors. Function space: its outputs on a set of inputs. Feature space: the output of a
layer and the gradient of the loss there. Input-gradient space: the derivative of its outputs with respect to the inputs.
Each function returns one member's point z in a space.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch, Inputs
from dissensus.core.likelihood import Classification, Likelihood, full_precision
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.likelihoods.tokens import Tokens
from dissensus.numerics.hashing import WEYL, mix_bits, shift_right
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.tensor_tree import Tensors
from dissensus.utils.torch_private import in_function_transform, pytree

Gradient = Literal["logit", "log_prob"]
Repulsion = Literal["1/B", "1/N"] | float


def trained_weights(particles: Particles) -> Tensors:
    """Name -> (M, ...) the members' own trained tensors, detached."""
    return {name: tensor.detach() for name, tensor in particles.own_parameters().items() if tensor.requires_grad}


def outputs_as_points(outputs: Tensor, weight: Tensor | None = None) -> Tensor:
    """(B, ...) outputs times √w: an example of weight two adds as much to squared distances as two equal examples."""
    outputs = full_precision(outputs)
    if weight is None:
        return outputs
    return outputs * weight.to(outputs.dtype).sqrt().reshape(-1, *[1] * (outputs.ndim - 1))


def selected_output(likelihood: Likelihood, outputs: Tensor, y: Tensor, gradient: Gradient) -> Tensor:
    """() sum over the batch of the output whose input gradient is compared.

    "logit": the true class's logit (for soft labels the mean logit under them); for other likelihoods the mean that
    `describe` gives first, summed over outputs. "log_prob": log p(y | x).
    """
    outputs = full_precision(outputs)
    if gradient == "log_prob":
        log_prob = likelihood.log_prob(outputs, y)
        counted = likelihood.target_mask(y)
        return log_prob.sum() if counted is None else torch.where(counted, log_prob, 0.0).sum()
    if not isinstance(likelihood, Classification):
        return likelihood.describe(outputs)[0].sum()
    if isinstance(likelihood, Tokens):
        return selected_output(likelihood.of_rows, *likelihood.rows(outputs, y), gradient)
    if y.is_floating_point():
        return (y * outputs).sum()
    counted = likelihood.target_mask(y)
    if counted is None:
        return outputs.gather(1, y.long().unsqueeze(1)).sum()
    chosen = outputs.gather(1, torch.where(counted, y, 0).long().unsqueeze(1)).squeeze(1)
    return torch.where(counted, chosen, 0.0).sum()


def input_gradient(function: Callable[[Inputs], tuple[Tensor, Any]], x: Inputs) -> tuple[Tensor, Any]:
    """((B, D) derivative of function's scalar by x, its other results); several tensors' are joined, integers have none."""
    every = batches.input_tensors(x)

    def of_floating(*floating: Tensor) -> tuple[Tensor, Any]:
        given = iter(floating)
        return function(batches.map_tensors(x, lambda t: next(given) if t.is_floating_point() else t))

    at = [tensor for tensor in every if tensor.is_floating_point()]
    if not at:  # text
        return torch.empty(len(every[0]), 0, device=every[0].device), function(x)[1]
    found, rest = differentiate(of_floating, *at)
    return torch.cat([gradient.flatten(1) for gradient in found], dim=1), rest


def differentiate(function: Callable[..., tuple[Tensor, Any]], *at: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    """(derivatives of function's scalar by each tensor of `at`, its other results), differentiable by the parameters."""
    # Elsewhere plain autograd, which also supports custom functions without `setup_context` and hooks on saved tensors.
    if torch.compiler.is_compiling() or in_function_transform():
        found, rest = torch.func.grad(function, argnums=tuple(range(len(at))), has_aux=True)(*at)
        return tuple(found), rest
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in at]
        value, rest = function(*leaves)
        if not value.requires_grad:  # the output depends neither on `at` nor on parameters
            return tuple(torch.zeros_like(tensor) for tensor in at), rest
        slopes = torch.autograd.grad(value, leaves, create_graph=recorded, retain_graph=True, allow_unused=True)
    found = tuple(torch.zeros_like(t) if slope is None else slope for t, slope in zip(at, slopes, strict=True))
    return found, rest if recorded else pytree.tree_map(lambda tensor: tensor.detach(), rest)


def input_dimension(x: Inputs) -> int:
    """D: floating-point numbers per example."""
    return sum(math.prod(tensor.shape[1:]) for tensor in batches.input_tensors(x) if tensor.is_floating_point())


@contextmanager
def add_to_output(network: nn.Module, layer: str, shift: Tensor | None) -> Iterator[list[Tensor]]:
    """Inside, `shift` (zeros, to differentiate by the feature) is added to the layer's output; yields the outputs seen."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            got = type(output).__name__
            raise TypeError(f"expected a layer '{layer}' that returns one tensor, got {got}; name another layer")
        seen.append(output if shift is None else output + shift)
        return seen[-1].clone()  # an in-place activation then changes only the copy

    with network.get_submodule(layer).register_forward_hook(hook):
        yield seen
    if len(seen) != 1:
        got = f"{len(seen)} runs; name another layer"
        raise ValueError(f"expected a layer '{layer}' that runs once per forward pass, got {got}")


def attach_to_graph(value: Tensor, by: Tensor) -> Tensor:
    """A detached value as part of z: attached to the graph of `by`, of the same shape, with derivative 0."""
    return value.detach() + 0.0 * by


def normal_from_step(like: Tensor, step: Tensor) -> Tensor:
    """N(0, 1) numbers of `like`'s shape, determined by the step () alone: SplitMix64 of counters, then Box–Muller."""
    # Not from torch's generators: all members must see the same numbers, and a replayed CUDA graph new ones.
    count = like.numel()
    counter = torch.arange(2 * count, device=like.device) + step.to(like.device) * (2 * count + 1)
    bits = shift_right(mix_bits((counter + 1) * WEYL), 40)
    uniform = ((bits.float() + 0.5) / 2**24).reshape(2, count)  # in (0, 1)
    radius = (-2 * uniform[0].log()).sqrt()
    return (radius * torch.cos(2 * math.pi * uniform[1])).to(like.dtype).reshape(like.shape)


class RepellingPosterior(Posterior):
    """Base class of methods whose members repel each other; call `set_repulsion` in the constructor."""

    def set_repulsion(self, repulsion: Repulsion, batch_size: int | None) -> None:
        self.repulsion, self.batch_size = repulsion, batch_size
        self.strength = Strength(repulsion, self.data_size, batch_size)

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        self.strength.note_batch_size(batch.size, training=self.training)


@dataclass
class Strength:
    """The factor c: "1/N", correct for a posterior with N = `data_size` points; "1/B", stronger by N/B; or a number.

    B is `batch_size`, or else the largest batch seen in training times the batches per step. So a smaller last batch repels
    no more strongly than others, and gradients accumulated over several batches no more than those of one large batch.
    """

    repulsion: Repulsion
    data_size: int | None
    batch_size: int | None = None
    largest: int = 0  # size of the largest batch seen in training
    last: int = 0  # size of the last batch seen

    def __post_init__(self) -> None:
        if isinstance(self.repulsion, str):
            one_of("repulsion", self.repulsion, ("1/B", "1/N"), hint="name one of them, or pass a number")
        else:
            number("repulsion", self.repulsion, least=0)
        if self.batch_size is not None:
            integer("batch_size", self.batch_size)
        if self.repulsion == "1/N" and self.data_size is None:
            raise ValueError('expected data_size with repulsion "1/N", got none; pass data_size=len(training_set)')

    def note_batch_size(self, size: int, *, training: bool) -> None:
        """Records the size of a batch; call it with every batch."""
        self.last = size
        if training:
            self.largest = max(self.largest, size)

    def __call__(self, size: int = 1, weight: Tensor | None = None, *, gathered: int = 1) -> Tensor | float:
        """c for a batch of weights (B,), one of `gathered` per step; 0 if all are 0. `size`: B, if no batch was seen before."""
        if self.repulsion == "1/B":
            strength = 1 / (self.batch_size or (self.largest or self.last or size) * gathered)
        else:
            strength = 1 / (self.data_size or 1) if self.repulsion == "1/N" else float(self.repulsion)
        if weight is None:
            return strength
        # A sum over a batch is too large for float16.
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        total = weight.sum()
        share: Tensor | float = 1.0
        if self.repulsion == "1/B" and self.batch_size is None:
            # An example of weight two counts as two; examples of weight 0 make the batch smaller.
            share = (weight > 0).sum() / total.clamp(min=torch.finfo(weight.dtype).tiny)
        return strength * share * (total > 0)
