"""Tasks over widths: ensembles of shared weights beside independent ones, over the width and the number of members.

The section [widths] of a task says which cells there are; each is a run with a folder of its own, a variant of its method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dissensus.bench.task.config import RunConfig, Task, run_config
from dissensus.numerics.checks import number, one_of, whole

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
    if set(task.methods) != {INDEPENDENT, EMBEDDED}:
        raise ValueError(
            f"expected methods {INDEPENDENT} and {EMBEDDED} in a task with [widths], got {', '.join(task.methods)}; "
            "it compares these two"
        )
    one_of("widths.rate", widths["rate"], ("fixed", "sharing"))
    factors = sorted({float(number("widths.factors", each, above=0)) for each in widths["factors"]})
    sizes = sorted({whole("widths.members", each) for each in widths["members"]})
    swept = [float(number("widths.p", each)) for each in dict.fromkeys(widths["p"])]
    for regime, rates in widths["p_rates"].items():
        one_of("a regime of widths.p_rates", regime, REGIMES)
        if len(rates) != len(swept):
            raise ValueError(
                f"expected a rate for each of {len(swept)} p in widths.p_rates.{regime}, got {len(rates)}; give as many"
            )
    asked: list[tuple[Any, ...]] = [(INDEPENDENT, factor, max(*sizes, widths["p_members"])) for factor in factors[::-1]]
    asked += [(EMBEDDED, factor, members) for factor in factors[::-1] for members in sizes[::-1]]
    for i, p in enumerate(swept):
        factor = one_of("widths.p_factor", float(widths["p_factor"]), factors)
        for regime in REGIMES:
            given = {"p": p, "regime": regime, "rate": widths["p_rates"].get(regime, [None] * len(swept))[i]}
            asked.append((EMBEDDED, factor, widths["p_members"], given))
    return [_cell(run_config(task, each[0], seed), widths, *each) for each in asked for seed in seeds]


def _cell(
    config: RunConfig, widths: Any, method: str, factor: float, members: int, given: Mapping[str, Any] = {}
) -> GridCell:
    """A config at this width with so many members; given: p, regime and rate of the transition."""
    scaled = _scaled(f"network.{widths['of']}, which widths.of names,", config.network.get(widths["of"]), factor)
    units, p, rate = scaled if isinstance(scaled, list) else [scaled], given.get("p"), given.get("rate")
    settings, name, gamma = {**config.settings, "members": members}, f"{method}-N{units[0]}", ""
    if method == EMBEDDED:
        name += f"-M{members}"
        if p is not None:
            settings |= {"modulation": {"between": p}, "regime": given["regime"]}
            name += f"-p{p:g}-{given['regime']}".replace(".", "_")
        gamma = REGIMES[one_of(f"method.{EMBEDDED}.regime", str(settings.get("regime")), REGIMES)]
        if rate is None and widths["rate"] == "sharing":
            lr = number('training.lr, which widths.rate = "sharing" lowers,', config.training.get("lr"))
            rate = sharing_rate(lr, members, min(units))
    training = config.training if rate is None else {**config.training, "lr": number("widths.p_rates", rate)}
    network = {**config.network, widths["of"]: scaled}
    changed = replace(config, method=name, network=network, settings=settings, training=training)
    return GridCell(changed, method, factor, units[0], members, p, gamma)


def _scaled(what: str, value: Any, factor: float) -> Any:
    """A whole number, or a list of them, times the factor, whole again."""
    if isinstance(value, list):
        return [_scaled(what, each, factor) for each in value]
    scaled = whole(what, value) * factor
    return whole(f"{what} times {factor:g}", int(scaled) if scaled.is_integer() else scaled)


def sharing_rate(rate: float, members: int, units: int) -> float:
    """rate / (1 + √(M/N))²: the kernel over M members that share layers of N units has eigenvalues up to (1 + √(M/N))²."""
    return rate / (1 + math.sqrt(members / units)) ** 2
