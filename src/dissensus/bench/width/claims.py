"""The questions of a task over widths, answered by numbers with intervals.

Every number is a sum over ensembles, for each seed and test example. Its interval counts both (`mean_interval`); if rows have
no examples, only seeds. A seed for which one ensemble diverged is left out.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from dissensus.bench.width.grid import Grid, WidthRow
from dissensus.reporting.estimates import Array, Claim, Words, claim_of, slope_weights, verdicts

FOLLOW = "Do wide embedded ensembles follow independent ones?"
FALL = "Does the accuracy of members fall as M/N grows?"
BEST = "Does the best M grow with the width?"
TRANSITION = "Which γ is better on the way from independent to equal members?"
FAR = ("above by more than a point", "below by more than a point", "not to be told to a point")
WORDS = {
    FOLLOW: Words(*FAR, near=0.01, equal="equal within a point"),
    FALL: Words("no, it grows", "yes", "not to be told"),
    BEST: Words("yes", "no, it falls", "not to be told"),
    TRANSITION: Words("γ = M", "γ = 1", "neither"),
}
SPOKEN = ("embedded", "the same", "members'", "doublings", "γ")  # beginnings of the claims that sentences use


def width_claims(rows: Sequence[WidthRow]) -> list[Claim]:
    """All numbers, question by question; empty if no seed has all its ensembles."""
    units = dict.fromkeys(WORDS, "points") | {BEST: "doublings"}
    claims = [claim_of(question, about, values, units[question]) for question, about, values in _asked(Grid(rows))]
    return [claim for claim in claims if claim.seeds]


def width_verdicts(found: Sequence[Claim]) -> list[str]:
    """A sentence for each question, from its numbers at the largest width and over all widths."""
    spoken = [claim for claim in found if claim.about.startswith(SPOKEN)]
    return verdicts(list({claim.about.partition(", width ")[0]: claim for claim in spoken}.values()), WORDS)


def _asked(grid: Grid) -> Iterator[tuple[str, str, Array]]:
    """Yields (question, subject, values (S, n)). Within a width, M/N varies with M."""
    factors, sizes, wide = grid.factors, grid.sizes, len(grid.factors) > 1
    accuracy, members = grid.main("accuracy"), grid.main("member_accuracy")
    gap, apart = accuracy[0] - accuracy[1], members[0] - members[1]  # (F, M, S, n)

    def by_width(question: str, about: str, values: Array) -> Iterator[tuple[str, str, Array]]:
        for factor, each in zip(factors, values, strict=True):
            yield question, f"{about}, width {factor:g}×", each

    several = [i for i, m in enumerate(sizes) if m > 1]
    for i in dict.fromkeys((several[len(several) // 2], several[-1]) if several else ()):
        yield from by_width(FOLLOW, f"embedded − independent, M = {sizes[i]}", gap[:, i])
        if wide:
            change = f"the same at {factors[-1]:g}× minus at {factors[0]:g}×, M = {sizes[i]}"
            yield FOLLOW, change, gap[-1, i] - gap[0, i]
    if several:
        yield from by_width(FOLLOW, f"a member's accuracy, embedded − independent, M = {sizes[-1]}", apart[:, -1])
    if len(sizes) > 1:
        for name, what in (("member_accuracy", "test"), ("train_member_accuracy", "training")):
            slopes = np.einsum("m,fmsn->fsn", slope_weights(sizes), grid.main(name)[0])
            about = f"members' {what} accuracy for every doubling of M"
            yield from by_width(FALL, about, slopes)
            if wide:
                yield FALL, f"{about}, mean", slopes.mean(0)
    if len(sizes) > 1 and wide:
        right = accuracy[0].mean(-1, keepdims=True)  # (F, M, S, 1)
        best = np.where(np.isnan(right).any(1), math.nan, np.log2(sizes)[right.argmax(1)])
        yield from by_width(BEST, "log₂ of the best M", best)
        growth = np.einsum("f,fsn->sn", slope_weights(factors), best)
        yield BEST, "doublings of the best M for every doubling of the width", growth
    for p, (summed, averaged) in zip(grid.p, grid.swept("accuracy").swapaxes(0, 1), strict=True):
        yield TRANSITION, f"γ = M − γ = 1 at p = {p:g}", summed - averaged
