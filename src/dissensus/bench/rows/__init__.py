"""The rows of tasks: data sets that are split, standardised and batched, and grids on which functions are drawn."""

from dissensus.utils.extras import require_extra

require_extra("bench")
