"""Looks: the epochs that validation may keep, and the functions it evaluates there."""

from collections.abc import Iterable
from typing import Any

from dissensus.core.functions import DrawnFunctions
from dissensus.core.posterior import Posterior, left_as_found
from dissensus.methods.parts.recording import RecordingPosterior
from dissensus.methods.parts.trajectory import evenly_spaced

LOOKS = 10  # most looks in a run: a look costs a draw


def looks(posterior: Posterior, epoch: int, epochs: int) -> bool:
    """Whether validation may keep the state after this epoch, counted from 0.

    No epoch of a trajectory; if functions are drawn, up to ten evenly spaced ones of the last quarter, including the last.
    """
    first, every = evenly_spaced(epochs, LOOKS) if posterior.judged_by == "draw" else (0, 1)
    return posterior.judged_by is not None and posterior.ready and epoch >= first and (epoch - first) % every == 0


def look(posterior: Posterior, epoch: int, epochs: int, validation: Iterable[Any]) -> DrawnFunctions | None:
    """The functions drawn to evaluate this epoch; None if the networks in training are evaluated, or nothing is."""
    if isinstance(posterior, RecordingPosterior) and posterior.judged_by == "draw" and looks(posterior, epoch, epochs):
        with left_as_found(posterior):
            return posterior.look(validation)
    return None
