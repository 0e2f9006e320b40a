"""What settings are chosen by: accuracy on damaged validation rows, never on test rows."""

from __future__ import annotations

from dataclasses import replace

from dissensus.evaluation.corrupted import CorruptedCounts
from dissensus.evaluation.evaluation import Evaluation


def with_choice(evaluation: Evaluation, counts: CorruptedCounts) -> Evaluation:
    """The evaluation with validation/NAME of the clean validation rows and validation/corrupt/NAME of the damaged ones."""
    names = ("accuracy", "nll", "ece")
    clean = dict(zip((f"validation/{name}" for name in names), counts.clean.tolist(), strict=True))
    damaged = {f"validation/{key}": value for key, value in counts.metrics().items()}
    kept = {key: value for key, value in damaged.items() if key.removeprefix("validation/corrupt/") in names}
    return replace(evaluation, metrics=evaluation.metrics | clean | kept)
