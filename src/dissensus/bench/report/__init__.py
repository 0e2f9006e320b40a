"""Turns evaluations into numbers with intervals, sentences, figures and pages."""

from dissensus.utils.extras import require_extra

require_extra("report")
