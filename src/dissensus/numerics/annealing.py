"""Annealing of the driving force: a weight a_t on the gradient of the loss, none on the repulsion.

Early in training members then spread before the data pull them together (D'Angelo & Fortuin, NeurIPS 2021).
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus.numerics.checks import number, one_of, whole

SCHEDULES = ("constant", "linear", "hyper", "cyclic")


@dataclass(frozen=True)
class Annealing:
    """a_t of the optimiser step t, over T steps.

        constant   weight
        linear     weight · min(t / T, 1)
        hyper      weight · tanh((1.3 t / T)¹⁰)
        cyclic     weight · (τ / T_c)¹⁰, τ = t mod T_c, T_c = T / cycles

    Args:
        schedule: one of these four.
        steps: T; None is the whole run, whose length `fit` (or `posterior.begin`) gives.
        weight: the largest a_t; 1 leaves the driving force as it is.
        cycles: of "cyclic"; 5 is the paper's.
    """

    schedule: Literal["constant", "linear", "hyper", "cyclic"] = "constant"
    steps: int | None = None
    weight: float = 1.0
    cycles: int = 5

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        if self.steps is not None:
            whole("steps", self.steps, hint="None takes the whole run")
        whole("cycles", self.cycles, hint="5 is the paper's")
        number("weight", self.weight, above=0, hint="1 leaves the driving force as it is")

    def __call__(self, step: Tensor, run: int | None) -> Tensor | float:
        """() a_t at the step (), of a run of so many steps. Tensor arithmetic: a captured step goes on with the clock."""
        if self.schedule == "constant":
            return self.weight
        total = self.steps or run
        if total is None:
            raise ValueError(
                "expected the length of the run for annealing, got none; pass Annealing(steps=...) or call "
                "posterior.begin(steps_per_epoch, epochs)"
            )
        t = step.to(torch.float32)
        if self.schedule == "linear":
            return self.weight * (t / total).clamp(max=1.0)
        if self.schedule == "hyper":
            return self.weight * torch.tanh((1.3 * t / total) ** 10)
        cycle = total / self.cycles
        return self.weight * (torch.remainder(t, cycle) / cycle) ** 10

    def config(self) -> dict[str, Any]:
        """The keyword arguments that build this again."""
        return asdict(self)


def annealing_or_constant(annealing: Annealing | None) -> Annealing:
    """What was passed, or the constant 1 for None."""
    if annealing is not None and not isinstance(annealing, Annealing):
        hint = f'Annealing("{annealing}")' if annealing in SCHEDULES else 'one, such as Annealing("cyclic")'
        raise TypeError(f"expected an Annealing, got {annealing!r}; pass {hint}")
    return annealing or Annealing()


def with_gradient_times(value: Tensor, factor: Tensor | float) -> Tensor:
    """The value itself, with its gradient multiplied by factor."""
    held = value.detach()
    return held + (value - held) * factor
