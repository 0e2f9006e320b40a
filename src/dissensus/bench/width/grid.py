"""Tasks over widths: ensembles of shared weights beside independent ones, over the width and the number of members.

The section [widths] of a task says which cells there are; each is a run with a folder of its own, a variant of its method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dissensus.bench.task.config import RunConfig, Task, run_config
from dissensus.numerics.checks import number, one_of, whole
from dissensus.theory import largest_eigenvalue

INDEPENDENT, EMBEDDED = "deep_ensemble", "batch_ensemble"
REGIMES = {"independent": "M", "collective": "1"}  # regime -> γ
DEFAULTS: dict[str, Any] = {"p": [], "p_members": 8, "p_factor": 1.0, "p_rates": {}, "rate": "fixed"}


@dataclass(frozen=True)
class GridCell:
    """One ensemble to be trained. `p`: of modulations p + √(1 − p²) N(0, 1), None for those of the task."""

    config: RunConfig
    method: str
    factor: float
    units: int
    members: int
    p: float | None = None
    gamma: str = ""  # "M", "1", or "" where weights are not shared


def cells(task: Task, seeds: Sequence[int]) -> list[GridCell]:
    """All ensembles of a task, the longest to train first; smaller independent ones are subsets of the largest."""
    widths, needed = DEFAULTS | task.settings["widths"], ("of", "factors", "members")
    if missing := [key for key in needed if not widths.get(key)]:
        raise ValueError(f"expected widths.{missing[0]} in the task, got none; [widths] needs {', '.join(needed)}")
    for method in task.methods:
        one_of("a method of a task with [widths]", method, (INDEPENDENT, EMBEDDED), hint="it compares these two")
    one_of("widths.rate", widths["rate"], ("fixed", "sharing"))
    factors = sorted({float(number("widths.factors", each, above=0)) for each in widths["factors"]})
    sizes = sorted({whole("widths.members", each) for each in widths["members"]})
    swept = [float(number("widths.p", each)) for each in dict.fromkeys(widths["p"])]
    for regime, rates in widths["p_rates"].items():
        one_of("a regime of widths.p_rates", regime, REGIMES)
        one_of(f"the number of rates in widths.p_rates.{regime}", len(rates), [len(swept)], hint="give one for each p")
    asked: list[tuple[Any, ...]] = [(INDEPENDENT, factor, max(*sizes, widths["p_members"])) for factor in factors[::-1]]
    asked += [(EMBEDDED, factor, members) for factor in factors[::-1] for members in sizes[::-1]]
    for i, p in enumerate(swept):
        factor = one_of("widths.p_factor", float(widths["p_factor"]), factors)
        rates = {regime: each[i] for regime, each in widths["p_rates"].items()}
        asked += [(EMBEDDED, factor, widths["p_members"], p, regime, rates.get(regime)) for regime in REGIMES]
    return [_cell(run_config(task, each[0], seed), widths, *each) for each in asked for seed in seeds]


def _cell(config: RunConfig, widths: Any, method: str, factor: float, members: int, *transition: Any) -> GridCell:
    """A config at this width with so many members; `transition`: p, regime and rate in place of the task's."""
    p, regime, rate = transition or (None, None, None)
    of, settings = widths["of"], {**config.settings, "members": members}
    scaled = _scaled(f"network.{of}, which widths.of names,", config.network.get(of), factor)
    units = scaled if isinstance(scaled, list) else [scaled]
    name, gamma = f"{method}-N{units[0]}", ""
    if method == EMBEDDED:
        name += f"-M{members}"
        if transition:
            settings |= {"modulation": {"between": p}, "regime": regime}
            name += f"-p{p:g}-{regime}".replace(".", "_")
        gamma = REGIMES[one_of(f"method.{EMBEDDED}.regime", str(settings.get("regime")), REGIMES)]
        if rate is None and widths["rate"] == "sharing":
            lr: Any = number('training.lr, which widths.rate = "sharing" lowers,', config.training.get("lr"))
            rate = lr / largest_eigenvalue(members, min(units), p=0.0)  # of the kernel of M members over N shared units
    training = config.training if rate is None else {**config.training, "lr": number("widths.p_rates", rate)}
    network = {**config.network, of: scaled}
    changed = replace(config, method=name, network=network, settings=settings, training=training)
    return GridCell(changed, method, factor, units[0], members, p, gamma)


def _scaled(what: str, value: Any, factor: float) -> Any:
    """A whole number, or a list of them, times the factor, whole again."""
    if isinstance(value, list):
        return [_scaled(what, each, factor) for each in value]
    scaled = whole(what, value) * factor
    return whole(f"{what} times {factor:g}", int(scaled) if scaled.is_integer() else scaled)
