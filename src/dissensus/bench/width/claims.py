"""What a task over widths set out to see, said from its rows with intervals: shown, not shown, or not to be told.

Every number but the best M is a sum of places with weights. Its interval counts seeds (Student's t) and test examples, as
in `spread`; where rows came without their examples, seeds alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from dissensus.bench.width.grid import EMBEDDED, INDEPENDENT
from dissensus.bench.width.rows import ORIGIN, Place, WidthRow
from dissensus.reporting.results import table_rows, table_text
from dissensus.reporting.spread import spread_of

Terms = Mapping[Place, float]  # place -> its weight in a sum


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
        value, lower, upper = (f"{scale * each:+.2f}" for each in (self.value, self.lower, self.upper))
        ends = "no interval, as nothing varies" if math.isnan(self.lower) else f"{lower} … {upper}"
        alone = ", one seed, whose spread is not counted" if self.seeds == 1 else ""
        return f"{value} ({ends}{alone})".replace("-", "−")


FOLLOW = "Do wide embedded ensembles follow independent ones?"
FALL = "Does the accuracy of members fall as M/N grows?"
BEST = "Does the best M grow with the width?"
PRICE = "Is there more accuracy for the same parameters?"
TRANSITION = "Which γ is better on the way from independent to equal members?"


class WidthTable:
    """Place -> seed -> row, of the rows that have numbers; factors and numbers of members of the main grid."""

    def __init__(self, rows: Sequence[WidthRow]) -> None:
        self.rows: dict[Place, dict[int, WidthRow]] = {}
        for row in rows:
            if row.diverged is None:
                self.rows.setdefault(row.place, {})[row.seed] = row
        self.factors = sorted({place.factor for place in self.rows if place.p is None})
        self.sizes = sorted({place.members for place in self.rows if place[0] == EMBEDDED and place.p is None})

    def seeds(self, *places: Place) -> list[int]:
        """With which all of these places have numbers."""
        return sorted(set.intersection(*({*self.rows.get(place, {})} for place in places)))

    def mean(self, place: Place, name: str) -> float:
        return fmean(getattr(row, name) for row in self.rows[place].values())

    def estimate(self, terms: Terms, name: str = "accuracy") -> tuple[float, float, float] | None:
        """(value, lower, upper) of Σ weight · number on the seeds that all places have; None where there is none."""
        each = [{place: self.rows[place][seed] for place in terms} for seed in self.seeds(*terms)]
        if not each:
            return None
        values = [math.fsum(w * getattr(rows[place], name) for place, w in terms.items()) for rows in each]
        if not all(name in row.examples for rows in each for row in rows.values()):
            return _interval(values)
        sums = [torch.stack([w * rows[place].examples[name] for place, w in terms.items()]).sum(0) for rows in each]
        tested = torch.stack(sums).mean(0)  # (n,)
        error = float(tested.std(correction=min(1, len(tested) - 1))) / math.sqrt(len(tested))
        return _interval(values, error, max(len(tested), 2))

    def claim(self, question: str, about: str, terms: Terms, name: str = "accuracy") -> Iterator[Claim]:
        """The estimate as a claim; none where no seed has all places."""
        if (found := self.estimate(terms, name)) is not None:
            yield Claim(question, about, *found, seeds=len(self.seeds(*terms)))


def _interval(values: Sequence[float], error: float = 0.0, tested: int = 2) -> tuple[float, float, float]:
    half = spread_of(values, error, tested).half_width()
    return fmean(values), fmean(values) - half, fmean(values) + half


def width_claims(rows: Sequence[WidthRow]) -> list[Claim]:
    """All numbers, question by question."""
    table = WidthTable(rows)
    return [claim for asked in (_follow, _fall, _best, _price, _transition) for claim in asked(table)]


def _gap(factor: float, members: int, sign: float = 1.0) -> dict[Place, float]:
    return {Place(EMBEDDED, factor, members): sign, Place(INDEPENDENT, factor, members): -sign}


def _follow(table: WidthTable) -> Iterator[Claim]:
    factors, sizes = table.factors, [m for m in table.sizes if m > 1]
    for members in dict.fromkeys((sizes[len(sizes) // 2], sizes[-1]) if sizes else ()):
        for factor in factors:
            about = f"embedded − independent, M = {members}, width {factor:g}×"
            yield from table.claim(FOLLOW, about, _gap(factor, members))
        if len(factors) > 1:
            change = _gap(factors[-1], members) | _gap(factors[0], members, -1.0)
            about = f"the same at {factors[-1]:g}× minus at {factors[0]:g}×, M = {members}"
            yield from table.claim(FOLLOW, about, change)
    for factor in factors if sizes else ():
        about = f"a member's accuracy, embedded − independent, M = {sizes[-1]}, width {factor:g}×"
        yield from table.claim(FOLLOW, about, _gap(factor, sizes[-1]), "member_accuracy")


def _fall(table: WidthTable) -> Iterator[Claim]:
    """Slopes of the members' accuracy over log₂ M at each width: within a width, M/N is M."""
    if len(table.sizes) < 2:
        return
    weights = dict(zip(table.sizes, _slope(table.sizes), strict=True))
    for name, what in (("member_accuracy", "test"), ("train_member_accuracy", "training")):
        about = f"members' {what} accuracy for every doubling of M"
        for factor in table.factors:
            slope = {Place(EMBEDDED, factor, m): w for m, w in weights.items()}
            yield from table.claim(FALL, f"{about}, width {factor:g}×", slope, name)
        if (count := len(table.factors)) > 1:
            mean = {Place(EMBEDDED, factor, m): w / count for factor in table.factors for m, w in weights.items()}
            yield from table.claim(FALL, f"{about}, mean", mean, name)


