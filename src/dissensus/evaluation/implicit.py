"""Implicit corruptions: the changes of test inputs that equal a drawn function's deviation, in numbers and pictures."""

from torch import Tensor

from dissensus.attacks import implicit_corruptions
from dissensus.core.posterior import Posterior
from dissensus.data.standardise import Standardiser

FUNCTIONS, STEPS = 5, 60  # functions to search changes for, and steps of the search
PICTURES = 3  # inputs shown with their changes


def implicit_changes(
    posterior: Posterior, x: Tensor, standardiser: Standardiser, *, penalty: float
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, arrays) of the implicit corruptions of standardised inputs x; empty for a single function.

    implicit/distance: root mean square change per input value, in units before standardisation. implicit/explained: share
    of the functions' deviation from their mean. Arrays hold both for every input (B,), and images to draw.
    """
    found = implicit_corruptions(posterior, x, penalty=penalty, functions=FUNCTIONS, steps=STEPS)
    if len(found.functions) == 1:
        return {}, {}
    before, after = standardiser.inverse(x), standardiser.inverse(found.inputs.cpu())  # (B, ...), (S, B, ...)
    moved = (after - before).flatten(2).square().mean(2).sqrt()  # (S, B)
    examples = {"distance": moved.mean(0), "explained": found.explained.mean(0).cpu()}  # (B,)
    drawn = {"original": before[:PICTURES], "inputs": after[:, :PICTURES].movedim(0, 1)}  # (n, ...), (n, S, ...)
    return (
        {f"implicit/{key}": float(value.mean()) for key, value in examples.items()},
        {f"implicit/{key}": value.contiguous() for key, value in (examples | drawn).items()},
    )
