"""What a task over widths set out to see, said from its rows with intervals: shown, not shown, or not to be told.

Every number but the best M is a sum of cells with weights. Its interval counts seeds (Student's t) and test examples, as
in `spread`; where rows came without their examples, seeds alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from dissensus.bench.width.grid import EMBEDDED, INDEPENDENT
from dissensus.bench.width.rows import Place, WidthRow
from dissensus.reporting.spread import spread

Table = dict[Place, dict[int, WidthRow]]
Weights = Mapping[Place, float]


class Claim(NamedTuple):
    """A number with its 95 % interval (NaN where nothing varies), and the question it belongs to."""

    question: str
    about: str
    value: float
    lower: float
    upper: float
    unit: str = "points"
    seeds: int | None = None  # that it rests on: those with which none of its ensembles diverged

    @property
    def text(self) -> str:
        scale = 100 if self.unit == "points" else 1
        shown = [f"{scale * each:+.2f}" for each in (self.value, self.lower, self.upper)]
        ends = "no interval, as nothing varies" if math.isnan(self.lower) else f"{shown[1]} … {shown[2]}"
        alone = ", one seed, whose spread is not counted" if self.seeds == 1 else ""
        return f"{shown[0]} ({ends}{alone})".replace("-", "−")


FOLLOW = "Do wide embedded ensembles follow independent ones?"
FALL = "Does the accuracy of members fall as M/N grows?"
BEST = "Does the best M grow with the width?"
PRICE = "Is there more accuracy for the same parameters?"
TRANSITION = "Which γ is better on the way from independent to equal members?"


def table_of(rows: Sequence[WidthRow]) -> Table:
    """Place -> seed -> row, of rows that have numbers."""
    found: Table = {}
    for row in rows:
        if row.diverged is None:
            found.setdefault(row.place, {})[row.seed] = row
    return found


def claims(rows: Sequence[WidthRow]) -> list[Claim]:
    """All numbers, question by question."""
    table = table_of(rows)
    return [*_follow(table), *_fall(table), *_best(table), *_price(table), *_transition(table)]


def estimate(table: Table, weights: Weights, name: str) -> tuple[float, float, float] | None:
    """(value, lower, upper) of Σ weight · cell on the seeds that all cells have; None where there is none."""
    seeds = seeds_of(table, weights)
    if not seeds:
        return None
    values = [math.fsum(w * getattr(table[place][seed], name) for place, w in weights.items()) for seed in seeds]
    error, tested = 0.0, 2
    if all(name in table[place][seed].examples for place in weights for seed in seeds):
        each = torch.stack([
            torch.stack([w * table[place][seed].examples[name] for place, w in weights.items()]).sum(0)
            for seed in seeds
        ]).mean(0)  # (n,)  # fmt: skip
        error, tested = float(each.std(correction=min(1, len(each) - 1))) / math.sqrt(len(each)), max(len(each), 2)
    return _interval(values, error, tested)


def _interval(values: Sequence[float], error: float = 0.0, tested: int = 2) -> tuple[float, float, float]:
    half = spread(values, error, tested).half_width()
    return fmean(values), fmean(values) - half, fmean(values) + half


def seeds_of(table: Table, places: Iterable[Place]) -> list[int]:
    """The seeds with which all of these places have numbers."""
    return sorted(set.intersection(*({*table.get(place, {})} for place in places)))


def factors_of(table: Table) -> list[float]:
    return sorted({place.factor for place in table if place.p is None})


def members_of(table: Table) -> list[int]:
    return sorted({place.members for place in table if place.p is None and place.method == EMBEDDED})


def embedded(table: Table, factor: float, members: int) -> Place:
    """The embedded ensemble of the main grid."""
    gamma = next((p.gamma for p in table if p.method == EMBEDDED and p.p is None), "M")
    return Place(EMBEDDED, factor, members, None, gamma)


def independent(factor: float, members: int) -> Place:
    return Place(INDEPENDENT, factor, members, None, "")


def _claimed(question: str, about: str, table: Table, weights: Weights, name: str = "accuracy") -> list[Claim]:
    found = estimate(table, weights, name)
    return [] if found is None else [Claim(question, about, *found, seeds=len(seeds_of(table, weights)))]


def _follow(table: Table) -> list[Claim]:
    factors, sizes = factors_of(table), [m for m in members_of(table) if m > 1]
    if not sizes:
        return []
    said = []
    for members in dict.fromkeys((sizes[len(sizes) // 2], sizes[-1])):

        def gap(factor: float, members: int = members) -> dict[Place, float]:
            return {embedded(table, factor, members): 1.0, independent(factor, members): -1.0}

        for factor in factors:
            about = f"embedded − independent, M = {members}, width {factor:g}×"
            said += _claimed(FOLLOW, about, table, gap(factor))
        if len(factors) > 1:
            change = {**gap(factors[-1]), **{place: -w for place, w in gap(factors[0]).items()}}
            about = f"the same at {factors[-1]:g}× minus at {factors[0]:g}×, M = {members}"
            said += _claimed(FOLLOW, about, table, change)
    for factor in factors:
        pair = {embedded(table, factor, sizes[-1]): 1.0, independent(factor, sizes[-1]): -1.0}
        about = f"a member's accuracy, embedded − independent, M = {sizes[-1]}, width {factor:g}×"
        said += _claimed(FOLLOW, about, table, pair, "member_accuracy")
    return said


def _fall(table: Table) -> list[Claim]:
    """Slopes of the members' accuracy over log₂ M at each width: within a width, M/N is M."""
    said = []
    for name, what in (("member_accuracy", "test"), ("train_member_accuracy", "training")):
        slopes = {factor: _slope(table, factor) for factor in factors_of(table)}
        slopes = {factor: weights for factor, weights in slopes.items() if weights}
        for factor, weights in slopes.items():
            about = f"members' {what} accuracy for every doubling of M, width {factor:g}×"
            said += _claimed(FALL, about, table, weights, name)
        if len(slopes) > 1:
            mean = {place: w / len(slopes) for weights in slopes.values() for place, w in weights.items()}
            said += _claimed(FALL, f"members' {what} accuracy for every doubling of M, mean", table, mean, name)
    return said


