"""Some of several members, or one, as particles of their own, for code that handles one network at a time."""

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


def some(particles: Particles, rows: slice) -> Particles:
    """These members, which run as all of them do, with the same tensors."""
    own = TensorTree()
    for name, tensor in tensors_of(particles.own).items():
        own.plant(name, tensor.detach()[rows])
    mine = Particles(*particles.templates, own=own, shared=particles.shared, members=rows.stop - rows.start)
    mine.runner = particles.runner  # with what it has found out about the network
    return mine


def likelihood_of(particles: Particles, index: int) -> Likelihood:
    """A copy of one member's likelihood."""
    return particles.copied_part(particles.likelihood, "likelihood.", index)
