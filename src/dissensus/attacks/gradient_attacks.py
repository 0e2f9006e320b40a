"""FGSM, PGD, and fooling inputs made of noise, by the gradient of the averaged prediction's loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.core.batch import Batch, call_network
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.likelihood import Classification
from dissensus.core.member_runner import first_line
from dissensus.core.particles import Member
from dissensus.core.posterior import Posterior, checked_prediction, expect_posterior, inference_context
from dissensus.core.predictive import ClassificationPredictive
from dissensus.data.input_transforms import Standardiser
from dissensus.methods.parts.repulsion import differentiate
from dissensus.utils.checks import integer, number, one_of

Draw = Literal["fixed", "fresh"] | DrawnFunctions
Norm = Literal["inf", "2"]
Bounds = tuple[float, float] | None
ROUNDING = 1e-3  # share of the range by which inputs may exceed their bounds
AT_ONCE = 1000


def fgsm(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    *,
    norm: Norm = "inf",
    targeted: bool = False,
    bounds: Bounds = (0.0, 1.0),
    standardiser: Standardiser | None = None,
    draw: Draw = "fixed",
    at_once: int = AT_ONCE,
) -> Adversarial:
    """Attacks inputs by one gradient step of size ε (Goodfellow, Shlens & Szegedy, ICLR 2015).

    Returns an `Adversarial` with x + ε sign(∇ −log p̄), or x + ε ∇/‖∇‖ for norm "2", in any case. Arguments as in `pgd`.
    """
    aim = AttackObjective(posterior, x, y, draw=draw, targeted=targeted, at_once=at_once)
    ball = Ball.around_inputs(aim.x, epsilon, norm=norm, bounds=bounds, standardiser=standardiser)
    moved = ball.step(aim.x, aim.evaluate(aim.x).direction, ball.epsilon)
    return aim.evaluate(moved, climb=False).found


def pgd(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    *,
    steps: int = 10,
    step_size: float | None = None,
    norm: Norm = "inf",
    targeted: bool = False,
    random_start: bool = False,
    generator: torch.Generator | None = None,
    bounds: Bounds = (0.0, 1.0),
    standardiser: Standardiser | None = None,
    draw: Draw = "fixed",
    at_once: int = AT_ONCE,
) -> Adversarial:
    """Attacks inputs by projected gradient ascent of the loss (Madry et al., ICLR 2018).

    Every step moves by `step_size` along the sign of the gradient (norm "2": along the gradient) and projects back onto the
    ball around x and the bounds. For each input the best iterate is returned, x included: a misclassified one if there is
    any, then the one of highest loss. So with a fixed draw, more steps never raise the accuracy.

    Args:
        posterior: a classification with logits (B, C). To attack one member, pass `ds.MAP(posterior.member(i))`;
            `posterior.predict(found.inputs)` then shows the effect on the mixture.
        x: (B, ...), floating-point.
        y: (B,) true classes; with `targeted`, classes to reach.
        epsilon: ε, the radius of the ball, in the units of the bounds.
        steps: number of gradient steps; one more forward pass evaluates the last iterate.
        step_size: in the units of ε; None is 2.5 ε / steps.
        norm: "inf" or "2", of the ball and of a step.
        targeted: whether to lower −log p̄(y) instead.
        random_start: whether to start at a uniformly drawn point of the ball.
        generator: generator of the random start; None is torch's global one.
        bounds: least and largest value of an input, (0, 1) for pixels; None for no bounds.
        standardiser: the `Standardiser` of x, if there is one: ε, step size and bounds are then in the original units.
        draw: "fixed" attacks the draw of functions that `posterior.predict` would use; "fresh" draws for every gradient.
            They differ only for a sampling method without a stored draw. Or the result of `posterior.draw()`.
        at_once: most pairs of a member and an input in memory at a time (at least one input).
    """
    steps = integer("steps", steps, least=0)
    aim = AttackObjective(posterior, x, y, draw=draw, targeted=targeted, at_once=at_once)
    ball = Ball.around_inputs(aim.x, epsilon, norm=norm, bounds=bounds, standardiser=standardiser)
    size = 2.5 * epsilon / max(steps, 1) if step_size is None else float(number("step_size", step_size, above=0))
    return gradient_ascent(aim, ball, steps, size, ball.random_point(generator) if random_start else None)


def fool(
    posterior: Posterior,
    start: Tensor,
    target: int | Tensor,
    *,
    steps: int = 100,
    step_size: float = 1.0,
    norm: Norm = "2",
    bounds: Bounds = (0.0, 1.0),
    standardiser: Standardiser | None = None,
    draw: Draw = "fixed",
    at_once: int = AT_ONCE,
) -> Adversarial:
    """Turns noise into inputs that the mixture classifies as a given class, by ascent of log p̄(target) within the bounds.

    The gradient ascent of Nguyen, Yosinski & Clune (CVPR 2015). Returns an `Adversarial`. Arguments as in `pgd`; no ball.

    Args:
        start: (B, ...) noise, for example `torch.rand(10, 1, 28, 28)`, standardised if a standardiser is given.
        target: the class to reach, one for all or (B,).
    """
    steps = integer("steps", steps, least=0)
    classes = torch.full((len(start),), target) if isinstance(target, int) else target
    aim = AttackObjective(posterior, start, classes, draw=draw, targeted=True, at_once=at_once)
    ball = Ball.around_inputs(aim.x, None, norm=norm, bounds=bounds, standardiser=standardiser)
    return gradient_ascent(aim, ball, steps, float(number("step_size", step_size, above=0)), None)


def gradient(posterior: Posterior, x: Tensor, y: Tensor, *, at_once: int = AT_ONCE) -> Tensor:
    """(B, ...) the input gradient ∇ₓ −log p̄(y | x) of the mixture, at the posterior's temperature; arguments as in `pgd`."""
    look = AttackObjective(posterior, x, y, draw="fixed", targeted=False, at_once=at_once).evaluate(x)
    return look.direction * look.gradient_scale


