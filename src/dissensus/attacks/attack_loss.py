"""The loss of inputs under a posterior, −log p̄(y | x), and its gradient, for all attacks.

With the odds of being wrong, d_m = log(1 − p_m(y)) − log p_m(y), the gradient of the loss is

    ∇ −log p̄ = (Σ_m w_m ∇d_m) / Σ_m p_m,    w_m = p_m (1 − p_m)

Attacks need only its direction, Σ_m w_m ∇d_m / Σ_m w_m, which stays exact when p_m rounds to one and the gradient itself
underflows. Otherwise an overconfident network would look robust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.attacks.constraint import append_axes
from dissensus.core.batch import Batch, call_network
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.likelihood import Classification
from dissensus.core.member_runner import first_line
from dissensus.core.particles import Member
from dissensus.core.posterior import Posterior, checked_prediction, expect_posterior, inference_context
from dissensus.core.predictive import ClassificationPredictive
from dissensus.methods.parts.comparison_spaces import differentiate
from dissensus.utils.checks import integer, one_of

Draw = Literal["fixed", "fresh"] | DrawnFunctions


@dataclass(frozen=True, eq=False)
class Adversarial:
    """The result of an attack: the adversarial inputs, and whether they succeed under the attacked draw of functions.

    Args:
        inputs: (B, ...), on the posterior's device.
        success: (B,) boolean: misclassified; for a targeted attack, classified as the target.
        loss: (B,) −log p̄(y) in nats at these inputs; an attack raises it, a targeted one lowers it.
    """

    inputs: Tensor
    success: Tensor
    loss: Tensor


@dataclass(frozen=True, eq=False)
class AttackPoint:
    """The loss at inputs (B, ...), and the direction in which to move them."""

    found: Adversarial
    gain: Tensor  # (B,) log-odds of being wrong (right, if targeted): the same order as the loss, without saturation
    direction: Tensor  # (B, ...) direction in which the gain grows; empty if not requested
    gradient_scale: Tensor  # (B, 1...): the gradient of the loss is way · slope (minus that, if targeted)

    def best_of(self, other: AttackPoint) -> AttackPoint:
        """For each input, the one that succeeds; if both or none do, the one of higher gain; if equal, this one."""
        mine, its = self.found, other.found
        taken = (its.success & ~mine.success) | ((its.success == mine.success) & (other.gain > self.gain))
        found = Adversarial(
            torch.where(append_axes(taken, mine.inputs), its.inputs, mine.inputs),
            mine.success | its.success,
            torch.where(taken, its.loss, mine.loss),
        )
        return replace(self, found=found, gain=torch.where(taken, other.gain, self.gain))


class AttackObjective:
    """Inputs, classes and the attacked functions, all checked here."""

    def __init__(self, posterior: Posterior, x: Tensor, y: Tensor, *, draw: Draw, targeted: bool, at_once: int) -> None:
        self.posterior = expect_posterior(posterior)
        batch = attackable_batch(posterior, x, y).to(posterior.device)
        self.x, self.y = cast(Tensor, batch.x).detach(), batch.y.long()
        self.targeted, self.at_once = targeted, integer("at_once", at_once)
        self.fixed_draw: DrawnFunctions | None = None
        if isinstance(draw, DrawnFunctions):
            self.fixed_draw = draw
        elif one_of("draw", draw, ("fixed", "fresh")) == "fixed":
            with inference_context(posterior):
                self.fixed_draw = posterior.draw()
        self._tried = not len(self.y)  # whether gradients were checked

    def evaluate(self, x: Tensor, *, climb: bool = True) -> AttackPoint:
        """The loss at x; `climb`: whether to compute the direction, too."""
        with torch.no_grad():
            drawn = self.posterior.draw() if self.fixed_draw is None else self.fixed_draw
            rows = max(self.at_once // drawn.members, 1)
            pairs = zip(torch.split(x.to(self.x), rows), torch.split(self.y, rows), strict=True)
            work = self._mixture_gradient if climb else self._predict_mixture
            parts = [work(drawn, *pair) for pair in pairs]
            log_mean, way, slope = (torch.cat(each) for each in zip(*parts, strict=True))
            if climb and not self._tried:
                self._check_gradients(drawn, way)
            odds, hit = odds_of(log_mean, self.y), log_mean.argmax(1) == self.y
            found = Adversarial(x.to(self.x), hit if self.targeted else ~hit, F.softplus(odds))
            return AttackPoint(found, -odds, -way, slope) if self.targeted else AttackPoint(found, odds, way, slope)

    def _predict_mixture(self, drawn: DrawnFunctions, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with inference_context(self.posterior):
            predictive = checked_prediction(self.posterior, drawn.predict(x))
        return cast(ClassificationPredictive, predictive).log_mean, x.new_empty(0), x.new_empty(0)

    def _mixture_gradient(self, drawn: DrawnFunctions, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log p̄ (B, C), direction (B, ...) of the gradient of −log p̄(y), its size over that of the gradient (B, 1...))."""
        # A calibration of the mean has no useful gradient, so the gradient is that of the members' mixture.
        lens = self.posterior.current_correction()

        def odds_and_slope(member: Member, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            def odds(at: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                (log_probs,) = member.likelihood.describe(call_network(member.network, at))
                tempered = lens.correct_logits(log_probs[None])[0]  # odds need no normalisation
                found = odds_of(tempered, y)
                return found.sum(), (log_probs, found)

            (slope,), (log_probs, found) = differentiate(odds, x)
            return log_probs, found, slope

        try:
            with inference_context(self.posterior):
                log_probs, odds, slopes = drawn.map_members(odds_and_slope, x, y)  # (M, B, C), (M, B), (M, B, ...)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise gradient_error(first_line(error)) from error
        predictive = checked_prediction(self.posterior, drawn.likelihood.predictive(log_probs))
        log_p, log_weight = F.logsigmoid(-odds), F.logsigmoid(odds) + F.logsigmoid(-odds)  # (M, B)
        way = (append_axes(log_weight.softmax(0), slopes) * slopes).sum(0)
        if not way.isfinite().all():
            raise gradient_error("a gradient is NaN or infinite")
        slope = (log_weight.logsumexp(0) - log_p.logsumexp(0)).exp()
        return cast(ClassificationPredictive, predictive).log_mean, way, append_axes(slope, way)

    def _check_gradients(self, drawn: DrawnFunctions, way: Tensor) -> None:
        """Raises if gradients are zero at the inputs and at noise: the attack would do nothing and seem to show robustness."""
        if not way.any():
            seeded = torch.Generator().manual_seed(0)
            noise = torch.rand(8, *self.x.shape[1:], generator=seeded, dtype=self.x.dtype).to(self.x)
            if not self._mixture_gradient(drawn, noise, self.y[:1].expand(8))[1].any():
                raise gradient_error("all gradients are zero")
        self._tried = True


def attackable_batch(posterior: Posterior, x: Tensor, y: Tensor) -> Batch:
    """The batch; raises if it cannot be attacked."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        advice = "pass images as x / 255, or embedded inputs to a network without its embedding"
        raise ValueError(f"expected one floating-point tensor of inputs, got {what}, which has no gradient; {advice}")
    batch = Batch.from_tuple((x, y), anywhere=True)
    shape = posterior.output_shape(x)
    if not isinstance(posterior.likelihood, Classification) or len(shape) != 2:
        got = f"{type(posterior.likelihood).__name__} of outputs {tuple(shape)}"
        raise ValueError(f"expected a classification with logits (B, C), got {got}; attack a posterior of classes")
    posterior.check_batch(batch._replace(y=batch.y.cpu()))  # values are read on the host only
    counted = posterior.likelihood.target_mask(batch.y)
    if batch.y.is_floating_point() or not (counted is None or bool(counted.all())):
        raise ValueError("expected one class index per input, got soft or ignored labels; use y.argmax(1) or drop rows")
    return batch


def gradient_error(reason: str) -> ValueError:
    return ValueError(
        f"expected a network that can be differentiated by its inputs, got one that cannot ({reason}); remove no_grad, "
        "detach, numpy and rounding from its forward"
    )


def odds_of(log_probs: Tensor, y: Tensor) -> Tensor:
    """(B,) log(1 − p(y)) − log p(y) of log-probabilities (B, C) up to a constant, exact also where p(y) rounds to one."""
    mine = F.one_hot(y, log_probs.shape[1]).bool()
    others = torch.where(mine, -math.inf, log_probs).logsumexp(1)
    return others - log_probs.gather(1, y[:, None])[:, 0]
