"""Parameters of which some run every time, the others in the slow suite."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def often(chosen: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """For `parametrize` with one name: `chosen` run every time, `rest` where `slow` tests do."""
    return [*chosen, *(pytest.param(each, marks=pytest.mark.slow) for each in rest)]


def thinned(*axes: Sequence[Any], every: int) -> list[Any]:
    """For `parametrize` with a name for each axis: their product, of which those whose places sum to a multiple of `every`
    run every time. Two axes meet in all their pairs where a third one has `every` values."""
    product = itertools.product(*(list(enumerate(axis)) for axis in axes))
    return [
        pytest.param(*(value for _, value in each), marks=pytest.mark.slow if sum(i for i, _ in each) % every else ())
        for each in product
    ]
