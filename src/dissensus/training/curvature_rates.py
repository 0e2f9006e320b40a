"""Rates of an optimiser from the curvature of a posterior's own loss: for trained networks, whose curvature nobody knows."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from dissensus.core.posterior import Posterior
from dissensus.landscape.sharpness import sharpness_on_batch
from dissensus.numerics.randomness import preserve_random_state
from dissensus.training.loader_state import loader_state, restore_loader

log = logging.getLogger("dissensus")


def set_relative_rates(
    posterior: Posterior, optimizer: Optimizer, loader: Iterable[Any], *, agreed: Callable[[float], float]
) -> None:
    """Multiplies the rates of an optimiser with `relative` groups by one number, at which the sharpness is 1 − momentum.

    The sharpness is that of the loader's first batch, which is read in a pass of its own; loader and random streams are left as
    found. `agreed`: of several processes, what the first one says.
    """
    groups = optimizer.param_groups
    if not any(group.get("relative") for group in groups):
        return
    with preserve_random_state(posterior.device):
        state = loader_state(loader)
        batches = iter(loader)
        if batches is loader:
            hint = "pass a list of its batches, or an optimizer"
            raise ValueError(f"expected a loader to read twice, to measure a rate, got a generator; {hint}")
        first = next(iter(posterior.read(batches)), None)
        restore_loader(loader, state)
    if first is None:  # fit says so
        return
    found = agreed(sharpness_on_batch(posterior, optimizer, posterior.prepare_batch(first)))
    if not found > 0:
        hint = "look for inputs or weights that are not finite, or pass an optimizer"
        raise ValueError(f"expected a loss with a finite curvature on the first batch, got {found}; {hint}")
    momentum = max(group.get("momentum", 0.0) for group in groups)
    for group in groups:
        group["lr"] *= (1 - momentum) / found
        del group["relative"]
    log.info("rate %.2g, from the curvature of the first batch", groups[0]["lr"])