def _slope(table: Table, factor: float) -> dict[Place, float]:
    places = [embedded(table, factor, members) for members in members_of(table)]
    logs = [math.log2(place.members) for place in places]
    centred = [x - fmean(logs) for x in logs]
    total = math.fsum(x * x for x in centred)
    return {place: x / total for place, x in zip(places, centred, strict=True)} if total else {}


def _best(table: Table) -> list[Claim]:
    factors, sizes = factors_of(table), members_of(table)
    if len(factors) < 2 or len(sizes) < 2:
        return []
    places = [embedded(table, factor, members) for factor in factors for members in sizes]
    seeds = seeds_of(table, places)
    if not seeds:
        return []
    best = {
        seed: [max(sizes, key=lambda m: table[embedded(table, f, m)][seed].accuracy or 0.0) for f in factors]
        for seed in seeds
    }
    bests = {f"log₂ of the best M, width {f:g}×": [math.log2(best[s][i]) for s in seeds] for i, f in enumerate(factors)}
    logs = [math.log2(factor) for factor in factors]
    centred = [x - fmean(logs) for x in logs]
    slopes = [
        math.fsum(x * math.log2(m) for x, m in zip(centred, best[s], strict=True)) / math.fsum(x * x for x in centred)
        for s in seeds
    ]
    bests["doublings of the best M for every doubling of the width"] = slopes
    return [Claim(BEST, about, *_interval(each), "doublings", len(seeds)) for about, each in bests.items()]


def _price(table: Table) -> list[Claim]:
    """The best of either kind that has at most so many parameters, at the budgets of the largest embedded ensembles."""
    said = []
    for factor in factors_of(table):
        largest = table.get(embedded(table, factor, members_of(table)[-1]))
        if not largest:
            continue
        budget = max(row.parameters for row in largest.values())
        best = {}
        for method in (EMBEDDED, INDEPENDENT):
            within = [p for p in table if p.p is None and p.method == method and _parameters(table, p) <= budget]
            best[method] = max(within, key=lambda p: _mean(table, p, "accuracy"), default=None)
        mine, other = best[EMBEDDED], best[INDEPENDENT]
        if mine is None or other is None:
            continue
        about = (
            f"at most {budget:,} parameters, embedded {mine.factor:g}×, M = {mine.members} "
            f"({100 * _mean(table, mine, 'accuracy'):.2f} %) − independent {other.factor:g}×, M = {other.members} "
            f"({100 * _mean(table, other, 'accuracy'):.2f} %)"
        )
        said += _claimed(PRICE, about, table, {mine: 1.0, other: -1.0})
    return said


def _transition(table: Table) -> list[Claim]:
    said = []
    swept = [place for place in table if place.p is not None]
    for p in sorted({place.p for place in swept if place.p is not None}):
        pair = {place.gamma: place for place in swept if place.p == p}
        if {"M", "1"} <= pair.keys():
            said += _claimed(TRANSITION, f"γ = M − γ = 1 at p = {p:g}", table, {pair["M"]: 1.0, pair["1"]: -1.0})
    return said


def _parameters(table: Table, place: Place) -> int:
    return max(row.parameters for row in table[place].values())


def _mean(table: Table, place: Place, name: str) -> float:
    return fmean(getattr(row, name) for row in table[place].values())
