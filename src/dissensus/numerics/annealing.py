"""Annealing: a weight a_t on the gradient of the loss, but not on the repulsion.

With small a_t early in training, members spread before the data pull them together (D'Angelo & Fortuin, NeurIPS 2021).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from dissensus.utils.checks import integer, number, one_of

SCHEDULES = ("constant", "linear", "hyper", "cyclic")


@dataclass(frozen=True)
class Annealing:
    """A schedule of the weight a_t on the loss (or β on a KL term) at optimiser step t, over T steps.

        constant   weight
        linear     weight · min(t / T, 1)
        hyper      weight · tanh((1.3 t / T)¹⁰)
        cyclic     weight · (τ / T_c)¹⁰, τ = t mod T_c, T_c = T / cycles

    Args:
        schedule: "constant", "linear", "hyper" or "cyclic".
        steps: T; None is the whole run, whose length comes from `fit` (or `posterior.begin`).
        weight: the largest a_t, usually 1.
        cycles: number of cycles of "cyclic"; 5 in the paper.
    """

    schedule: Literal["constant", "linear", "hyper", "cyclic"] = "constant"
    steps: int | None = None
    weight: float = 1.0
    cycles: int = 5

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        if self.steps is not None:
            integer("steps", self.steps, hint="None is the whole run")
        integer("cycles", self.cycles, hint="the paper uses 5")
        number("weight", self.weight, above=0, hint="1 does not change the loss")

    def __call__(self, step: Tensor, run: int | None) -> Tensor | float:
        """() a_t at the step (), in a run of `run` steps. Tensor arithmetic, so that it can be captured in a CUDA graph."""
        if self.schedule == "constant":
            return self.weight
        total = self.steps or run
        if total is None:
            hint = "pass Annealing(steps=...) or call posterior.begin(steps_per_epoch, epochs)"
            raise ValueError(f"expected the length of the run for annealing, got none; {hint}")
        t = step.to(torch.float32)
        if self.schedule == "linear":
            return self.weight * (t / total).clamp(max=1.0)
        if self.schedule == "hyper":
            return self.weight * torch.tanh((1.3 * t / total) ** 10)
        cycle = total / self.cycles
        return self.weight * (torch.remainder(t, cycle) / cycle) ** 10

    def config(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this schedule."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The schedule that `config` describes."""
        return cls(**config)


def annealing_or_constant(annealing: Annealing | None) -> Annealing:
    """The argument, or the constant 1 for None."""
    if annealing is not None and not isinstance(annealing, Annealing):
        hint = f'Annealing("{annealing}")' if annealing in SCHEDULES else 'one, such as Annealing("cyclic")'
        raise TypeError(f"expected an Annealing, got {annealing!r}; pass {hint}")
    return annealing or Annealing()


def scale_gradient(value: Tensor, factor: Tensor | float) -> Tensor:
    """The value itself, with its gradient multiplied by factor."""
    held = value.detach()
    return held + (value - held) * factor
