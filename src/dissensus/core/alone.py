"""Some of several members, or one, as particles of their own, and particles laid out otherwise."""

from collections.abc import Iterable
from typing import Any

import torch

from dissensus.core.attributes import plain_attributes
from dissensus.core.likelihood import Likelihood
from dissensus.core.particles import Particles
from dissensus.core.splitting import NUMBER, tensors_of
from dissensus.numerics.tree import TensorTree


def only(particles: Particles, index: int) -> Particles:
    """One member with its own template; its tensors are views of the stacked ones, so later changes are seen."""
    if not particles.own_parameters() and not particles.own_buffers():
        return particles.apart()
    alone = TensorTree()
    for tree in (particles.own, particles.shared):
        kept = tree.state_dict().keys()
        for name, tensor in tensors_of(tree).items():
            if name != NUMBER:
                alone.plant(name, tensor[index] if tree is particles.own else tensor, persistent=name in kept)
    return Particles(particles.copied_template(index), own=TensorTree(), shared=alone, members=1)


class KeptApart:
    """One network's particles with a separate template, as `only` makes them, kept until it could have changed.

    To copy a small network takes longer than to run it.
    """

    def __init__(self) -> None:
        self.known: tuple[list[Any], Particles] | None = None

    def __reduce__(self) -> tuple[type["KeptApart"], tuple[()]]:
        return KeptApart, ()  # neither copied nor saved

    def __call__(self, particles: Particles) -> Particles:
        with particles.turn():
            now = plain_attributes(particles.template) if particles.held else None
            if now is None or self.known is None or self.known[0] != now:
                made = only(particles, 0)
                kept = now is not None and made.template is not particles.template
                self.known = (now, made) if now is not None and kept else None
                return made
            return self.known[1]


def some(particles: Particles, rows: slice) -> Particles:
    """These members, which run as all of them do, with the same tensors."""
    own = TensorTree()
    for name, tensor in tensors_of(particles.own).items():
        own.plant(name, tensor.detach()[rows])
    mine = Particles(*particles.templates, own=own, shared=particles.shared, members=rows.stop - rows.start)
    mine.runner = particles.runner  # with what it has found out about the network
    return mine


def share(particles: Particles, names: Iterable[str]) -> None:
    """Stores these tensors once for all members, as frozen ones, to match the layout of a file."""
    particles._frozen |= {name for name in names if name in tensors_of(particles.own)}
    particles.store_once(particles._frozen)
    for name in particles._frozen & particles.shared_parameters().keys():
        particles.shared_parameters()[name].requires_grad_(False)


def on(particles: Particles, device: torch.device) -> Particles:
    """Copies of the tensors on another device, with the same template."""
    trees = [TensorTree(), TensorTree()]
    for tree, source in zip(trees, (particles.own, particles.shared), strict=True):
        for name, tensor in tensors_of(source).items():
            tree.plant(name, tensor.detach().to(device))
    return Particles(*particles.templates, own=trees[0], shared=trees[1], members=particles.members)


def likelihood_of(particles: Particles, index: int) -> Likelihood:
    """A copy of one member's likelihood."""
    return particles.copied_part(particles.likelihood, "likelihood.", index)
