"""Turns evaluations into numbers with intervals, sentences, figures and pages; does not import bench."""

from dissensus.numerics.extras import require_extra

require_extra("report")
