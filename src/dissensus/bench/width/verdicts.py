"""One sentence for each question of a task over widths: whether its numbers show it, and the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from dissensus.bench.width.claims import BEST, FALL, FOLLOW, PRICE, TRANSITION, Claim

NEAR = 0.01  # a point of accuracy: what is as good as equal
CHOSEN = (
    "Width and M of either side are the best on the same test rows, a choice that intervals do not count and that favours "
    "the side with more to choose from."
)


def verdicts(found: Sequence[Claim]) -> list[str]:
    """One sentence for each question: whether the numbers show it."""
    said = []
    for question, judge in (
        (FOLLOW, _followed),
        (FALL, _fallen),
        (BEST, _grown),
        (PRICE, _paid),
        (TRANSITION, _turned),
    ):
        mine = [claim for claim in found if claim.question == question]
        if mine:
            said.append(f"{question} {judge(mine)}")
    return said


def _followed(found: Sequence[Claim]) -> str:
    widest = [claim for claim in found if claim.about.startswith("embedded")]
    last = {claim.about.split(", ")[1]: claim for claim in widest}  # the widest of each M
    said = []
    for members, claim in last.items():
        width = claim.about.rpartition(" ")[2]
        if claim.lower > -NEAR and claim.upper < NEAR:
            word = "yes, within a point"
        elif claim.lower > NEAR or claim.upper < -NEAR:
            word = f"no, more than a point {'above' if claim.value > 0 else 'below'}"
        else:
            word = "not to be told to a point"
        said.append(f"at {width} and {members} {word}: {claim.text} points")
    closer = [claim for claim in found if claim.about.startswith("the same")]
    said += [
        f"with {claim.about.rpartition(', ')[2]} the gap changes by {claim.text} from the narrowest to the widest"
        for claim in closer
    ]
    return f"{'; '.join(said)}."


def _fallen(found: Sequence[Claim]) -> str:
    said = []
    for what in ("test", "training"):
        mine = [claim for claim in found if f"' {what} " in claim.about]
        if not mine:
            continue
        mean, narrow = mine[-1], mine[0]
        word = "yes" if mean.upper < 0 else "no, it grows" if mean.lower > 0 else "not to be told"
        said.append(
            f"on {what} rows {word}: {mean.text} points for every doubling of M, {narrow.text} at the narrowest"
        )
    return f"{'; '.join(said)}."


def _grown(found: Sequence[Claim]) -> str:
    slope = found[-1]
    word = "Yes" if slope.lower > 0 else "No, it falls" if slope.upper < 0 else "Not to be told"
    bests = ", ".join(f"{2**claim.value:.3g}" for claim in found[:-1])
    return f"{word}: by {slope.text} doublings for every doubling of the width; best M, narrowest first: {bests}."


def _paid(found: Sequence[Claim]) -> str:
    won = sum(claim.lower > 0 for claim in found)
    lost = sum(claim.upper < 0 for claim in found)
    first = f"{won} of {len(found)} budgets show more, {lost} less, {len(found) - won - lost} cannot be told"
    said = "; ".join(f"{claim.about}: {claim.text} points" for claim in found)
    # Largest of several: a width and an M that were lucky on these rows are taken for good, of the side with more of them.
    return f"{first}: {said}. {CHOSEN}"


def _turned(found: Sequence[Claim]) -> str:
    def word(claim: Claim) -> str:
        return "γ = M" if claim.lower > 0 else "γ = 1" if claim.upper < 0 else "neither"

    said = [(claim.about.rpartition(" at ")[2], claim) for claim in found]
    return f"{'; '.join(f'at {p} {word(claim)}, {claim.text} points' for p, claim in said)}."
