"""Fits a task's [calibration] on held-out test rows and saves the result beside the trained posterior."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dissensus.bench.rows.dataset_rows import SetKind, TaskRows
from dissensus.calibration.calibrate import OF_CLASSES, OF_REGRESSIONS, calibrate
from dissensus.calibration.conformal import CLASS_SCORES, INTERVAL_SCORES, conformal
from dissensus.calibration.selective import selective
from dissensus.core.posterior import Posterior
from dissensus.data import Batches
from dissensus.utils.checks import one_of

CALIBRATED = "calibrated"  # folder of the calibrated posterior


def check_calibration(settings: Mapping[str, Any], data: Mapping[str, Any], kind: SetKind) -> None:
    """Raises if [calibration] has nothing to fit, or does not fit this kind of task."""
    if kind == "segmentation":
        raise ValueError("expected rows with one label for [calibration], got masks; set training.temperature = true")
    if not data.get("calibration"):
        raise ValueError("expected rows held out for [calibration], got none; set rows to their number")
    if not settings.keys() & {"method", "level", "risk"}:
        raise ValueError("expected something to fit in [calibration], got none; set method, level or risk")
    regression = kind == "regression"
    if "method" in settings:
        one_of("calibration.method", settings["method"], OF_REGRESSIONS if regression else OF_CLASSES)
    if "score" in settings:
        one_of("calibration.score", settings["score"], INTERVAL_SCORES if regression else CLASS_SCORES)
    if regression and "risk" in settings:
        raise ValueError("expected a classification for calibration.risk, got a regression; leave it out")


def fit_calibration(
    posterior: Posterior, settings: Mapping[str, Any], rows: TaskRows, loader: Callable[[TaskRows], Batches]
) -> None:
    """Calibrates the posterior and fits promises: `conformal` if there is a level, `selective` if there is a risk.

    If both are requested, half of the rows are for the calibration and the others for promises, because rows used for a
    calibration are no longer held out. A temperature from training is fitted again: it may have used all rows.
    """
    own = None if float(posterior.temperature) == 1.0 else "temperature"
    promised, method = settings.keys() & {"level", "risk"}, settings.get("method", own)
    halve = promised and method
    first, second = (rows.select(torch.arange(start, len(rows.y), 2)) if halve else rows for start in (0, 1))
    if method:
        calibrate(posterior, loader(first), method)
    if "level" in settings:
        conformal(posterior, loader(second), level=settings["level"], score=settings.get("score"))
    if "risk" in settings:
        selective(posterior, loader(second), risk=settings["risk"], confidence=settings.get("confidence", 0.95))
