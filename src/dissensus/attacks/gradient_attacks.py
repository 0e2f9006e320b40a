"""FGSM, PGD, and inputs made of noise: up the gradient of the loss of the averaged prediction."""

from __future__ import annotations

import torch
from torch import Tensor

from dissensus.attacks.aim import Adversarial, Aim, Draw
from dissensus.attacks.ball import Ball, Bounds, Norm
from dissensus.core.posterior import Posterior
from dissensus.data.standardise import Standardiser
from dissensus.numerics.checks import number, whole

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
