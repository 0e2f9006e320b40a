"""What ensembles whose members act on each other have in common: M stacked members, alone when M = 1."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from torch import Tensor, nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods.parts.networks import placeholders
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
        return {"members": self.particles.members, **self.prior_config(), **self.settings()}

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
