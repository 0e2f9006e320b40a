"""What a task over widths set out to see, said from its rows with intervals: shown, not shown, or not to be told.

Every number is a sum over ensembles, seed by seed and test example by test example. Its interval counts seeds (Student's t) and
test examples, as in `spread`; where rows came without their examples, seeds alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dissensus.bench.width.grid import EMBEDDED, INDEPENDENT
from dissensus.bench.width.rows import WidthRow
from dissensus.reporting.spread import spread_of

FOLLOW = "Do wide embedded ensembles follow independent ones?"
FALL = "Does the accuracy of members fall as M/N grows?"
BEST = "Does the best M grow with the width?"
PRICE = "Is there more accuracy for the same parameters?"
TRANSITION = "Which γ is better on the way from independent to equal members?"
# Question -> how the claims begin that answer it, and what is said of one above zero, below, and in neither way
WORDS = {
    FOLLOW: (
        ("embedded", "the same"),
        "above by more than a point",
        "below by more than a point",
        "not to be told to a point",
    ),
    FALL: (("members'",), "no, it grows", "yes", "not to be told"),
    BEST: (("doublings",), "yes", "no, it falls", "not to be told"),
    PRICE: (("at most",), "more", "less", "not to be told"),
    TRANSITION: (("γ",), "γ = M", "γ = 1", "neither"),
}
NEAR = {FOLLOW: 0.01}  # a point of accuracy is as good as equal
# Largest of several: a width and an M that were lucky on these rows are taken for good, of the side with more of them.
NOTES = {
    PRICE: " Width and M of either side are the best on the same test rows, a choice that intervals do not count and that "
    "favours the side with more to choose from."
}
Array = Any  # of numpy


class Claim(NamedTuple):
    """A number with its 95 % interval (NaN where nothing varies), and the question it belongs to."""

    question: str
    about: str
    value: float
    lower: float
    upper: float
    unit: str
    seeds: int  # that it rests on: those with which none of its ensembles diverged

    @property
    def text(self) -> str:
        scale = 100 if self.unit == "points" else 1
        value, lower, upper = (f"{scale * each:+.2f}" for each in (self.value, self.lower, self.upper))
        ends = "no interval, as nothing varies" if math.isnan(self.lower) else f"{lower} … {upper}"
        alone = ", one seed, whose spread is not counted" if self.seeds == 1 else ""
        return f"{value} ({ends}{alone})".replace("-", "−")


class Grid:
    """The rows as arrays over some of their columns."""

    def __init__(self, rows: Sequence[WidthRow]) -> None:
        self.rows = [row for row in rows if row["diverged"] is None]
        main = [row for row in self.rows if row["p"] is None]
        self.factors = sorted({row["factor"] for row in main})
        self.sizes = sorted({row["members"] for row in main if row["method"] == EMBEDDED})
        self.units = {row["factor"]: row["units"] for row in main}
        self.seeds = sorted({row["seed"] for row in rows})
        self.p = sorted({row["p"] for row in self.rows if row["p"] is not None})

    def main(self, name: str) -> Array:
        """(2, F, M, S, n) of embedded and independent ensembles, widths, numbers of members, seeds and test examples."""
        axes = {"method": (EMBEDDED, INDEPENDENT), "factor": self.factors, "members": self.sizes, "seed": self.seeds}
        return self.over(name, p=[None], **axes)[0]

    def swept(self, name: str) -> Array:
        """(2, P, S, n) of γ = M and γ = 1."""
        return self.over(name, gamma=("M", "1"), p=self.p, seed=self.seeds)

    def over(self, name: str, **axes: Sequence[Any]) -> Array:
        """A number over these columns and test examples, where there are any; NaN where there is no row, or it diverged."""
        found = {tuple(row[key] for key in axes): row.get("examples", {}).get(name, row[name]) for row in self.rows}
        tested = max((len(each) for each in found.values() if not isinstance(each, float | int)), default=1)
        values = np.full((*map(len, axes.values()), tested), math.nan)
        for place in np.ndindex(*values.shape[:-1]):
            values[place] = found.get(tuple(axis[i] for axis, i in zip(axes.values(), place, strict=True)), math.nan)
        return values


def means(values: Array) -> Array:
    """Of numbers (…, S, n) over the seeds that have them; NaN where none has."""
    return np.ma.masked_invalid(values).mean((-2, -1)).filled(math.nan)


def estimate(values: Array) -> tuple[float, float, float, int]:
    """(value, lower, upper, seeds) of numbers (S, n), on the seeds that have them."""
    values = values[~np.isnan(values).any(1)]
    seeds, tested = values.shape
    if not seeds:
        return math.nan, math.nan, math.nan, 0
    error = float(values.mean(0).std(ddof=1)) / math.sqrt(tested) if tested > 1 else 0.0
    mean, half = float(values.mean()), spread_of(values.mean(1).tolist(), error, max(tested, 2)).half_width()
    return mean, mean - half, mean + half, seeds


def width_claims(rows: Sequence[WidthRow]) -> list[Claim]:
    """All numbers, question by question; none where no seed has all of its ensembles."""
    claims = []
    for question, about, values in _asked(Grid(rows)):
        value, lower, upper, seeds = estimate(values)
        unit = "doublings" if question == BEST else "points"
        if seeds:
            claims.append(Claim(question, about, value, lower, upper, unit, seeds))
    return claims


def _asked(grid: Grid) -> Iterator[tuple[str, str, Array]]:
    """(question, what about, values (S, n)). Within a width, M/N is M."""
    factors, sizes, wide = grid.factors, grid.sizes, len(grid.factors) > 1
    accuracy, members = grid.main("accuracy"), grid.main("member_accuracy")
    gap = accuracy[0] - accuracy[1]
    several = [i for i, m in enumerate(sizes) if m > 1]
    for i in dict.fromkeys((several[len(several) // 2], several[-1]) if several else ()):
        for factor, each in zip(factors, gap, strict=True):
            yield FOLLOW, f"embedded − independent, M = {sizes[i]}, width {factor:g}×", each[i]
        if wide:
            change = f"the same at {factors[-1]:g}× minus at {factors[0]:g}×, M = {sizes[i]}"
            yield FOLLOW, change, gap[-1, i] - gap[0, i]
    for factor, each in zip(factors, members[0] - members[1], strict=True) if several else ():
        about = f"a member's accuracy, embedded − independent, M = {sizes[-1]}, width {factor:g}×"
        yield FOLLOW, about, each[-1]
    if len(sizes) > 1:
        for name, what in (("member_accuracy", "test"), ("train_member_accuracy", "training")):
            slopes = np.einsum("m,fmsn->fsn", _slope(sizes), grid.main(name)[0])
            about = f"members' {what} accuracy for every doubling of M"
            for factor, each in zip(factors, slopes, strict=True):
                yield FALL, f"{about}, width {factor:g}×", each
            if wide:
                yield FALL, f"{about}, mean", slopes.mean(0)
    if len(sizes) > 1 and wide:
        right = accuracy[0].mean(-1, keepdims=True)  # (F, M, S, 1)
        best = np.where(np.isnan(right).any(1), math.nan, np.log2(sizes)[right.argmax(1)])
        for factor, each in zip(factors, best, strict=True):
            yield BEST, f"log₂ of the best M, width {factor:g}×", each
        about = "doublings of the best M for every doubling of the width"
        yield BEST, about, np.einsum("f,fsn->sn", _slope(factors), best)
    yield from _price(grid, accuracy)
    for p, (summed, averaged) in zip(grid.p, grid.swept("accuracy").swapaxes(0, 1), strict=True):
        yield TRANSITION, f"γ = M − γ = 1 at p = {p:g}", summed - averaged


def _slope(x: Sequence[float]) -> Array:
    """The weights of y in the least-squares slope over log₂ x."""
    centred = np.log2(x) - np.log2(x).mean()
    return centred / (centred**2).sum()


def _price(grid: Grid, accuracy: Array) -> Iterator[tuple[str, str, Array]]:
    """The best of either kind that has at most so many parameters, at the budgets of the largest embedded ensembles."""
    shares, parameters = means(accuracy), means(grid.main("parameters"))  # (2, F, M)
    for budget in parameters[0, :, -1] if grid.sizes else ():
        chosen = np.where((parameters <= budget) & ~np.isnan(shares), shares, -1)
        best = [np.unravel_index(each.argmax(), each.shape) for each in chosen]
        sides = [
            f"{grid.factors[f]:g}×, M = {grid.sizes[m]} ({100 * each[f, m]:.2f} %)"
            for (f, m), each in zip(best, shares, strict=True)
        ]
        about = f"at most {budget:,.0f} parameters, embedded {sides[0]} − independent {sides[1]}"
        if chosen.max((1, 2)).min() >= 0:
            yield PRICE, about, accuracy[0][best[0]] - accuracy[1][best[1]]


def verdicts(found: Sequence[Claim]) -> list[str]:
    """One sentence for each question: whether its numbers show it, at the widest and over all widths."""
    said = []
    for question, (begins, above, below, neither) in WORDS.items():
        answers = [claim for claim in found if claim.question == question and claim.about.startswith(begins)]
        last = {claim.about.partition(", width ")[0]: claim for claim in answers}
        near, shown = NEAR.get(question, 0.0), []
        for claim in last.values():
            word = above if claim.lower > near else below if claim.upper < -near else neither
            word = "equal within a point" if -near < claim.lower and claim.upper < near else word
            shown.append(f"{claim.about}: {word}, {claim.text} {claim.unit}")
        if last:
            said.append(f"{question} {'; '.join(shown)}.{NOTES.get(question, '')}")
    return said
