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


@dataclass(frozen=True)
class Widths:
    """The section [widths]: `factors` of the network's setting `of`, numbers of members, and the laws of the transition."""

    of: str
    factors: tuple[float, ...]
    members: tuple[int, ...]
    p: tuple[float, ...]
    p_members: int
    p_factor: float
    p_rates: Mapping[str, tuple[float, ...]]  # regime -> learning rate at every p; that of `rate` where it is left out
    rate: str  # "sharing": embedded ensembles of M members have the method's rate over (1 + √(M/N))²

    @property
    def most(self) -> int:
        """Members of the independent ensembles; smaller ones are subsets of them."""
        return max(*self.members, self.p_members)


@dataclass(frozen=True)
class GridCell:
    """One ensemble to be trained. `p`: of modulations p + √(1 − p²) N(0, 1), None for those of the task."""

    method: str
    factor: float
    units: int
    members: int
    p: float | None
    gamma: str  # "M", "1", or "" where weights are not shared
    config: RunConfig


def widths_of(task: Task) -> Widths:
    """The section [widths] of a task, checked."""
    table, needed = task.settings.get("widths", {}), ("of", "factors", "members")
    if missing := [key for key in needed if not table.get(key)]:
        raise ValueError(f"expected widths.{missing[0]} in the task, got none; [widths] needs {', '.join(needed)}")
    if set(task.methods) != {INDEPENDENT, EMBEDDED}:
        raise ValueError(
            f"expected methods {INDEPENDENT} and {EMBEDDED} in a task with [widths], got {', '.join(task.methods)}; "
            "it compares these two"
        )
    factors = tuple(float(number("widths.factors", each, above=0)) for each in dict.fromkeys(table["factors"]))
    p = tuple(float(number("widths.p", each)) for each in dict.fromkeys(table.get("p", [])))
    rates = table.get("p_rates", {})
    for regime, each in rates.items():
        one_of("a regime of widths.p_rates", regime, REGIMES)
        if len(each) != len(p):
            raise ValueError(
                f"expected a rate for each of {len(p)} p in widths.p_rates.{regime}, got {len(each)}; give as many"
            )
    return Widths(
        of=table["of"],
        factors=factors,
        members=tuple(whole("widths.members", each) for each in dict.fromkeys(table["members"])),
        p=p,
        p_members=whole("widths.p_members", table.get("p_members", 8)),
        p_factor=float(one_of("widths.p_factor", float(table.get("p_factor", 1.0)), factors) if p else 1.0),
        p_rates={r: tuple(float(number(f"widths.p_rates.{r}", lr)) for lr in each) for r, each in rates.items()},
        rate=one_of("widths.rate", table.get("rate", "fixed"), ("fixed", "sharing")),
    )


def cells(task: Task, widths: Widths, seeds: Sequence[int]) -> list[GridCell]:
    """All ensembles of a task, the longest to train first."""
    factors, sizes = sorted(widths.factors, reverse=True), sorted(widths.members, reverse=True)
    asked: list[dict[str, Any]] = [
        *({"method": INDEPENDENT, "factor": factor, "members": widths.most} for factor in factors),
        *({"method": EMBEDDED, "factor": factor, "members": members} for factor in factors for members in sizes),
    ]
    for i, p in enumerate(widths.p):
        for regime in REGIMES:
            rate = widths.p_rates[regime][i] if regime in widths.p_rates else None
            law = {"p": p, "regime": regime, "rate": rate}
            asked.append({"method": EMBEDDED, "factor": widths.p_factor, "members": widths.p_members, **law})
    return [_cell(task, widths, seed, **each) for each in asked for seed in seeds]


def _cell(
    task: Task,
    widths: Widths,
    seed: int,
    *,
    method: str,
    factor: float,
    members: int,
    p: float | None = None,
    regime: str = "",
    rate: float | None = None,
) -> GridCell:
    config = run_config(task, method, seed)
    scaled = _scaled(config.network.get(widths.of), factor, widths.of)
    units = scaled if isinstance(scaled, list) else [scaled]
    settings, name, gamma = {**config.settings, "members": members}, f"{method}-N{units[0]}", ""
    if method == EMBEDDED:
        name += f"-M{members}"
        if p is not None:
            settings |= {"modulation": {"between": p}, "regime": regime}
            name += f"-p{p:g}-{regime}".replace(".", "_")
        gamma = REGIMES[one_of(f"method.{EMBEDDED}.regime", str(settings.get("regime")), REGIMES)]
        if rate is None and widths.rate == "sharing":
            if "lr" not in config.training:
                raise ValueError(
                    f'expected training.lr for {method} with widths.rate = "sharing", got none; write lr = … below '
                    f"[training] or [method.{method}.training], or leave widths.rate out"
                )
            rate = sharing_rate(config.training["lr"], members, min(units))
    training = config.training if rate is None else {**config.training, "lr": rate}
    network = {**config.network, widths.of: scaled}
    changed = replace(config, method=name, network=network, settings=settings, training=training)
    return GridCell(method, factor, units[0], members, p, gamma, changed)


def _scaled(value: Any, factor: float, name: str) -> Any:
    """A whole number, or a list of them, times the factor; an error where that is none."""
    if isinstance(value, list) and value:
        return [_scaled(each, factor, name) for each in value]
    if type(value) is not int or value * factor < 1 or not (value * factor).is_integer():
        raise ValueError(
            f"expected network.{name}, which widths.of names, and its multiple by {factor:g}, as whole numbers, got "
            f"{value!r}; choose other factors, or name another setting"
        )
    return int(value * factor)


def sharing_rate(rate: float, members: int, units: int) -> float:
    """rate / (1 + √(M/N))²: the kernel over M members that share layers of N units has eigenvalues up to (1 + √(M/N))²."""
    return rate / (1 + math.sqrt(members / units)) ** 2
