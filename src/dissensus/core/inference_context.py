"""Looking at a posterior's networks without leaving a trace: the context of every prediction."""

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from dissensus.core.particles import Particles
from dissensus.numerics.randomness import generator_states, restore_generators, set_lookahead
from dissensus.utils.tensor_tree import TensorTree

_mode = attrgetter("training")


class InferenceContext:
    """Eval mode without gradients, with the network locked; afterwards modes and random state are restored.

    One context instead of `Particles.lock_network`, `eval_mode`, `torch.no_grad`, `without_advancing` and
    `preserve_random_state` inside each other: for one input on a CPU, entering and leaving those takes longer than a small
    network.
    """

    def __init__(self, posterior: Any) -> None:
        self.posterior = posterior

    def __enter__(self) -> None:
        posterior, particles = self.posterior, self.posterior.particles
        self.lock = particles.lock_network()
        self.lock.__enter__()
        try:
            self.random = generator_states(posterior.device)
            parts = posterior.known_parts(*posterior._modules.values(), *particles.templates, trees=False)
            self.parts = [posterior, *parts]
            self.modes = [*map(_mode, self.parts)]
        except BaseException:
            self.lock.__exit__(None, None, None)
            raise
        self.recorded, self.previous_lookahead = torch.is_grad_enabled(), set_lookahead(True)
        torch._C._set_grad_enabled(False)
        if any(self.modes):
            try:
                if has_plain_modes(self.parts):
                    for part in self.parts:
                        vars(part)["training"] = False
                else:
                    for module in (posterior, *particles.templates):
                        module.eval()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if self.modes != [*map(_mode, self.parts)]:
            plain = has_plain_modes(self.parts)
            for part, mode in zip(self.parts, self.modes, strict=True):
                if plain:
                    vars(part)["training"] = mode
                else:
                    part.training = mode
        restore_generators(self.random, self.posterior.device, mine=self.posterior.network_is_random)
        torch._C._set_grad_enabled(self.recorded)
        set_lookahead(self.previous_lookahead)
        self.lock.__exit__(None, None, None)


def has_plain_modes(parts: Sequence[nn.Module]) -> bool:
    """Whether a mode is nothing but an attribute of each: then it is set there, which is faster than `eval()`."""
    held = all("training" in each and "train" not in each and "eval" not in each for each in map(vars, parts))
    return held and all(map(_has_plain_mode, {*map(type, parts)}))


@cache
def _has_plain_mode(kind: type[nn.Module]) -> bool:
    known = kind.train in (nn.Module.train, Particles.train, TensorTree.train) and kind.eval is nn.Module.eval
    return known and kind.__setattr__ is nn.Module.__setattr__
