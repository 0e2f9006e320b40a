"""A trained run measured before and after a calibration."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dissensus.bench.run.calibrating import check_calibration
from dissensus.bench.run.run import Run
from dissensus.bench.run.same import untrained
from dissensus.evaluation.evaluate import evaluate
from dissensus.evaluation.evaluation import Evaluation
from dissensus.numerics.checks import whole


def calibrate_run(run: Run, asked: Mapping[str, Any], *, rows: float | None = None) -> tuple[Evaluation, Evaluation]:
    """(before, after): a trained run on the test rows that are left, as it is and with these settings of [calibration].

    What is not asked for is as the run has it; `rows`: how many test rows to hold out, or their share. Kept in calibrated/.
    """
    if not run.trained:
        raise untrained(run.folder)
    if rows is not None:
        number = rows if rows < 1 else whole("rows", int(rows))
        run = Run(run.folder, replace(run.config, data=run.config.data | {"calibration": number}), load=run.load)
    settings = run.config.calibration | dict(asked)
    check_calibration(settings, run.config.data, run.kind)
    test = run.loader(run.data.test)
    before = evaluate(run.posterior(), test)
    return before, evaluate(run.calibrate(settings), test)
