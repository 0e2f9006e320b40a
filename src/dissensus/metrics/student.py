"""Student's t distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

MANY = 1000  # degrees of freedom from which it is taken for the normal distribution; its 95 % quantile is 0.12 % larger


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > t) of Student's t with a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    if freedom >= MANY:
        return math.erfc(t / math.sqrt(2))
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


@lru_cache(maxsize=256)  # one level and few numbers of seeds and examples, asked for in every cell of a table
def student_quantile(level: float, freedom: int) -> float:
    """t with P(|T| ≤ t) = level."""
    upper = 1.0
    while student_tail(upper, freedom) > 1 - level:
        upper *= 2
    return last_before(lambda t: student_tail(t, freedom) < 1 - level, upper)


def last_before(reached: Callable[[float], bool], upper: float) -> float:
    """The largest number in 0…upper at which a condition that holds from somewhere on does not hold yet."""
    lower = 0.0
    for _ in range(100):
        middle = (lower + upper) / 2
        if middle in (lower, upper):
            break
        lower, upper = (lower, middle) if reached(middle) else (middle, upper)
    return lower
