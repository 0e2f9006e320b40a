"""Runs: train, predict and measure one method with one seed, or all methods and seeds of a task."""

from dissensus.utils.extras import require_extra

require_extra("bench")
