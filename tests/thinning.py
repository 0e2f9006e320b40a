"""Parameters of which some run every time, the others in the slow suite."""

from collections.abc import Iterable
from typing import Any

import pytest


def often(chosen: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """For `parametrize` with one name: `chosen` run every time, `rest` where `slow` tests do."""
    return [*chosen, *(pytest.param(each, marks=pytest.mark.slow) for each in rest)]
