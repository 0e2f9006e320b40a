"""Attacks on a posterior's averaged prediction: FGSM, PGD, and inputs made of noise that fool it.

The loss of input x is −log p̄(y | x), p̄ = (1/M) Σ_m p_m: the mixture is attacked, not its members one by one. With the odds
of being wrong, d_m = log(1 − p_m(y)) − log p_m(y), its gradient is

    ∇ −log p̄ = (Σ_m w_m ∇d_m) / Σ_m p_m,    w_m = p_m (1 − p_m)

Attacks need only its direction, Σ_m w_m ∇d_m / Σ_m w_m, which stays exact where p_m rounds to one and the gradient itself
underflows: a network does not look robust because it is too sure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.core.batch import Batch, call
from dissensus.core.functions import DrawnFunctions
from dissensus.core.likelihood import Classification
from dissensus.core.particles import Member
from dissensus.core.posterior import Posterior, expect_posterior, left_as_found
from dissensus.core.predictive import ClassificationPredictive
from dissensus.core.running import first_line
from dissensus.core.spaces import differentiate
from dissensus.data.standardise import Standardiser
from dissensus.numerics.checks import number, one_of, whole

__all__ = ["Adversarial", "fgsm", "fool", "gradient", "pgd"]

Norm = Literal["inf", "2"]
Draw = Literal["fixed", "fresh"] | DrawnFunctions
Bounds = tuple[float, float] | None
AT_ONCE = 1000
ROUNDING = 1e-3  # of the range: how far outside their bounds inputs may lie


@dataclass(frozen=True, eq=False)
class Adversarial:
    """What an attack found. An object, not a tensor: whether an input fools a sampled mixture is known only for its draw.

    Args:
        inputs: (B, ...), on the posterior's device.
        success: (B,) boolean: misclassified; of a targeted attack, classified as the target.
        loss: (B,) −log p̄(y) at these inputs: large where an attack succeeds, small where a targeted one does.
    """

    inputs: Tensor
    success: Tensor
    loss: Tensor


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
    """The inputs after one step of size ε up the loss (Goodfellow, Shlens & Szegedy, ICLR 2015).

    x + ε sign(∇ −log p̄), or x + ε ∇/‖∇‖ for norm "2", whether or not that raises the loss. Arguments as in `pgd`.
    """
    aim = Aim(posterior, x, y, draw=draw, targeted=targeted, at_once=at_once)
    ball = Ball.around(aim.x, epsilon, norm=norm, bounds=bounds, standardiser=standardiser)
    moved = ball.step(aim.x, aim.look(aim.x).way, ball.epsilon)
    return aim.look(moved, climb=False).found


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
    """The best inputs met by projected gradient ascent of the loss (Madry et al., ICLR 2018).

    Every step goes `step_size` along the sign of the gradient (norm "2": along the gradient) and back into the ball
    around x and into the bounds. Of all iterates, x itself among them, each input keeps one: a misclassified one before
    others, then the one of highest loss. With a fixed draw more steps therefore never raise the accuracy.

    Args:
        posterior: a classification with logits (B, C). `ds.MAP(posterior.member(i))` attacks one member; what that does to
            the mixture is `posterior.predict(found.inputs)`.
        x: (B, ...), floating-point.
        y: (B,) true classes; with `targeted`, classes to reach.
        epsilon: ε, the radius of the ball, in the units of the bounds.
        steps: gradients taken; one more forward pass judges the last iterate.
        step_size: in the units of ε; None is 2.5 ε / steps.
        norm: "inf" or "2", of the ball and of a step.
        targeted: lowers −log p̄(y) instead.
        random_start: starts at a uniformly drawn point of the ball, from `generator` (None: torch's own stream).
        bounds: least and largest value of an input, (0, 1) for pixels; None for no bounds.
        standardiser: where x is standardised, what it was standardised by: ε, step size and bounds are then in the units
            before, pixels for images, whatever the channel.
        draw: "fixed" attacks one draw of functions, the one `posterior.predict` would use; "fresh" draws anew for every
            gradient from torch's own stream. They differ only for a posterior that samples and has no stored draw.
            What `posterior.draw()` returned is attacked itself.
        at_once: pairs of a member and an input in memory at a time, at most (but one input at least).
    """
    steps = whole("steps", steps, least=0)
    aim = Aim(posterior, x, y, draw=draw, targeted=targeted, at_once=at_once)
    ball = Ball.around(aim.x, epsilon, norm=norm, bounds=bounds, standardiser=standardiser)
    size = 2.5 * epsilon / max(steps, 1) if step_size is None else float(number("step_size", step_size, above=0))
    return climb(aim, ball, steps=steps, size=size, start=ball.random(generator) if random_start else None)


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
    """Inputs of nothing that the mixture takes for a class: ascent of log p̄(target) from noise, within the bounds.

    As gradient ascent of Nguyen, Yosinski & Clune (CVPR 2015). Arguments as in `pgd`, without a ball.

    Args:
        start: (B, ...) noise, for example `torch.rand(10, 1, 28, 28)`, standardised where a standardiser is given.
        target: the class to reach, one for all or (B,).
    """
    steps = whole("steps", steps, least=0)
    classes = torch.full((len(start),), target) if isinstance(target, int) else target
    aim = Aim(posterior, start, classes, draw=draw, targeted=True, at_once=at_once)
    ball = Ball.around(aim.x, None, norm=norm, bounds=bounds, standardiser=standardiser)
    return climb(aim, ball, steps=steps, size=float(number("step_size", step_size, above=0)))


def gradient(posterior: Posterior, x: Tensor, y: Tensor, *, at_once: int = AT_ONCE) -> Tensor:
    """(B, ...) ∇ₓ −log p̄(y | x) of the mixture, at the posterior's temperature; arguments as in `pgd`."""
    look = Aim(posterior, x, y, draw="fixed", targeted=False, at_once=at_once).look(x)
    return look.way * look.slope


# ---------------------------------------------------------------------- the loss


@dataclass(frozen=True, eq=False)
class Look:
    """The loss at inputs (B, ...), and which way to go from them."""

    found: Adversarial
    gain: Tensor  # (B,) the odds of being wrong (right, if targeted): ordered as the loss, but they do not saturate
    way: Tensor  # (B, ...) direction in which the gain grows; empty where nobody asked
    slope: Tensor  # (B, 1...): the gradient of the loss is way · slope (minus that, if targeted)

    def better(self, other: Look) -> Look:
        """Of each input the one that succeeds, and if both or none do, the one of higher gain; this one if they are equal."""
        mine, its = self.found, other.found
        taken = (its.success & ~mine.success) | ((its.success == mine.success) & (other.gain > self.gain))
        found = Adversarial(
            torch.where(per_input(taken, mine.inputs), its.inputs, mine.inputs),
            mine.success | its.success,
            torch.where(taken, its.loss, mine.loss),
        )
        return replace(self, found=found, gain=torch.where(taken, other.gain, self.gain))


class Aim:
    """Inputs, classes and the functions that are attacked. What may be wrong with them is found here."""

    def __init__(self, posterior: Posterior, x: Tensor, y: Tensor, *, draw: Draw, targeted: bool, at_once: int) -> None:
        self.posterior = expect_posterior(posterior)
        batch = checked(posterior, x, y).to(posterior.device)
        self.x, self.y = cast(Tensor, batch.x).detach(), batch.y.long()
        self.targeted, self.at_once = targeted, whole("at_once", at_once)
        self.kept: DrawnFunctions | None = None
        if isinstance(draw, DrawnFunctions):
            self.kept = draw
        elif one_of("draw", draw, ("fixed", "fresh")) == "fixed":
            with left_as_found(posterior):
                self.kept = posterior.draw()
        self._tried = not len(self.y)  # whether there are gradients

    def look(self, x: Tensor, *, climb: bool = True) -> Look:
        """The loss at x; `climb`: whether a way up is wanted, too."""
        with torch.no_grad():
            drawn = self.posterior.draw() if self.kept is None else self.kept
            rows = max(self.at_once // drawn.members, 1)
            pairs = zip(torch.split(x.to(self.x), rows), torch.split(self.y, rows), strict=True)
            parts = [self._mixture(drawn, *pair) if climb else self._judged(drawn, *pair) for pair in pairs]
            log_mean, way, slope = (torch.cat(each) for each in zip(*parts, strict=True))
            if climb and not self._tried:
                self._check_gradients(drawn, way)
            odds, hit = odds_of(log_mean, self.y), log_mean.argmax(1) == self.y
            found = Adversarial(x.to(self.x), hit if self.targeted else ~hit, F.softplus(odds))
            return Look(found, -odds, -way, slope) if self.targeted else Look(found, odds, way, slope)

    def _judged(self, drawn: DrawnFunctions, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with left_as_found(self.posterior):
            predictive = self.posterior.checked(drawn.predict(x))
        return cast(ClassificationPredictive, predictive).log_mean, x.new_empty(0), x.new_empty(0)

    def _mixture(self, drawn: DrawnFunctions, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log p̄ (B, C), direction (B, ...) of the gradient of −log p̄(y), its size over that of the gradient (B, 1...))."""
        temperature = float(self.posterior.temperature)

        def climbed(member: Member, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            def odds(at: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                (log_probs,) = member.likelihood.describe(call(member.network, at))
                tempered = log_probs if temperature == 1.0 else log_probs / temperature  # odds need no normalisation
                found = odds_of(tempered, y)
                return found.sum(), (log_probs, found)

            (slope,), (log_probs, found) = differentiate(odds, x)
            return log_probs, found, slope

        try:
            with left_as_found(self.posterior):
                log_probs, odds, slopes = drawn.each(climbed, x, y)  # (M, B, C), (M, B), (M, B, ...)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise no_gradients(first_line(error)) from error
        predictive = self.posterior.checked(drawn.likelihood.predictive(log_probs))
        log_p, log_weight = F.logsigmoid(-odds), F.logsigmoid(odds) + F.logsigmoid(-odds)  # (M, B)
        way = (per_input(log_weight.softmax(0), slopes) * slopes).sum(0)
        slope = (log_weight.logsumexp(0) - log_p.logsumexp(0)).exp()
        return cast(ClassificationPredictive, predictive).log_mean, way, per_input(slope, way)

    def _check_gradients(self, drawn: DrawnFunctions, way: Tensor) -> None:
        """Raises where neither the inputs nor noise have any: an attack would find nothing, and all would look well."""
        if not way.any():
            seeded = torch.Generator().manual_seed(0)
            noise = torch.rand(8, *self.x.shape[1:], generator=seeded, dtype=self.x.dtype).to(self.x)
            if not self._mixture(drawn, noise, self.y[:1].expand(8))[1].any():
                raise no_gradients("all gradients are zero")
        self._tried = True


def checked(posterior: Posterior, x: Tensor, y: Tensor) -> Batch:
    """The batch; an error where it cannot be attacked."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"expected one floating-point tensor of inputs, got {what}, which has no gradient; pass images as x / 255, or let "
            "the network begin after its embedding"
        )
    batch = Batch.of((x, y), anywhere=True)
    shape = posterior.output_shape(x)
    if not isinstance(posterior.likelihood, Classification) or len(shape) != 2:
        raise ValueError(
            f"expected a classification with logits (B, C) to attack, got {type(posterior.likelihood).__name__} of outputs "
            f"{tuple(shape)}; attack a posterior of classes"
        )
    posterior.check_batch(batch._replace(y=batch.y.cpu()))  # values are read on the host only
    counted = posterior.likelihood.counted(batch.y)
    if batch.y.is_floating_point() or not (counted is None or bool(counted.all())):
        raise ValueError(
            "expected one class index per input, got soft or ignored labels; pass y.argmax(1), or leave those out"
        )
    return batch


def no_gradients(reason: str) -> ValueError:
    return ValueError(
        f"expected a network that can be differentiated by its inputs, got one that cannot ({reason}); take no_grad, detach, "
        "numpy and rounding out of its forward"
    )


def odds_of(log_probs: Tensor, y: Tensor) -> Tensor:
    """(B,) log(1 − p(y)) − log p(y) of log-probabilities (B, C) up to a constant, exact also where p(y) rounds to one."""
    mine = F.one_hot(y, log_probs.shape[1]).bool()
    others = torch.where(mine, -math.inf, log_probs).logsumexp(1)
    return others - log_probs.gather(1, y[:, None])[:, 0]


def per_input(values: Tensor, like: Tensor) -> Tensor:
    """Values (B,) or (M, B) with axes of length 1 behind them, as many as `like` has."""
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim))


