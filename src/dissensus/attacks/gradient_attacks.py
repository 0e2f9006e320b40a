"""FGSM, PGD, and fooling inputs made of noise, by the gradient of the averaged prediction's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from dissensus.attacks.attack_loss import Adversarial, AttackObjective, Draw
from dissensus.attacks.constraint import Ball, Bounds, Norm
from dissensus.core.posterior import Posterior
from dissensus.data.input_transforms import Standardiser
from dissensus.utils.checks import integer, number

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

    Returns an `Adversarial` with x + ε sign(∇ −log p̄), or x + ε ∇/‖∇‖ for norm "2", even if that does not raise the loss.
    Arguments as in `pgd`.
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
        standardiser: the `Standardiser` of x, if x is standardised: ε, step size and bounds are then in the original
            units (pixels for images), the same for all channels.
        draw: "fixed" attacks one draw of functions, the one that `posterior.predict` would use; "fresh" uses a new draw
            for every gradient. They differ only for a sampling method without a stored draw. Or the result of
            `posterior.draw()`, to attack that draw.
        at_once: most pairs of a member and an input in memory at a time (at least one input).

    Returns:
        `Adversarial`: inputs (B, ...), success (B,) and loss (B,).
    """
    steps = integer("steps", steps, least=0)
    aim = AttackObjective(posterior, x, y, draw=draw, targeted=targeted, at_once=at_once)
    ball = Ball.around_inputs(aim.x, epsilon, norm=norm, bounds=bounds, standardiser=standardiser)
    size = 2.5 * epsilon / max(steps, 1) if step_size is None else float(number("step_size", step_size, above=0))
    start = ball.random_point(generator) if random_start else None
    return gradient_ascent(aim, ball, steps=steps, size=size, start=start)


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

    The gradient ascent of Nguyen, Yosinski & Clune (CVPR 2015). Returns an `Adversarial`. Arguments as in `pgd`, without a
    ball.

    Args:
        start: (B, ...) noise, for example `torch.rand(10, 1, 28, 28)`, standardised if a standardiser is given.
        target: the class to reach, one for all or (B,).
    """
    steps = integer("steps", steps, least=0)
    classes = torch.full((len(start),), target) if isinstance(target, int) else target
    aim = AttackObjective(posterior, start, classes, draw=draw, targeted=True, at_once=at_once)
    ball = Ball.around_inputs(aim.x, None, norm=norm, bounds=bounds, standardiser=standardiser)
    return gradient_ascent(aim, ball, steps=steps, size=float(number("step_size", step_size, above=0)))


def gradient(posterior: Posterior, x: Tensor, y: Tensor, *, at_once: int = AT_ONCE) -> Tensor:
    """(B, ...) the input gradient ∇ₓ −log p̄(y | x) of the mixture, at the posterior's temperature; arguments as in `pgd`."""
    look = AttackObjective(posterior, x, y, draw="fixed", targeted=False, at_once=at_once).evaluate(x)
    return look.direction * look.gradient_scale


def gradient_ascent(
    aim: AttackObjective, ball: Ball, *, steps: int, size: float, start: Tensor | None = None
) -> Adversarial:
    """The best of the original inputs, the start, and the iterates after each step."""
    now = best = aim.evaluate(aim.x, climb=start is None and steps > 0)
    if start is not None:
        now = aim.evaluate(start, climb=steps > 0)
        best = best.best_of(now)
    for step in range(steps):
        now = aim.evaluate(ball.step(now.found.inputs, now.direction, size), climb=step + 1 < steps)
        best = best.best_of(now)
    return best.found