def _slope(x: Sequence[float]) -> list[float]:
    """The weights of y in the least-squares slope over log₂ x."""
    logs = [math.log2(each) for each in x]
    centred = [each - fmean(logs) for each in logs]
    total = math.fsum(each * each for each in centred)
    return [each / total for each in centred]


def _best(table: WidthTable) -> Iterator[Claim]:
    factors, sizes = table.factors, table.sizes
    seeds = table.seeds(*(Place(EMBEDDED, f, m) for f in factors for m in sizes)) if factors and sizes else []
    if len(factors) < 2 or len(sizes) < 2 or not seeds:
        return

    def best(factor: float, seed: int) -> float:
        return math.log2(max(sizes, key=lambda m: table.rows[Place(EMBEDDED, factor, m)][seed].accuracy or 0.0))

    bests = {factor: [best(factor, seed) for seed in seeds] for factor in factors}
    for factor, each in bests.items():
        about = f"log₂ of the best M, width {factor:g}×"
        yield Claim(BEST, about, *_interval(each), "doublings", len(seeds))
    slopes = [
        math.fsum(w * m for w, m in zip(_slope(factors), each, strict=True))
        for each in zip(*bests.values(), strict=True)
    ]
    about = "doublings of the best M for every doubling of the width"
    yield Claim(BEST, about, *_interval(slopes), "doublings", len(seeds))


def _price(table: WidthTable) -> Iterator[Claim]:
    """The best of either kind that has at most so many parameters, at the budgets of the largest embedded ensembles."""
    largest = {place: max(row.parameters for row in rows.values()) for place, rows in table.rows.items()}
    for factor in table.factors:
        budget = largest.get(Place(EMBEDDED, factor, table.sizes[-1]), 0) if table.sizes else 0
        within = [place for place, parameters in largest.items() if place.p is None and parameters <= budget]
        best = [
            max((place for place in within if place.method == method), key=lambda p: table.mean(p, "accuracy"), default=None)
            for method in (EMBEDDED, INDEPENDENT)
        ]  # fmt: skip
        if None in best:
            continue
        mine, other = (place for place in best if place is not None)
        sides = [f"{p.factor:g}×, M = {p.members} ({100 * table.mean(p, 'accuracy'):.2f} %)" for p in (mine, other)]
        about = f"at most {budget:,} parameters, embedded {sides[0]} − independent {sides[1]}"
        yield from table.claim(PRICE, about, {mine: 1.0, other: -1.0})


def _transition(table: WidthTable) -> Iterator[Claim]:
    swept = {(place.p, place.gamma): place for place in table.rows if place.p is not None}
    for p in sorted({place.p for place in swept.values() if place.p is not None}):
        if {(p, "M"), (p, "1")} <= swept.keys():
            yield from table.claim(TRANSITION, f"γ = M − γ = 1 at p = {p:g}", {swept[p, "M"]: 1.0, swept[p, "1"]: -1.0})


def origin_of(rows: Sequence[WidthRow]) -> dict[str, str]:
    """Where the rows come from, all of it that differs between them."""
    return {key: "; ".join(dict.fromkeys(row.origin.get(key, "") for row in rows)) for key in ORIGIN}


def claims_text(found: Sequence[Claim], rows: Sequence[WidthRow]) -> str:
    """claims.csv: every number with its interval and where it comes from."""
    lines = [
        claim._asdict() | {key: f"{getattr(claim, key):.6g}" for key in ("value", "lower", "upper")} | origin_of(rows)
        for claim in found
    ]
    return table_text([*Claim._fields, *ORIGIN], lines)


def read_claims(path: Path) -> list[Claim]:
    """What `claims_text` wrote."""
    kinds = dict(zip(Claim._fields, (str, str, float, float, float, str, int), strict=True))
    return [Claim._make(kind(row[key]) for key, kind in kinds.items()) for row in table_rows(path)]