# ---------------------------------------------------------------------- where it may go


@dataclass(frozen=True, eq=False)
class Ball:
    """Inputs within ε of x and within bounds. `unit`: how much of an input's value is one of the units of ε."""

    x: Tensor
    epsilon: float
    norm: Norm
    unit: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def around(
        cls, x: Tensor, epsilon: float | None, *, norm: Norm, bounds: Bounds, standardiser: Standardiser | None
    ) -> Ball:
        """The ball; without ε, everything within the bounds."""
        radius = math.inf if epsilon is None else float(number("epsilon", epsilon, least=0))
        low, high = (-math.inf, math.inf) if bounds is None else map(float, bounds)
        ends = torch.tensor([low, high], dtype=x.dtype, device=x.device)
        unit = torch.ones_like(ends[0])
        edges = ends[:1], ends[1:]
        if standardiser is not None:
            unit, edges = 1 / standardiser.std.to(x), (standardiser(ends[0]), standardiser(ends[1]))
        room = ROUNDING * (high - low) * unit
        if not (low < high and bool(((x >= edges[0] - room) & (x <= edges[1] + room)).all())):
            raise ValueError(
                f"expected inputs within bounds {bounds}, got values from {float(x.min()):g} to {float(x.max()):g}; pass "
                "standardiser= where inputs are standardised, other bounds=, or bounds=None"
            )
        # An input that rounding has moved outside stays allowed.
        low_, high_ = torch.minimum(edges[0], x), torch.maximum(edges[1], x)
        return cls(x, radius, one_of("norm", norm, ("inf", "2")), unit, low_, high_)

    def step(self, at: Tensor, way: Tensor, size: float) -> Tensor:
        """The point of the ball nearest to the one that lies a step of this size along the way."""
        up = way * self.unit  # the gradient in the units of ε
        along = up.sign() if self.norm == "inf" else up / length(up).clamp(min=torch.finfo(up.dtype).tiny)
        return self.nearest((at - self.x) / self.unit + size * along)

    def nearest(self, delta: Tensor) -> Tensor:
        """x + δ, δ brought back into the ball and the sum into the bounds; x bit for bit where δ is 0."""
        if self.norm == "inf":
            delta = delta.clamp(-self.epsilon, self.epsilon)
        else:
            far = length(delta)
            delta = torch.where(far > self.epsilon, delta * (self.epsilon / far), delta)
        moved = torch.where(delta == 0, self.x, self.x + delta * self.unit)
        return torch.minimum(torch.maximum(moved, self.low), self.high)

    def random(self, generator: torch.Generator | None) -> Tensor:
        """A uniformly drawn point of the ball, brought into the bounds."""
        empty = torch.empty_like(self.x, device=torch.device("cpu") if generator is None else generator.device)
        if self.norm == "inf":
            delta = empty.uniform_(-1, 1, generator=generator)
        else:  # a direction, and a radius whose D-th power is uniform
            delta = empty.normal_(generator=generator)
            radius = torch.empty_like(length(delta)).uniform_(generator=generator)
            delta = delta / length(delta) * radius ** (1 / max(math.prod(delta.shape[1:]), 1))
        return self.nearest(self.epsilon * delta.to(self.x))


def length(vectors: Tensor) -> Tensor:
    """(B, 1...) Euclidean norms of vectors (B, ...)."""
    return per_input(vectors.flatten(1).norm(dim=1), vectors)


def climb(aim: Aim, ball: Ball, *, steps: int, size: float, start: Tensor | None = None) -> Adversarial:
    """The best of aim's inputs, the start and the inputs after each step from there."""
    now = best = aim.look(aim.x, climb=start is None and steps > 0)
    if start is not None:
        now = aim.look(start, climb=steps > 0)
        best = best.better(now)
    for step in range(steps):
        now = aim.look(ball.step(now.found.inputs, now.way, size), climb=step + 1 < steps)
        best = best.better(now)
    return best.found