def gradient_ascent(aim: AttackObjective, ball: Ball, steps: int, size: float, start: Tensor | None) -> Adversarial:
    """The best of the original inputs, the start, and the iterates after each step."""
    now = best = aim.evaluate(aim.x, climb=start is None and steps > 0)
    if start is not None:
        now = aim.evaluate(start, climb=steps > 0)
        best = best.best_of(now)
    for step in range(steps):
        now = aim.evaluate(ball.step(now.found.inputs, now.direction, size), climb=step + 1 < steps)
        best = best.best_of(now)
    return best.found


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
        inputs = torch.where(append_axes(taken, mine.inputs), its.inputs, mine.inputs)
        found = Adversarial(inputs, mine.success | its.success, torch.where(taken, its.loss, mine.loss))
        return replace(self, found=found, gain=torch.where(taken, other.gain, self.gain))


class AttackObjective:
    """The loss −log p̄(y | x) of inputs under the attacked functions, and its gradient; all are checked here.

    With the odds of being wrong, d_m = log(1 − p_m(y)) − log p_m(y), the gradient of the loss is

        ∇ −log p̄ = (Σ_m w_m ∇d_m) / Σ_m p_m,    w_m = p_m (1 − p_m)

    Attacks need only its direction, Σ_m w_m ∇d_m / Σ_m w_m, exact also where p_m rounds to one, as in overconfident networks.
    """

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
    got, advice = f"one that cannot ({reason})", "remove no_grad, detach, numpy and rounding from its forward"
    return ValueError(f"expected a network that can be differentiated by its inputs, got {got}; {advice}")


