"""Do members differ, and have chains converged? Distances between members, now or over training, and R̂ of predictions."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus import metrics
from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.particles import Member
from dissensus.core.posterior import Posterior, checked_members, expect_posterior, inference_context
from dissensus.core.predictive import ClassificationPredictive, RegressionPredictive
from dissensus.likelihoods.tokens import token_rows
from dissensus.methods.parts.repulsion import input_gradient, selected_output
from dissensus.metrics.chain_diagnostics import effective_sample_size, split_rhat
from dissensus.numerics.rbf_kernels import directions, squared_distances, to_kernel_precision
from dissensus.utils.checks import integer


class MemberDistances(NamedTuple):
    """Distances between members, as means over pairs, and the effective number of members; made by `member_distances`.

    Args:
        weight: ‖θᵢ − θⱼ‖ over the trained tensors that members do not share.
        function: root mean square of fᵢ − fⱼ over inputs and all outputs of the network.
        gradient: angle in radians between input gradients, mean over inputs; NaN if all gradients are zero.
        effective: effective number of members, 1 to M (`metrics.effective_members`).
    """

    weight: float
    function: float
    gradient: float
    effective: float


def member_distances(posterior: Posterior, x: Inputs, y: Tensor) -> MemberDistances:
    """Measures how much a posterior's stored members differ on one batch, in eval mode.

    The input gradient is that of the true class's logit, or of a regression's mean summed over its outputs, as in FoRDE.
    Where a member's gradient is exactly zero it has no direction, and the input is left out of the member's pairs. Tensors
    shared by all members add nothing to the distance of weights.

    Args:
        posterior: a posterior with at least two stored members. Sampled functions are not compared.
        x: inputs (B, ...), as the loader gives them.
        y: targets, as the likelihood takes them.
    """
    particles = expect_posterior(posterior).particles
    if particles.members < 2:
        raise ValueError(f"expected several stored members, got {type(posterior).__name__} with one; pass an ensemble")
    x, y, _ = posterior.prepare_batch(next(posterior.read([(x, y)], anywhere=True)))

    def outputs_and_gradient(member: Member) -> tuple[Tensor, Tensor]:
        def gradient_target(at: Inputs) -> tuple[Tensor, Tensor]:
            outputs = batches.call_network(member.network, at)
            return selected_output(member.likelihood, outputs, y, "logit"), outputs

        gradient, outputs = input_gradient(gradient_target, x)
        return outputs.detach(), gradient.detach()

    with inference_context(posterior), batches.UnchangedInputs(x):
        outputs, gradients = particles.map_members(outputs_and_gradient)  # (M, B, ...), (M, B, D)
        # The stored members, not a new draw.
        predictive = checked_members(posterior, posterior.current().predict(x), posterior.current_correction())
    trained = {name: each for name, each in particles.own_parameters().items() if each.requires_grad}
    own = {name: each.detach() for name, each in trained.items() if name.startswith("network.")}
    predictive, y, _ = token_rows(predictive, y)
    if isinstance(predictive, ClassificationPredictive):
        ignored = getattr(posterior.likelihood, "ignore_index", None)
        labels = y.argmax(1) if y.is_floating_point() else y  # soft labels: the likeliest class
        effective = metrics.effective_members(predictive.log_probs, labels, ignore_index=ignored)
    elif isinstance(predictive, RegressionPredictive):
        effective = metrics.effective_members_regression(predictive.member_means, y)
    else:
        kind = type(predictive).__name__
        raise TypeError(f"expected members with probabilities or means, got {kind}; use one of dissensus's likelihoods")
    weight = float(mean_distance(own)) if own else 0.0
    function = float(mean_distance(outputs)) / outputs[0].numel() ** 0.5
    return MemberDistances(weight, function, float(mean_angle(gradients)), float(effective))


def mean_distance(points: Any) -> Tensor:
    """() mean over pairs of ‖zᵢ − zⱼ‖ in float64, for points (M, ...) or a tree of them."""
    squared = squared_distances(points)  # (M, M)
    return squared.sqrt().sum() / (len(squared) * (len(squared) - 1))


def mean_angle(vectors: Tensor) -> Tensor:
    """() mean angle over pairs and examples of vectors (M, B, D), by atan2, accurate for small ones; NaN if none."""
    unit = directions(to_kernel_precision(vectors.detach()))  # (M, B, D)
    there = unit.square().sum(2) > 0  # (M, B)
    total, count = unit.new_zeros(()), unit.new_zeros(())
    for i in range(len(unit) - 1):
        other = unit[i + 1 :]  # (M − i − 1, B, D)
        angle = 2 * torch.atan2((unit[i] - other).norm(dim=2), (unit[i] + other).norm(dim=2))
        both = there[i] & there[i + 1 :]
        total = total + torch.where(both, angle, 0.0).sum()
        count = count + both.sum()
    return total / count


class DistancesOverTraining:
    """A callback for `fit` that records the members' distances at fixed inputs every k epochs.

        record = DistancesOverTraining(posterior, x, y, every=10)
        record.measure(0)  # before training
        fit(posterior, loader, epochs=100, callback=record)

    Attributes: `.epochs` lists the numbers of epochs done, `.distances` the `MemberDistances` after each.

    Args:
        posterior, x, y: as in `member_distances`.
        every: epochs between two measurements, k.
    """

    def __init__(self, posterior: Posterior, x: Inputs, y: Tensor, *, every: int = 1) -> None:
        self.posterior, self.x, self.y = posterior, x, y
        self.every = integer("every", every)
        self.epochs: list[int] = []
        self.distances: list[MemberDistances] = []

    def __call__(self, epoch: Any) -> None:
        """Measures after every k-th epoch; returns None, so training continues."""
        if epoch.epoch % self.every == 0:
            self.measure(epoch.epoch)

    def measure(self, epochs_done: int) -> MemberDistances:
        """Measures the distances now and stores them under the number of epochs done; pass 0 before training."""
        found = member_distances(self.posterior, self.x, self.y)
        self.epochs.append(epochs_done)
        self.distances.append(found)
        return found


@dataclass(frozen=True)
class Convergence:
    """Convergence diagnostics of chains: split-R̂ and effective sample sizes of log-probabilities (B, C) or means (B, D)."""

    rhat: Tensor  # near 1 where chains agree
    effective_samples: Tensor
    draws: int  # of all chains together

    def __str__(self) -> str:
        rhat = f"split-R̂ at most {float(self.rhat.max()):.3f}, median {float(self.rhat.median()):.3f}"
        least, median = float(self.effective_samples.min()), float(self.effective_samples.median())
        return f"{rhat}; of {self.draws} draws effective at least {least:.0f}, median {median:.0f}"


def convergence(posterior: Posterior, x: Inputs) -> Convergence:
    """Measures how well the chains of `HMC` or `SGHMC` have mixed, from their predictions at these inputs.

    Args:
        posterior: a trained `HMC` or `SGHMC` with at least four samples per chain.
        x: inputs (B, ...): a tensor, a tuple or a dict of tensors.
    """
    batches.count_examples(x := batches.convert_inputs(x))  # raises if x has no tensor
    x = batches.move_to_device(x, posterior.device)
    with inference_context(posterior):
        drawn: DrawnFunctions = posterior.draw()
        posterior.check_inputs(x)
        predictive = checked_members(posterior, drawn.predict(x), posterior.current_correction())
    said = predictive.defining_tensors()[0]  # (M · S, B, C)
    chains = said.reshape(drawn.networks, -1, *said.shape[1:])  # (M, S, B, C)
    return Convergence(split_rhat(chains), effective_sample_size(chains), len(said))
