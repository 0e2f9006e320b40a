"""Settings that must be numbers: one error in words where Python's own would be about `<` or `range`."""

import math
from numbers import Integral, Real
from typing import SupportsFloat, TypeGuard


def check_whole(keyword: str, value: object) -> None:
    """Raises where a count is no whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"expected {keyword} as a whole number, got {value!r}; pass an int")


def check_number(keyword: str, value: object) -> None:
    """Raises where a setting is no number."""
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        raise TypeError(f"expected {keyword} as a number, got {value!r}; pass a float")


def is_finite(value: object) -> TypeGuard[float]:
    """Whether this is a finite number, which True is not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
