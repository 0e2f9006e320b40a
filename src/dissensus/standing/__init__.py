"""Calibrations of a posterior, and promises about calibrated predictions. Data and arithmetic only, no loaders."""

from dissensus.standing.classes import HistogramCalibration, IsotonicCalibration, VectorScaling
from dissensus.standing.conformal import Conformal
from dissensus.standing.gate import Gate
from dissensus.standing.values import CumulativeCalibration, DeviationScaling

__all__ = [
    "Conformal",
    "CumulativeCalibration",
    "DeviationScaling",
    "Gate",
    "HistogramCalibration",
    "IsotonicCalibration",
    "VectorScaling",
]
