"""What ensembles whose members act on each other have in common: M stacked members, alone when M = 1."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from torch import Tensor, nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods.networks import placeholders
from dissensus.numerics.annealing import Annealing


class RepulsivePosterior(Posterior):
    """Base class of methods whose stored members repel each other while they train; one member has nobody to repel: MAP."""

    def annealed(self, annealing: Annealing) -> Tensor | float:
        """() a_t at this step: of the run where the schedule spans the run, of all steps where it says its own length."""
        step = self.steps - self.began if annealing.steps is None else self.steps
        return annealing(step, self.run_length)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The method's own keyword arguments, all JSON."""

    def config(self) -> dict[str, Any]:
        return {
            "members": self.particles.members,
            "weight_prior_std": self.weight_prior_std,
            "data_size": self.data_size,
            **self.settings(),
        }

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Self:
        keywords = {key: value for key, value in config.items() if key != "members"}
        constructor: Any = cls  # whose keywords are those of the subclass
        built: Self = constructor(
            placeholders(network, config["members"]), likelihood=likelihood, **cls.keywords(keywords)
        )
        return built

    @classmethod
    def keywords(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments from what `settings` gave: where a setting is no JSON, this builds it again."""
        return config


def check_data_size(data_size: int | None, weight_prior_std: float | None) -> None:
    """Raises where a method whose repulsion is measured against N data points is not told N."""
    if data_size is None and weight_prior_std is None:  # with a prior, the prior asks for it
        raise ValueError("expected data_size, got none; pass data_size=len(training_set)")
