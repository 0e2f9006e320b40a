"""Figures: each function takes arrays and returns a matplotlib figure; nothing is saved."""

from dissensus.utils.extras import require_extra

require_extra("plot")