def odds_of(log_probs: Tensor, y: Tensor) -> Tensor:
    """(B,) log(1 − p(y)) − log p(y) of log-probabilities (B, C) up to a constant, exact also where p(y) rounds to one."""
    mine = F.one_hot(y, log_probs.shape[1]).bool()
    others = torch.where(mine, -math.inf, log_probs).logsumexp(1)
    return others - log_probs.gather(1, y[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class Ball:
    """Inputs within ε of x and within bounds. `unit`: the value of one unit of ε in the units of the inputs."""

    x: Tensor
    epsilon: float
    norm: Norm
    unit: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def around_inputs(
        cls, x: Tensor, epsilon: float | None, *, norm: Norm, bounds: Bounds, standardiser: Standardiser | None
    ) -> Ball:
        """The ball; without ε, everything within the bounds."""
        radius = math.inf if epsilon is None else float(number("epsilon", epsilon, least=0))
        low, high = (-math.inf, math.inf) if bounds is None else map(float, bounds)
        ends = torch.tensor([low, high], dtype=x.dtype, device=x.device)
        unit = torch.ones_like(ends[0])
        edges = ends[:1], ends[1:]
        if standardiser is not None:
            mean, unit = standardiser.mean.to(x), 1 / standardiser.std.to(x)
            edges = (ends[0] - mean) * unit, (ends[1] - mean) * unit
        room = ROUNDING * (high - low) * unit
        if not (low < high and bool(((x >= edges[0] - room) & (x <= edges[1] + room)).all())):
            got, advice = f"{float(x.min()):g} to {float(x.max()):g}", "pass standardiser=, other bounds= or None"
            raise ValueError(f"expected inputs within bounds {bounds}, got values from {got}; {advice}")
        # An input that is outside by rounding is allowed.
        low_, high_ = torch.minimum(edges[0], x), torch.maximum(edges[1], x)
        return cls(x, radius, one_of("norm", norm, ("inf", "2")), unit, low_, high_)

    def step(self, at: Tensor, way: Tensor, size: float) -> Tensor:
        """A step of this size along `way`, projected onto the ball."""
        up = way.to(self.x) * self.unit  # the gradient in the units of ε
        along = up.sign() if self.norm == "inf" else up / euclidean_norms(up).clamp(min=torch.finfo(up.dtype).tiny)
        return self.project((at - self.x) / self.unit + size * along)

    def project(self, delta: Tensor) -> Tensor:
        """x + δ, with δ projected onto the ball and the sum onto the bounds; exactly x if δ is 0."""
        if self.norm == "inf":
            delta = delta.clamp(-self.epsilon, self.epsilon)
        else:
            far = euclidean_norms(delta)
            delta = torch.where(far > self.epsilon, delta * (self.epsilon / far), delta)
        moved = torch.where(delta == 0, self.x, self.x + delta * self.unit)
        return torch.minimum(torch.maximum(moved, self.low), self.high)

    def random_point(self, generator: torch.Generator | None) -> Tensor:
        """A uniformly drawn point of the ball, projected onto the bounds."""
        empty = torch.empty_like(self.x, device=torch.device("cpu") if generator is None else generator.device)
        if self.norm == "inf":
            delta = empty.uniform_(-1, 1, generator=generator)
        else:  # a direction, and a radius whose D-th power is uniform
            delta = empty.normal_(generator=generator)
            radius = torch.empty_like(euclidean_norms(delta)).uniform_(generator=generator)
            delta = delta / euclidean_norms(delta) * radius ** (1 / max(math.prod(delta.shape[1:]), 1))
        return self.project(self.epsilon * delta.to(self.x))


def euclidean_norms(vectors: Tensor) -> Tensor:
    """(B, 1...) Euclidean norms of vectors (B, ...)."""
    return append_axes(vectors.flatten(1).norm(dim=1), vectors)


def append_axes(values: Tensor, like: Tensor) -> Tensor:
    """Values (B,) or (M, B) with trailing axes of length 1, to broadcast with `like`."""
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim))
