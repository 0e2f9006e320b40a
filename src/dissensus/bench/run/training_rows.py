"""What a run says about the rows it was trained on, where a task asks for it: evaluation.train_rows."""

from __future__ import annotations

from dataclasses import replace

from dissensus.evaluate import numbers_of
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.predictions import Predictions

KEPT = ("accuracy", "nll", "rmse", "members/accuracy", "members/nll")


def with_training_rows(evaluation: Evaluation, said: Predictions) -> Evaluation:
    """The evaluation with train/NAME of the training rows: accuracy or RMSE, NLL, and the members' own."""
    part = numbers_of(said)
    found = part.metrics(said) | part.members(said)
    return replace(
        evaluation, metrics=evaluation.metrics | {f"train/{key}": found[key] for key in KEPT if key in found}
    )
