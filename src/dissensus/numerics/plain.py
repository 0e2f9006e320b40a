"""Settings as JSON has them: NumPy's numbers become Python's."""

import json
from typing import Any

import numpy as np


def plain(settings: Any) -> Any:
    """The settings with what a file will say of them: lists for tuples, Python's numbers for NumPy's."""
    return json.loads(json.dumps(settings, default=_number))


def _number(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"expected settings of words, numbers and lists, got {value!r}, which is not JSON serializable; pass plain ones, or "
        "let config() give them"
    )
