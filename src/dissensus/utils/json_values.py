"""Settings as JSON values: NumPy numbers become Python numbers."""

import json
from typing import Any

import numpy as np


def to_json_values(settings: Any) -> Any:
    """The settings as they will be in a file: lists for tuples, Python numbers for NumPy's."""
    return json.loads(json.dumps(settings, default=_plain_number))


def _plain_number(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected settings of text, numbers and lists, got {value!r}, not JSON serializable; use those")
