"""Deep ensembles: M networks from M starting points (Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods.networks import placeholders, stack_members


class DeepEnsemble(Posterior):
    """M independent members. The loss is the sum over members, so each trains exactly as it would alone.

    `modules`: a sequence of networks, each built by the caller, copied into a stack; the caller's stay usable. Networks
    that differ in attributes, hooks or modes run one after the other, each with its own.
    """

    name = "deep_ensemble"

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        likelihood: Likelihood | None = None,
        weight_prior_std: float | None = None,
        data_size: int | None = None,
    ) -> None:
        particles = stack_members(modules, likelihood)
        super().__init__(particles, weight_prior_std=weight_prior_std, data_size=data_size)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        return {
            "members": self.particles.members,
            "weight_prior_std": self.weight_prior_std,
            "data_size": self.data_size,
        }

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "DeepEnsemble":
        keywords = {key: value for key, value in config.items() if key != "members"}
        return cls(placeholders(network, config["members"]), likelihood=likelihood, **keywords)
