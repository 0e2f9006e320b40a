"""Calibrations of a posterior, and promises about calibrated predictions. Data and arithmetic only, no loaders."""

from dissensus.core.standing import Fitted
from dissensus.standing.classes import HistogramCalibration, IsotonicCalibration, VectorScaling
from dissensus.standing.conformal import Conformal
from dissensus.standing.gate import Gate
from dissensus.standing.values import CumulativeCalibration, DeviationScaling

CALIBRATIONS = (VectorScaling, IsotonicCalibration, HistogramCalibration, DeviationScaling, CumulativeCalibration)
KINDS: dict[str, type[Fitted]] = {
    each.kind: each for each in (*CALIBRATIONS, Conformal, Gate)
}  # by their names in files
