"""The bench: tasks, runs, reports and the command line."""

from dissensus.numerics.extras import require_extra

require_extra("bench")
