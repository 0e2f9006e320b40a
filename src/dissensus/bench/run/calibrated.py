"""What a method gives at its own best temperature, found on test rows that are held out and not tested on."""

from __future__ import annotations

from dataclasses import replace

from dissensus.evaluate import numbers_of
from dissensus.evaluation.evaluation import Evaluation
from dissensus.evaluation.predictions import Predictions
from dissensus.temperature import best_temperature

CALIBRATION = "calibration"  # the split of held-out test rows
KEPT = ("nll", "confidence", "correct", "squared_error")  # arrays of test/… that intervals are made of


def with_calibration(evaluation: Evaluation, test: Predictions, held: Predictions) -> Evaluation:
    """The evaluation with calibration/nll of the held-out rows and calibrated/NAME of the test rows, both tempered.

    `calibration/nll` is at the posterior's own temperature, `calibration/nll_scaled` at the best one, which is
    `calibrated/temperature`. What is fitted by the held-out rows is that one number.
    """
    part = numbers_of(test)
    own = evaluation.metrics.get("temperature", 1.0)  # in both predictives; looked for is the best one beside 1
    temperature = best_temperature(held.predictive.tempered(1 / own), held.targets)
    scaled, scaled_held = (replace(p, predictive=p.predictive.tempered(temperature / own)) for p in (test, held))
    found = {f"calibrated/{key}": value for key, value in part.metrics(scaled).items()}
    found["calibrated/temperature"] = temperature
    for name, rows in (("nll", held), ("nll_scaled", scaled_held)):
        found[f"calibration/{name}"] = -float(rows.predictive.log_prob(rows.targets).double().mean())
    arrays = {key.removeprefix("test/"): value for key, value in part.arrays(scaled).items()}
    kept = {f"calibrated/{name}": arrays[name] for name in KEPT if name in arrays}
    return replace(evaluation, metrics=evaluation.metrics | found, arrays=evaluation.arrays | kept)
