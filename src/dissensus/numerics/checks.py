"""Settings that must be numbers: one error in words where Python's own would be about `<` or `range`."""

from numbers import Integral
from typing import SupportsFloat


def check_whole(keyword: str, value: object) -> None:
    """Raises where a count is no whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"expected {keyword} as a whole number, got {value!r}; pass an int")


def check_number(keyword: str, value: object) -> None:
    """Raises where a setting is no number."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"expected {keyword} as a number, got {value!r}; pass a float")
