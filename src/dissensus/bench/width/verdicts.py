"""One sentence for each question of a task over widths: whether its numbers show it, and the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dissensus.bench.width.claims import BEST, FALL, FOLLOW, PRICE, TRANSITION, Claim

NEAR = 0.01  # a point of accuracy: what is as good as equal


def verdicts(found: Sequence[Claim]) -> list[str]:
    """One sentence for each question: whether the numbers show it."""
    by_question = {question: [claim for claim in found if claim.question == question] for question in JUDGES}
    return [f"{question} {JUDGES[question](mine)}" for question, mine in by_question.items() if mine]


def _word(claim: Claim, above: str, below: str, otherwise: str = "not to be told") -> str:
    return above if claim.lower > 0 else below if claim.upper < 0 else otherwise


def _followed(found: Sequence[Claim]) -> str:
    widest = [claim for claim in found if claim.about.startswith("embedded")]
    last = {claim.about.split(", ")[1]: claim for claim in widest}  # the widest of each M
    said = []
    for members, claim in last.items():
        word = "not to be told to a point"
        if claim.lower > -NEAR and claim.upper < NEAR:
            word = "yes, within a point"
        elif claim.lower > NEAR or claim.upper < -NEAR:
            word = f"no, more than a point {'above' if claim.value > 0 else 'below'}"
        said.append(f"at {claim.about.rpartition(' ')[2]} and {members} {word}: {claim.text} points")
    said += [
        f"with {claim.about.rpartition(', ')[2]} the gap changes by {claim.text} from the narrowest to the widest"
        for claim in found
        if claim.about.startswith("the same")
    ]
    return f"{'; '.join(said)}."


def _fallen(found: Sequence[Claim]) -> str:
    said = []
    for what in ("test", "training"):
        if mine := [claim for claim in found if f"' {what} " in claim.about]:
            word, ends = _word(mine[-1], "no, it grows", "yes"), f"{mine[0].text} at the narrowest"
            said.append(f"on {what} rows {word}: {mine[-1].text} points for every doubling of M, {ends}")
    return f"{'; '.join(said)}."


def _grown(found: Sequence[Claim]) -> str:
    *each, slope = found
    word = _word(slope, "Yes", "No, it falls", "Not to be told")
    bests = ", ".join(f"{2**claim.value:.3g}" for claim in each)
    return f"{word}: by {slope.text} doublings for every doubling of the width; best M, narrowest first: {bests}."


def _paid(found: Sequence[Claim]) -> str:
    won, lost = sum(claim.lower > 0 for claim in found), sum(claim.upper < 0 for claim in found)
    first = f"{won} of {len(found)} budgets show more, {lost} less, {len(found) - won - lost} cannot be told"
    said = "; ".join(f"{claim.about}: {claim.text} points" for claim in found)
    # Largest of several: a width and an M that were lucky on these rows are taken for good, of the side with more of them.
    return (
        f"{first}: {said}. Width and M of either side are the best on the same test rows, a choice that intervals do not "
        "count and that favours the side with more to choose from."
    )


def _turned(found: Sequence[Claim]) -> str:
    said = [
        f"at {claim.about.rpartition(' at ')[2]} {_word(claim, 'γ = M', 'γ = 1', 'neither')}, {claim.text} points"
        for claim in found
    ]
    return f"{'; '.join(said)}."


JUDGES: dict[str, Callable[[Sequence[Claim]], str]] = {
    FOLLOW: _followed,
    FALL: _fallen,
    BEST: _grown,
    PRICE: _paid,
    TRANSITION: _turned,
}
