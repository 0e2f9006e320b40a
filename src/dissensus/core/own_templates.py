"""Members with state in plain attributes (`core.forward_attributes`), which each run in their own template."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dissensus.core.forward_attributes import OneAtATime
from dissensus.core.member import PREFIX, emptied
from dissensus.core.splitting import NUMBER

log = logging.getLogger("dissensus")
Result = TypeVar("Result")


def state_names(particles: Any) -> set[str]:
    """Names of the networks' plain attributes that training reads and changes."""
    return {name.removeprefix(PREFIX) for written in particles._written.values() for name in written.state}


def run_separately(particles: Any, run: Callable[[], Result]) -> Result:
    """run(), and once more with a template for each member if forward has state in attributes of the one for all."""
    result = run()
    if not particles._written[0].state or len(particles.templates) >= particles.members:
        return result
    others = [emptied(particles.template) for _ in range(1, particles.members)]
    particles.templates = (particles.template, *others)
    particles.own.plant(NUMBER, torch.arange(particles.members, device=particles.device), persistent=False)
    particles._settle()
    log.info("members run one after the other: forward reads and changes %s", ", ".join(sorted(state_names(particles))))
    return run()


def run_compiled(particles: Any, run: Callable[[], Result]) -> Result:
    """run(), in which compiled code runs members; raises if they have state, which that would not keep apart."""
    pairs = [(particles._written[i], each) for i, each in enumerate(particles.templates)]
    lent = [(written, written.lend(template)) for written, template in pairs]
    try:
        return run()
    finally:
        for written, each in lent:
            if each is not None and each.take_back().keys() - (written.unread or set()):
                raise OneAtATime("forward changes attributes")


def warn_of_state(particles: Any) -> None:
    """Logs, once, which attributes a state dict does not hold."""
    if state := sorted(state_names(particles) - particles._said):
        particles._said.update(state)
        log.warning(
            "a state holds tensors only, not the attribute %s, which forward reads and changes in training: wherever it is "
            "loaded, the attribute is that of a new network; register it as a buffer",
            ", ".join(state),
        )
