"""Implicit corruptions: changes of the input that have the same effect on the mean network as one drawn function.

Trinh, Heinonen, Acerbi & Kaski, "Tackling covariate shift with node-based Bayesian neural networks", ICML 2022: noise on
nodes acts like corrupted inputs, so training with it prepares for corruptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus.attacks.gradient_attacks import AT_ONCE, Draw, append_axes
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.posterior import Posterior, expect_posterior, inference_context
from dissensus.utils.checks import integer, number, one_of

GROWN, SHRUNK = 1.3, 0.5  # factors of the step size after an accepted and after a rejected step


@dataclass(frozen=True, eq=False)
class ImplicitCorruptions:
    """The implicit corruptions of B inputs by S drawn functions; made by `implicit_corruptions`.

    Args:
        inputs: (S, B, ...) corrupted inputs, on the posterior's device.
        functions: (S,) indices of the drawn functions.
        explained: (S, B) share of ‖f_s(x) − f̄(x)‖² that the corrupted input reproduces; 1 if there is no difference.
    """

    inputs: Tensor
    functions: Tensor
    explained: Tensor


def implicit_corruptions(
    posterior: Posterior,
    x: Tensor,
    *,
    penalty: float = 0.1,
    functions: int = 8,
    steps: int = 100,
    draw: Draw = "fixed",
    at_once: int = AT_ONCE,
) -> ImplicitCorruptions:
    """Finds inputs at which the mean function has the outputs that one drawn function has at x.

        x_s = argmin_x' ½ ‖f_s(x) − f̄(x')‖² + ½ λ ‖x' − x‖²,    f̄ = (1/M) Σ_m f_m

    f are the networks' outputs, before softmax and temperature. The minimum is found by gradient descent from x; a step that
    does not lower the objective enough is rejected and halved, for each input separately.

    Args:
        posterior: any posterior; for a NodeBNN the functions are draws of the latents.
        x: (B, ...), floating-point, as the network takes it. Distances are in its units.
        penalty: λ; with a smaller one, inputs move further. 0.01 to 0.5 in the paper.
        functions: S, spread evenly over the M drawn ones; all if there are fewer.
        steps: descent steps, each a forward and a backward pass through all M functions.
        draw: as in `pgd`; "fresh" draws once.
        at_once: most pairs of a function and an input in memory at a time (at least one input).
    """
    weight = float(number("penalty", penalty, above=0))
    wanted, at_once = integer("functions", functions), integer("at_once", at_once)
    steps = integer("steps", steps, least=0)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"expected one floating-point tensor of inputs, got {what}; pass images as x / 255")
    x = x.detach().to(expect_posterior(posterior).device)
    with inference_context(posterior):
        if not isinstance(draw, DrawnFunctions):
            one_of("draw", draw, ("fixed", "fresh"))
        drawn = draw if isinstance(draw, DrawnFunctions) else posterior.draw()
        chosen = torch.arange(min(wanted, drawn.members)) * drawn.members // min(wanted, drawn.members)
        inputs, explained = [], []
        for part in torch.split(x, max(at_once // (drawn.members * len(chosen)), 1)):
            outputs = drawn(part)  # (M, B, ...)
            aims = outputs[chosen.to(outputs.device)]  # (S, B, ...)
            starts = part.expand(len(chosen), *part.shape).flatten(0, 1)
            ends, apart = descend(drawn, starts, aims.flatten(0, 1), weight, steps)
            before = (aims - outputs.mean(0)).flatten(2).square().sum(2)  # (S, B)
            share = 1 - apart.view_as(before) / before
            inputs.append(ends.view(len(chosen), *part.shape))
            explained.append(torch.where(before == 0, 1.0, share))
    return ImplicitCorruptions(torch.cat(inputs, 1), chosen, torch.cat(explained, 1))


def descend(drawn: DrawnFunctions, start: Tensor, aim: Tensor, penalty: float, steps: int) -> tuple[Tensor, Tensor]:
    """(inputs (P, ...), ‖aim − f̄(inputs)‖² (P,)) of P problems."""

    def objective_at(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            apart = (drawn(at).mean(0) - aim).flatten(1).square().sum(1)
            value = apart / 2 + penalty / 2 * (at - start).flatten(1).square().sum(1)
            (slope,) = torch.autograd.grad(value.sum(), at)
        return value.detach(), slope, apart.detach()

    x, step = start, torch.ones(len(start), dtype=start.dtype, device=start.device)
    value, slope, apart = objective_at(x)
    for _ in range(steps):
        tried = x - append_axes(step, x) * slope
        found = objective_at(tried)
        # accepted if it falls by at least a quarter of the linear prediction; NaN is not accepted
        taken = found[0] <= value - step / 4 * slope.flatten(1).square().sum(1)
        x = torch.where(append_axes(taken, x), tried, x)
        value, apart = torch.where(taken, found[0], value), torch.where(taken, found[2], apart)
        slope = torch.where(append_axes(taken, x), found[1], slope)
        step = torch.where(taken, GROWN * step, SHRUNK * step)
    return x, apart
