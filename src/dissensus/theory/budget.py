"""Memory budgets: a request that cannot be met is refused with its size, before anything is computed."""

from __future__ import annotations


def check_budget(needed: int, memory: int, what: str, do: str) -> None:
    """Raises where `needed` bytes are more than `memory`."""
    if needed > memory:
        raise ValueError(
            f"expected {what} within {readable(memory)}, got {readable(needed)}; {do}, or pass memory={needed}"
        )


def readable(size: int) -> str:
    """A number of bytes as people say it."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.3g} {unit}"
    return f"{size} bytes"
