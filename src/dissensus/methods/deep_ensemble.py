"""Deep ensembles: M networks from M starting points (Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017)."""

from collections.abc import Sequence
from typing import Any, Unpack

from torch import nn

from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.prior import PriorKeywords
from dissensus.methods.parts.networks import placeholders, stack_members


class DeepEnsemble(Posterior):
    """M independent members. The loss is the sum over members, so each trains exactly as it would alone.

    `modules`: a sequence of networks, each built by the caller, copied into a stack; the caller's stay usable. Networks
    that differ in attributes, hooks or modes run one after the other, each with its own.
    """

    name = "deep_ensemble"

    def __init__(
        self, modules: Sequence[nn.Module], *, likelihood: Likelihood | None = None, **prior: Unpack[PriorKeywords]
    ) -> None:
        super().__init__(stack_members(modules, likelihood), **prior)

    def draw(self) -> DrawnFunctions:
        return MemberFunctions(self.particles)

    def config(self) -> dict[str, Any]:
        return {"members": self.particles.members, **self.prior_config()}

    @classmethod
    def skeleton(cls, network: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> "DeepEnsemble":
        keywords = {key: value for key, value in config.items() if key != "members"}
        return cls(placeholders(network, config["members"]), likelihood=likelihood, **keywords)
