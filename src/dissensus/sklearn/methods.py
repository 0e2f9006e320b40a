"""Builds a posterior from a method's name, with suitable keywords for a table and a multilayer perceptron."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods import METHODS
from dissensus.numerics.checks import one_of, whole
from dissensus.surgery.modulation import Modulation

MEMBERS = 5
# keywords without a default in the method
SETTLED: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "batch_ensemble": lambda network: {"modulation": Modulation.sign()},
    "hmc": lambda network: {"weight_prior_std": 1.0},
    "sghmc": lambda network: {"weight_prior_std": 1.0},
    "feature_rde": lambda network: dict(zip(("layer", "head"), _last_two(network), strict=True)),
    "lit": lambda network: {"strength": 0.1},
    "mc_dropout": lambda network: {"rate": 0.1},
}


def posterior_of(
    method: str | type[Posterior],
    make: Callable[[], nn.Module],
    *,
    likelihood: Likelihood,
    members: int | None,
    data_size: int,
    settings: dict[str, Any],
) -> Posterior:
    """The method with networks from `make`: `members` of them if it is built from several, else one."""
    kind: Any = METHODS[one_of("method", method, METHODS)] if isinstance(method, str) else method
    keywords = inspect.signature(kind).parameters
    several = next(iter(keywords)) == "modules"
    if members is not None:
        whole("members", members)
    count = (members or MEMBERS) if several else (members or 1) if next(iter(keywords)) == "networks" else 1
    networks = [make() for _ in range(count)]
    given = {**(SETTLED[kind.name](networks[0]) if kind.name in SETTLED else {}), **settings}
    if "members" in keywords and not several and members is not None:
        given.setdefault("members", members)
    if "data_size" in keywords and ("data_size" in kind.needed or given.keys() & {"prior", "weight_prior_std"}):
        given.setdefault("data_size", data_size)
    posterior: Posterior = kind(networks if several or count > 1 else networks[0], likelihood=likelihood, **given)
    return posterior


def _last_two(network: nn.Module) -> list[str]:
    """Names of the last two layers."""
    return [name for name, layer in network.named_modules() if next(layer.children(), None) is None][-2:]
