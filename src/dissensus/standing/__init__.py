"""What can stand on a posterior: calibrations, and promises about calibrated predictions. Data and arithmetic, no loaders."""

from dissensus.core.standing import Fitted
from dissensus.standing.classes import HistogramCalibration, IsotonicCalibration, VectorScaling
from dissensus.standing.values import CumulativeCalibration, DeviationScaling

KINDS: dict[str, type[Fitted]] = {  # by the name that files have for it
    each.kind: each
    for each in (VectorScaling, IsotonicCalibration, HistogramCalibration, DeviationScaling, CumulativeCalibration)
}
