"""Calibrations of a posterior, and promises about calibrated predictions. Data and arithmetic only, no loaders."""

from dissensus.calibration.class_calibrations import HistogramCalibration, IsotonicCalibration, VectorScaling
from dissensus.calibration.conformal_sets import Conformal
from dissensus.calibration.gate import Gate
from dissensus.calibration.value_calibrations import CumulativeCalibration, DeviationScaling

__all__ = ["Conformal", "CumulativeCalibration", "DeviationScaling", "Gate", "HistogramCalibration"]
__all__ += ["IsotonicCalibration", "VectorScaling"]
