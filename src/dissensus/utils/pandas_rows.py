"""Rows as a pandas DataFrame; pandas is imported only here, when needed."""

from collections.abc import Mapping, Sequence
from typing import Any


def as_dataframe(rows: Sequence[Mapping[str, Any]], *, index: str | None = None) -> Any:
    """A pandas.DataFrame with a row for each mapping; `index`: the column used as index."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("expected pandas for a DataFrame, got none; install it: pip install pandas") from error
    found = pandas.DataFrame.from_records(list(rows))
    return found if index is None else found.set_index(index)
