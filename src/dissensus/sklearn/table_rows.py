"""Rows of a table: checked, weighted, sorted by their contents, and split."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import _check_sample_weight, validate_data

from dissensus.data.splits import split_indices
from dissensus.data.table_encoding import comparable_values, table_columns
from dissensus.utils.extras import require_extra

COPIES = 10  # most copies of a row, on average: more are rows of their own, and higher weights are factors of the loss


def checked_table(estimator: Any, x: Any, *, reset: bool) -> Any:
    """A DataFrame, also for a dict of columns, or an array; column names and number must equal those of the training rows."""
    if isinstance(x, Mapping) and not hasattr(x, "toarray"):  # one kind of sparse matrix is a dict
        require_extra("tables")
        from pandas import DataFrame

        x = DataFrame(dict(zip(*table_columns(x), strict=True)))  # type: ignore[arg-type]
        order = [] if reset else list(getattr(estimator, "feature_names_in_", ()))
        x = x[order] if set(order) == set(x.columns) else x  # a dict's order means nothing
    if hasattr(x, "columns"):
        validate_data(estimator, x, reset=reset, skip_check_array=True)
        return x
    if isinstance(x, list | tuple) and np.asarray(x).dtype.kind in "US":
        x = np.array(x, dtype=object)  # numbers beside text stay numbers
    array = validate_data(estimator, x, reset=reset, dtype=None, ensure_all_finite=False)
    names = getattr(estimator, "feature_names_in_", None)
    return array if reset or names is None else dict(zip(names, array.T, strict=True))


def weighted_rows(table: Any, y: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    """(rows of a weight above 0, these weights, whether the weights are numbers of copies: whole and small)."""
    weights = _check_sample_weight(sample_weight, table if hasattr(table, "shape") else y, ensure_non_negative=True)
    rows = np.flatnonzero(weights)
    if not len(rows):  # older versions of scikit-learn do not look
        raise ValueError("expected a sample weight above 0, got only zeros; leave out the weights to count all rows")
    return rows, weights[rows], bool((weights == weights.round()).all() and weights.sum() <= COPIES * len(rows))


def sort_rows(table: Any, y: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices into `rows`, sorted by the rows' contents, so that training does not depend on their order; group numbers,
    shared by equal rows)."""
    names, columns = table_columns(take_rows(table, rows))
    seen = [comparable_values(name, column) for name, column in zip(names or range(len(columns)), columns, strict=True)]
    parts = np.stack([*seen, *(y.reshape(len(y), -1)[rows].T + 0.0)], 1)
    keys = parts.view(f"V{parts.dtype.itemsize * parts.shape[1]}").ravel()  # a row's bytes
    order = np.argsort(keys, kind="stable")
    return order, np.cumsum(np.r_[False, keys[order][1:] != keys[order][:-1]])


def split_units(groups: np.ndarray) -> np.ndarray:
    """(N,) numbers of rows that stay in one part: one for equal rows, unless there are more than `COPIES` on average."""
    found, numbers = np.unique(groups, return_inverse=True)
    return np.arange(len(groups)) if COPIES * len(found) < len(groups) else numbers


def split_rows(
    groups: np.ndarray, shares: Sequence[float], *, seed: int, labels: np.ndarray | None, least: int
) -> list[np.ndarray]:
    """[training rows, rows of the first share, …], disjoint; shares of fewer than `least` rows are empty; see `split_units`."""
    groups = split_units(groups)
    first = np.unique(groups, return_index=True)[1]
    left, parts = np.arange(len(first)), []
    for place, part in enumerate(shares):
        held = round(part * len(first))
        parts.append(left[:0])
        if part and held >= least and held < len(left):
            strata = None if labels is None else torch.from_numpy(labels[first[left]])
            kept, taken = split_indices(len(left), validation=held, seed=seed + place, labels=strata)
            left, parts[-1] = left[kept.numpy()], left[taken.numpy()]
    return [np.flatnonzero(np.isin(groups, part)) for part in (left, *parts)]


def take_rows(table: Any, rows: np.ndarray) -> Any:
    """Rows of a DataFrame, a dict of columns or an array."""
    if hasattr(table, "iloc"):
        return table.iloc[rows]
    return {name: column[rows] for name, column in table.items()} if isinstance(table, dict) else table[rows]
