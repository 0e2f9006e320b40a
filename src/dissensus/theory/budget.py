"""Memory budgets: a request that cannot be met is refused with its size, before anything is computed."""

from __future__ import annotations

from dissensus.numerics.sizes import readable


def check_budget(needed: int, memory: int, what: str, do: str) -> None:
    """Raises where `needed` bytes are more than `memory`."""
    if needed > memory:
        raise ValueError(
            f"expected {what} within {readable(memory)}, got {readable(needed)}; {do}, or pass memory={needed}"
        )
