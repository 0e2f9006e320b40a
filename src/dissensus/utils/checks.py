"""Checks of settings: each function returns a valid value, or raises an error "expected …, got …; do …".

`hint`: what to pass instead, at the end of the error about a value out of bounds.
"""

import difflib
import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any, SupportsFloat, TypeVar

Value = TypeVar("Value")


def integer(name: str, value: Any, *, least: int = 1, hint: str = "") -> int:
    """The value, an integer of at least `least`; booleans are refused."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"expected {name} as a whole number, got {value!r}; pass an int")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}; {hint or 'pass a larger number'}")
    return int(value)


def number(
    name: str,
    value: Value,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    hint: str = "",
) -> Value:
    """The value, unchanged: a finite number with above < value < below and least ≤ value ≤ most."""
    several = getattr(value, "ndim", 0)  # for a tensor, an array or a Series
    if several or not isinstance(value, SupportsFloat) or isinstance(value, (bool, str)):
        got = f"{type(value).__name__} of shape {tuple(value.shape)}" if several else repr(value)  # type: ignore[attr-defined]
        raise TypeError(f"expected {name} as a number, got {got}; pass a float")
    found = float(value)
    if not (math.isfinite(found) and above < found < below and least <= found <= most):
        limits = {"above": above, "of at least": least, "below": below, "of at most": most}
        bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit))
        wanted = bounds or "as a finite number"
        raise ValueError(f"expected {name} {wanted}, got {value!r}; {hint or 'pass a number within these bounds'}")
    return value


def fraction(name: str, value: Value, *, hint: str = "") -> Value:
    """The value, a number strictly between 0 and 1."""
    return number(name, value, above=0, below=1, hint=hint)


def one_of(
    name: str, value: Value, known: Iterable[Any], *, shown: Iterable[Any] | None = None, hint: str = ""
) -> Value:
    """The value, one of `known`. The error lists these, or only those in `shown`, and suggests the nearest one."""
    names = list(known)
    if not any(value is each or (type(value) is type(each) and value == each) for each in names):
        lowered = {str(each).lower(): each for each in reversed(names)}
        text = str(value).lower() if isinstance(value, str) else ""
        nearest = difflib.get_close_matches(text, lowered, n=1, cutoff=0.6)
        advice = hint or (f"did you mean {lowered[nearest[0]]!r}?" if nearest else "name one of them")
        listed = ", ".join(map(str, names if shown is None else shown))
        raise ValueError(f"expected {name} of {listed}, got {value!r}; {advice}")
    return value


def first_names(names: Iterable[Any], most: int = 8) -> str:
    """The names, separated by commas; if there are more than `most`, the first ones and the number of the others."""
    found = [str(name) for name in names]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
