"""Looks: which epochs validation may keep, and what it judges there."""

from collections.abc import Iterable
from typing import Any

from dissensus.core.functions import DrawnFunctions
from dissensus.core.posterior import Posterior, left_as_found
from dissensus.methods.parts.recording import RecordingPosterior
from dissensus.methods.parts.trajectory import evenly_spaced

LOOKS = 10  # at most, at what would be sampled: a look costs a draw


def looks(posterior: Posterior, epoch: int, epochs: int) -> bool:
    """Whether the state after this epoch, counted from 0, may be the one that validation keeps.

    Where functions are drawn for it, at most ten epochs of the last quarter, evenly spaced, the last one among them.
    """
    first, every = evenly_spaced(epochs, LOOKS) if posterior.judged_by == "draw" else (0, 1)
    return posterior.ready and epoch >= first and (epoch - first) % every == 0


def look(posterior: Posterior, epoch: int, epochs: int, validation: Iterable[Any]) -> DrawnFunctions | None:
    """The functions that are drawn to judge this epoch; None where it is judged by those in training, or not at all."""
    if isinstance(posterior, RecordingPosterior) and posterior.judged_by == "draw" and looks(posterior, epoch, epochs):
        with left_as_found(posterior):
            return posterior.look(validation)
    return None
