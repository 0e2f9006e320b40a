"""Lists of names in settings."""

from collections.abc import Sequence


def name_list(names: str | Sequence[str]) -> list[str]:
    """["a", "b"] of "a,b" or of a list."""
    split = names.split(",") if isinstance(names, str) else names
    if wrong := [name for name in split if not isinstance(name, str)]:
        raise ValueError(f'expected a list of names, got {wrong[0]!r} in it; write ["a", "b"]')
    return [name.strip() for name in split if name.strip()]
