"""Deep ensembles: M networks from M starting points (Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017)."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dissensus.core.attributes import unmade
from dissensus.core.functions import DrawnFunctions, MemberFunctions
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.member import check_initialised
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior
from dissensus.surgery.architecture import check_distinct_weights, check_same_architecture


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


def stack_members(modules: Sequence[nn.Module], likelihood: Likelihood | None) -> Particles:
    """M networks of one architecture, checked and copied into a stack."""
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        raise TypeError("expected a sequence of modules, got one module; pass [make() for _ in range(M)], or use MAP")
    modules = list(modules)
    if not modules:
        raise ValueError("expected at least one module, got none; pass [make() for _ in range(M)]")
    for module in modules:
        check_initialised(module)
    check_same_architecture(modules)
    check_distinct_weights(modules)
    return Particles.stack(modules, likelihood or Classification())


def placeholders(network: nn.Module, members: int) -> list[nn.Module]:
    """Copies of one network with made-up, distinct values: to be overwritten by those of a file.

    Buffers that no file holds stay as they are.
    """
    copies = [copy.deepcopy(network, unmade(network)) for _ in range(members)]
    with torch.no_grad():
        for i, each in enumerate(copies):
            for tensor in each.state_dict().values():
                tensor.fill_(i)
    return copies
