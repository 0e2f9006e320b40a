"""Base class of ensembles of whole networks: M stacked members, each with its own weights."""

from collections.abc import Callable, Sequence
from typing import Any, Self, Unpack

from torch import Tensor, nn

from dissensus.core.drawn_functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.networks import make_members, own_settings, placeholders, stack_members
from dissensus.numerics.annealing import Annealing


class StackedPosterior(Posterior):
    """Base class of methods with M stored members, which may interact in training; with one member it trains like MAP.

    Args:
        networks: M networks of one architecture, each initialised separately; copied. Or a function that makes one.
        members: M, if `networks` is a function.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    networks_taken = "several"

    def __init__(
        self,
        networks: Sequence[nn.Module] | Callable[[], nn.Module],
        *,
        members: int | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        super().__init__(stack_members(make_members(networks, members), likelihood), **prior)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        return {"members": self.particles.members, **self.prior_config(), **own_settings(self)}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> Self:
        keywords = {key: value for key, value in config.items() if key != "members"}
        if "annealing" in keywords:
            keywords["annealing"] = Annealing(**keywords["annealing"])
        return cls(placeholders(network, config["members"]), likelihood=likelihood, **keywords)


def annealing_weight(posterior: Posterior, annealing: Annealing) -> Tensor | float:
    """() a_t at this step, counted within the run if the schedule spans the run, else over all steps."""
    step = posterior.steps - posterior.steps_before_run if annealing.steps is None else posterior.steps
    return annealing(step, posterior.run_length)
