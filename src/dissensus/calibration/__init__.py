"""Calibrations of a posterior, and promises about calibrated predictions; a file's are found once this is imported."""

from dissensus.calibration import calibrations as calibrations, conformal as conformal, selective as selective
