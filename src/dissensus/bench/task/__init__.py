"""Tasks: TOML files and their allowed contents."""

from dissensus.utils.extras import require_extra

require_extra("bench")
