"""Tasks over widths: ensembles of shared weights beside independent ones, over the width and the number of members.

The section [widths] of a task says which cells there are; each is a run with a folder of its own, a variant of its method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dissensus.bench.task.config import RunConfig, Task, run_config
from dissensus.bench.task.schema import check_type
from dissensus.core.errors import unknown

INDEPENDENT, EMBEDDED = "deep_ensemble", "batch_ensemble"
REGIMES = {"independent": "M", "collective": "1"}  # regime -> γ
RULES = ("fixed", "sharing")  # of learning rates


@dataclass(frozen=True)
class Widths:
    """The section [widths]: `factors` of the network's setting `of`, numbers of members, and the laws of the transition."""

    of: str
    factors: tuple[float, ...]
    members: tuple[int, ...]
    p: tuple[float, ...]
    p_members: int
    p_factor: float
    p_rates: dict[str, tuple[float, ...]]  # regime -> learning rate at every p; that of `rate` where it is left out
    rate: str  # "sharing": embedded ensembles of M members have the method's rate over (1 + √(M/N))²

    @property
    def most(self) -> int:
        """Members of the independent ensembles; smaller ones are subsets of them."""
        return max(*self.members, self.p_members)


@dataclass(frozen=True)
class Cell:
    """One ensemble to be trained. `p`: of modulations p + √(1 − p²) N(0, 1), None for those of the task."""

    method: str
    factor: float
    units: int
    members: int
    p: float | None
    gamma: str  # "M", "1", or "" where weights are not shared
    config: RunConfig


def widths_of(task: Task) -> Widths | None:
    """The section [widths] of a task, checked; None where it has none."""
    table = task.settings.get("widths")
    if not table:
        return None
    needed = ("of", "factors", "members")
    if missing := [key for key in needed if key not in table]:
        raise ValueError(f"expected widths.{missing[0]} in the task, got none; [widths] needs {', '.join(needed)}")
    found = Widths(
        of=table["of"],
        factors=_numbers(table["factors"], "factors"),
        members=tuple(int(each) for each in _numbers(table["members"], "members", whole=True)),
        p=_numbers(table.get("p", []), "p", above=False),
        p_members=table.get("p_members", 8),
        p_factor=float(table.get("p_factor", 1.0)),
        p_rates=_rates(table.get("p_rates", {}), table.get("p", [])),
        rate=table.get("rate", "fixed"),
    )
    if found.rate not in RULES:
        raise unknown("a rule of widths.rate", found.rate, RULES)
    if not found.factors or not found.members or found.p_members < 1:
        raise ValueError("expected factors and numbers of members in [widths], got none; give at least one of each")
    if found.p and found.p_factor not in found.factors:
        raise ValueError(
            f"expected widths.p_factor among the factors {list(found.factors)}, got {found.p_factor:g}; name one of them"
        )
    if set(task.methods) != {INDEPENDENT, EMBEDDED}:
        raise ValueError(
            f"expected methods {INDEPENDENT} and {EMBEDDED} in a task with [widths], got {', '.join(task.methods)}; "
            "it compares these two"
        )
    return found


def cells(task: Task, widths: Widths, seeds: Sequence[int]) -> list[Cell]:
    """All ensembles of a task, the longest to train first."""
    found = []
    for factor in sorted(widths.factors, reverse=True):
        found += [_cell(task, widths, INDEPENDENT, factor, widths.most, seed) for seed in seeds]
    for factor in sorted(widths.factors, reverse=True):
        for members in sorted(widths.members, reverse=True):
            found += [_cell(task, widths, EMBEDDED, factor, members, seed) for seed in seeds]
    for i, p in enumerate(widths.p):
        for regime in REGIMES:
            rate = widths.p_rates[regime][i] if regime in widths.p_rates else None
            found += [
                _cell(task, widths, EMBEDDED, widths.p_factor, widths.p_members, seed, p=p, regime=regime, rate=rate)
                for seed in seeds
            ]
    return found


def _cell(
    task: Task,
    widths: Widths,
    method: str,
    factor: float,
    members: int,
    seed: int,
    *,
    p: float | None = None,
    regime: str | None = None,
    rate: float | None = None,
) -> Cell:
    config = run_config(task, method, seed)
    network = {**config.network, widths.of: _scaled(config.network.get(widths.of), factor, widths.of)}
    units = _units(network[widths.of])[0]
    if rate is None and method == EMBEDDED and widths.rate == "sharing":
        rate = sharing_rate(_base(config), members, min(_units(network[widths.of])))
    training = config.training if rate is None else {**config.training, "lr": rate}
    settings = {**config.settings, "members": members}
    name, gamma = f"{method}-N{units}", ""
    if method == EMBEDDED:
        name += f"-M{members}"
        if p is not None and regime is not None:
            settings |= {"modulation": {"between": p}, "regime": regime}
            name += f"-p{p:g}-{regime}".replace(".", "_")
        gamma = REGIMES.get(settings.get("regime", ""), "")
        if not gamma:
            raise ValueError(
                f'expected method.{EMBEDDED}.regime = "independent" or "collective" in a task with [widths], got '
                f"{settings.get('regime')!r}; write one of them"
            )
    changed = replace(config, method=name, network=network, settings=settings, training=training)
    return Cell(method, factor, units, members, p, gamma, changed)


def _scaled(value: Any, factor: float, name: str) -> Any:
    """A whole number, or a list of them, times the factor; an error where that is none."""
    if isinstance(value, list) and value:
        return [_scaled(each, factor, name) for each in value]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"expected whole numbers for network.{name}, which widths.of names, got {value!r}; set it, or name another"
        )
    if not (value * factor).is_integer() or value * factor < 1:
        raise ValueError(
            f"expected factors that make whole numbers of network.{name} = {value}, got {factor:g}; choose others"
        )
    return int(value * factor)


def sharing_rate(rate: float, members: int, units: int) -> float:
    """rate / (1 + √(M/N))²: the kernel over M members that share layers of N units has eigenvalues up to (1 + √(M/N))²."""
    return rate / (1 + math.sqrt(members / units)) ** 2


def _base(config: RunConfig) -> float:
    if "lr" not in config.training:
        raise ValueError(
            f'expected training.lr for {config.method} with widths.rate = "sharing", got none; write lr = … below '
            f"[training] or [method.{config.method}.training], or leave widths.rate out"
        )
    return float(config.training["lr"])


def _units(value: Any) -> list[int]:
    """Of every layer; those of one where the network has one number for all."""
    return list(value) if isinstance(value, list) else [value]


def _numbers(values: Sequence[float], name: str, *, whole: bool = False, above: bool = True) -> tuple[float, ...]:
    for value in values:
        check_type(value, (int,) if whole else (int, float), f"widths.{name}")
        if above and value <= 0:
            raise ValueError(f"expected positive numbers in widths.{name}, got {value}; correct it")
    return tuple(float(value) for value in dict.fromkeys(values))


def _rates(table: Any, p: Sequence[float]) -> dict[str, tuple[float, ...]]:
    found = {}
    for regime, rates in table.items():
        if regime not in REGIMES:
            raise unknown("a regime of widths.p_rates", regime, REGIMES)
        check_type(rates, (list,), f"widths.p_rates.{regime}")
        if len(rates) != len(p):
            raise ValueError(
                f"expected a rate for each of {len(p)} p in widths.p_rates.{regime}, got {len(rates)}; give as many"
            )
        for rate in rates:
            check_type(rate, (int, float), f"widths.p_rates.{regime}")
        found[regime] = tuple(float(rate) for rate in rates)
    return found
