"""Student's t distribution."""

import math
from collections.abc import Callable
from functools import lru_cache

MANY = (
    1000  # from so many degrees of freedom the normal distribution is used; at 1000, t's 95 % quantile is 0.12 % larger
)


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > t) for Student's t with `freedom` degrees of freedom."""
    from scipy.special import stdtr  # loaded only when intervals are computed

    return 2 * float(stdtr(freedom if freedom < MANY else math.inf, -t))


@lru_cache(maxsize=256)  # every cell of a table asks for the same few values
def student_quantile(level: float, freedom: int) -> float:
    """The quantile t with P(|T| ≤ t) = level."""
    from scipy.special import ndtri, stdtrit

    tail = (1 - level) / 2
    return -float(stdtrit(freedom, tail) if freedom < MANY else ndtri(tail))


def last_before(reached: Callable[[float], bool], upper: float) -> float:
    """The largest number in 0…upper at which a monotone condition does not hold yet."""
    lower = 0.0
    for _ in range(100):
        middle = (lower + upper) / 2
        if middle in (lower, upper):
            break
        lower, upper = (lower, middle) if reached(middle) else (middle, upper)
    return lower
