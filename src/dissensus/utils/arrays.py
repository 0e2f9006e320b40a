"""Arrays, Series and DataFrames as tensors; pandas objects are recognised by their methods, without importing pandas."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.utils.extras import require_extra

_CODES = "expected numbers, got {}; encode the table with ds.data.TableEncoder, or train with ds.sklearn"


def is_array(value: object) -> bool:
    """Whether a value is a tensor, an array, a Series or a DataFrame."""
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def as_array(values: Any) -> np.ndarray:
    """Values as a NumPy array on the host."""
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)


def as_tensor(values: Any, dtype: torch.dtype | None = None) -> Any:
    """An array, Series or DataFrame as a tensor (real numbers in `dtype` or torch's default); other values unchanged."""
    if isinstance(values, Tensor) or not is_array(values):
        return values
    table = hasattr(values, "columns")
    array = values.to_numpy() if hasattr(values, "to_numpy") else values.__array__()
    if array.dtype.kind == "O":  # columns of several types, or pandas numbers with missing values
        found = [math.nan if value is None or type(value).__name__ == "NAType" else value for value in array.flat]
        if kinds := {type(value).__name__ for value in found if not hasattr(value, "__float__")}:
            raise TypeError(_CODES.format(f"{', '.join(sorted(kinds))} in {_describe_source(values)}"))
        array = np.array([float(value) for value in found]).reshape(array.shape)
    if array.dtype.kind not in "biuf":
        raise TypeError(_CODES.format(f"{array.dtype} in {_describe_source(values)}"))
    kept = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    if not (table or array.dtype.kind == "f"):
        return kept
    rounded = kept.to(dtype or torch.get_default_dtype())
    _check_rounding(kept, rounded)
    return rounded


def tensor_of(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """As `as_tensor`, but raises for values that cannot become a tensor."""
    found = as_tensor(values, dtype)
    if not isinstance(found, Tensor):
        raise TypeError(f"expected a tensor, array or DataFrame, got {type(values).__name__}; use torch.as_tensor")
    return found


def _check_rounding(kept: Tensor, rounded: Tensor) -> None:
    """Raises if rounding moves a value by more than a thousandth of its column's range."""
    if kept.dtype == rounded.dtype or not kept.numel() or not kept.ndim:
        return
    exact = kept.double().flatten(1) if kept.ndim > 1 else kept.double()[:, None]  # (N, D)
    low, high = exact.amin(0), exact.amax(0)
    moved = (rounded.double().reshape(exact.shape) - exact).abs().amax(0)
    lost = (moved > 1e-3 * (high - low)) & (high > low)  # NaN is checked when batches are read
    if lost.any():
        at = int(lost.nonzero()[0])
        got = f"{float(low[at]):g} to {float(high[at]):g} in column {at}"
        hint = "standardise them, with ds.data.Standardiser or TableEncoder"
        raise ValueError(f"expected numbers that {rounded.dtype} can tell apart, got {got}; {hint}")


def _describe_source(values: Any) -> str:
    """The type that holds the values, with the first offending column of a DataFrame."""
    columns = getattr(values, "columns", ())
    names = [str(name) for name in columns if getattr(values[name].dtype, "kind", "f") not in "biuf"]
    return f"column '{names[0]}' of a {type(values).__name__}" if names else f"a {type(values).__name__}"


def as_dataframe(rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], *, index: str | None = None) -> Any:
    """A pandas.DataFrame with a row for each mapping, or of columns by name; `index`: the column used as index."""
    require_extra("tables")
    import pandas

    found = pandas.DataFrame(rows)
    return found if index is None else found.set_index(index)
