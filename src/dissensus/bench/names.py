"""Names in settings: lists of them, and the one grammar for those that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def unknown(what: str, name: str, known: Iterable[str], *, shown: Iterable[str] | None = None) -> ValueError:
    """The error for an unknown name, to be raised by the caller; it lists `shown` where all that is known is too much."""
    known = sorted(known)
    lowered = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.0)
    hint = f"; did you mean {lowered[nearest[0]]!r}?" if nearest else ""
    return ValueError(f"expected {what} of {', '.join(known if shown is None else shown)}, got {name!r}{hint}")


def listed(names: str | Sequence[str]) -> list[str]:
    """["a", "b"] of "a,b" or of a list."""
    split = names.split(",") if isinstance(names, str) else names
    if wrong := [name for name in split if not isinstance(name, str)]:
        raise ValueError(f'expected a list of names, got {wrong[0]!r} in it; write ["a", "b"]')
    return [name.strip() for name in split if name.strip()]
