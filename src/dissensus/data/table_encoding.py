"""Encodes tables as tensors: DataFrames, dicts of columns and arrays, with numbers, dates, categories and missing values."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.utils.arrays import as_array
from dissensus.utils.checks import first_names, integer

log = logging.getLogger("dissensus")

Name = str | int
Level = str | int | float | bool
NUMERIC = re.compile(r"\s*[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?\s*")  # text that reads as a number


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers or dates (in seconds): z = (x − mean) / std; missing values become 0."""

    name: Name
    mean: float
    std: float  # population deviation; 0 for a constant column, whose z is always 0
    missing: bool  # whether values are missing in training rows: a second feature then marks the rows without a value

    @staticmethod
    def of(name: Name, values: np.ndarray) -> NumberColumn:
        known = np.sort(values[~np.isnan(values)])  # sorted, so that sums do not depend on the order of rows
        if len(known) == 0:
            return NumberColumn(name, 0.0, 0.0, missing=True)
        centred = known - known[0]  # large numbers such as timestamps would lose digits
        size = float(np.abs(centred).max()) or 1.0  # squares would overflow
        deviation = float((centred / size).std() * size) if known.max() > known.min() else 0.0
        return NumberColumn(name, float(known[0] + (centred / size).mean() * size), deviation, len(known) < len(values))

    @property
    def features(self) -> list[str]:
        return [str(self.name), *([f"{self.name} missing"] if self.missing else [])]

    def scale(self, values: Tensor) -> Tensor:
        """(N, features) of numbers (N,) in float64; missing ones are NaN."""
        missing = values.isnan()
        scaled = (values - self.mean) / self.std if self.std else torch.zeros_like(values)
        marks = [missing.to(values.dtype)] if self.missing else []
        return torch.stack([torch.where(missing, 0.0, scaled), *marks], 1)

    def encode(self, column: Any) -> tuple[Tensor, str]:
        """(N, features), and a remark on what training rows did not have."""
        values = torch.tensor(_numbers(self.name, column))
        unknown = 0 if self.missing else int(values.isnan().sum())
        return self.scale(values), f"{unknown} missing, taken as the mean {self.mean:g}" if unknown else ""


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: one feature per level; a level absent from the training rows is 0 in all features."""

    name: Name
    levels: tuple[Level, ...]
    other: bool  # whether rare levels share one feature; unknown levels then use it too
    missing: bool  # whether values are missing in training rows; missing is then a level

    @staticmethod
    def of(name: Name, column: Any, most: int) -> CategoryColumn:
        values = _levels(column)
        known = [value for value in values if value is not None]
        counts = Counter(known)
        if len(counts) > max(20, len(known) / 2) and sum(len(str(value).split()) for value in known) >= 4 * len(known):
            got = f"free text such as {str(known[0])[:30]!r}; leave it out, or encode it as numbers"
            raise ValueError(f"expected numbers or categories in column {name!r}, got {got}")
        named = sorted(counts, key=_rank)  # ties in frequency do not depend on the order of rows
        levels = tuple(sorted(sorted(named, key=lambda level: -counts[level])[:most], key=_rank))
        return CategoryColumn(name, levels, len(counts) > len(levels), len(known) < len(values))

    @property
    def features(self) -> list[str]:
        extra = [word for word, there in (("other", self.other), ("missing", self.missing)) if there]
        return [*(f"{self.name}={level}" for level in self.levels), *(f"{self.name} {word}" for word in extra)]

    def encode(self, column: Any) -> tuple[Tensor, str]:
        """(N, features), and a remark on what training rows did not have."""
        place = {level: index for index, level in enumerate(self.levels)}
        nowhere = len(self.features)
        other = len(place) if self.other else nowhere
        missing = nowhere - 1 if self.missing else other
        values = _levels(column)
        where = [missing if v is None else place.get(v, other) for v in values]
        new = [value for value, at in zip(values, where, strict=True) if at == nowhere]
        hot = torch.eye(nowhere + 1, dtype=torch.float64)[where, :nowhere]  # the last row, of unknown levels, is 0
        shown = ", ".join(dict.fromkeys("missing" if value is None else repr(value) for value in new[:3]))
        return hot, f"{len(new)} of levels absent from the training rows ({shown})" if new else ""


@dataclass(frozen=True)
class TableEncoder:
    """Encodes the rows of a table as a tensor, with statistics of the training rows only.

    `TableEncoder.of(table)` builds one from training rows; `encoder(table)` encodes; `of_config` reads `.config()`, plain JSON.

    Numbers are standardised in float64 and rounded once. Dates are converted to seconds. A missing number becomes the mean,
    and a second feature marks the rows without a value. Categories (text, pandas categories, and the columns in
    `categories`) have one feature per level; missing is a level. Constant columns become 0.
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]
    named: bool  # whether columns are found by name; columns of arrays are found by position

    @staticmethod
    def of(table: Any, *, categories: Iterable[Name] = (), most_levels: int = 64) -> TableEncoder:
        """Builds the encoder from training rows.

        Args:
            table: a DataFrame, a dict of columns, or an array (N, D).
            categories: columns whose numbers are codes of categories, by name; by position for an array.
            most_levels: how many levels of a category get their own feature, the most frequent first; the others share one.
        """
        integer("most_levels", most_levels)
        names, columns = table_columns(table)
        named, declared = names is not None, set(categories)
        given = dict(zip(names or range(len(columns)), columns, strict=True))
        if unknown := declared - set(given):
            got = first_names(unknown)
            raise ValueError(f"expected categories among the columns {first_names(given)}, got {got}; correct them")
        made: list[NumberColumn | CategoryColumn] = []
        for name, column in given.items():
            if name in declared or _is_category(column):
                made.append(category := CategoryColumn.of(name, column, most_levels))
                text = [level for level in category.levels if isinstance(level, str) and NUMERIC.fullmatch(level)]
                if 2 * len(text) > len(category.levels) and name not in declared and str(column.dtype) != "category":
                    why = "%s is treated as categories, though its text looks like numbers (%r): convert it, or name it"
                    log.warning(f"{why} in categories", name, text[0])
            else:
                made.append(NumberColumn.of(name, _numbers(name, column)))
        if not made or not len(columns[0]):
            raise ValueError(f"expected rows and columns, got {_shape_text(columns)}; pass the training rows")
        return TableEncoder(tuple(made), named)

    @property
    def features(self) -> list[str]:
        """Names of the tensor's columns."""
        return [feature for column in self.columns for feature in column.features]

    def __call__(self, table: Any, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The encoded rows (N, features); logs missing values and levels that the training rows did not have."""
        names, columns = table_columns(table)
        if self.named and names is None:
            wanted = first_names(column.name for column in self.columns)
            raise ValueError(f"expected the columns {wanted} by name, got an array; pass a DataFrame or a dict")
        if not self.named and len(columns) != len(self.columns):
            raise ValueError(f"expected {len(self.columns)} columns, got {len(columns)}; pass those of training")
        given = dict(zip(names if self.named and names else range(len(columns)), columns, strict=True))
        if absent := [column.name for column in self.columns if column.name not in given]:
            got = first_names(given)
            raise ValueError(f"expected the columns {first_names(absent)}, got {got}; pass those of the training rows")
        parts, remarks = [], []
        for column in self.columns:
            part, remark = column.encode(given[column.name])
            parts.append(part)
            remarks += [f"{column.name}: {remark}"] if remark else []
        if remarks:
            log.warning("the table has values that the training rows did not have: %s", "; ".join(remarks))
        encoded = torch.cat(parts, 1).to(dtype)
        if not encoded.isfinite().all():
            at = int((~encoded.isfinite()).any(0).nonzero()[0])
            raise ValueError(f"expected numbers within {dtype}, got larger ones in {self.features[at]}; correct them")
        return encoded

    def config(self) -> dict[str, Any]:
        """The encoder as plain JSON."""
        kinds = {NumberColumn: "number", CategoryColumn: "category"}
        columns = [{"kind": kinds[type(column)], **asdict(column)} for column in self.columns]
        listed = [{k: list(v) if isinstance(v, tuple) else v for k, v in each.items()} for each in columns]
        return {"named": self.named, "columns": listed}

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> TableEncoder:
        """The encoder that `config` describes."""
        kinds = {"number": NumberColumn, "category": CategoryColumn}
        rows = [{k: tuple(v) if isinstance(v, list) else v for k, v in each.items()} for each in config["columns"]]
        return TableEncoder(tuple(kinds[str(each.pop("kind"))](**each) for each in rows), bool(config["named"]))


def table_columns(table: Any) -> tuple[list[Name] | None, list[Any]]:
    """(column names, columns of one length) of a DataFrame, a dict of columns or an array (N, D); an array's names are None."""
    names: list[Name] | None
    if isinstance(table, Mapping) or hasattr(table, "columns"):
        names = list(table if isinstance(table, Mapping) else table.columns)
        if len(set(names)) < len(names):
            raise ValueError(f"expected every column name once, got {first_names(names)}; rename the columns")
        columns = [table[name] for name in names]
        names = [name if isinstance(name, str | int) else str(name) for name in names]
    else:
        if hasattr(table, "toarray"):
            raise TypeError("expected a dense table, got a sparse matrix; pass x.toarray()")
        matrix = as_array(table)
        if matrix.ndim != 2:
            got = f"{type(table).__name__} of shape {matrix.shape}"
            fix = "pass one row as table[None] or frame.iloc[[0]], one column as table[:, None] or series.to_frame()"
            raise ValueError(f"expected a table of shape (N, D), got {got}; {fix}")
        names, columns = None, list(matrix.T)
    columns = [_listed_column(name, each) for name, each in zip(names or range(len(columns)), columns, strict=True)]
    if len({len(column) for column in columns}) > 1 or any(np.ndim(column) != 1 for column in columns):
        raise ValueError(f"expected columns of one length, got {_shape_text(columns)}; pass one value per row")
    return names, columns


def _listed_column(name: Name, values: Any) -> Any:
    """A column given as a list. Its values stay objects, except dates: NumPy would turn numbers beside text into text."""
    if str(getattr(values, "dtype", "object")) != "object":
        return values
    column = np.asarray(values, dtype=object)
    if nested := [each for each in column if isinstance(each, list | tuple | dict | set | np.ndarray | Tensor)]:
        got = f"a {type(nested[0]).__name__}; make a column of each element, or leave it out"
        raise ValueError(f"expected one number or text per row in column {name!r}, got {got}")
    known = [None if _is_missing(value) else value for value in column.flat]
    dates = any(known) and all(value is None or isinstance(value, date) for value in known)
    return np.array(known, dtype="datetime64[us]") if dates else column


def _kind(column: Any) -> str:
    """numpy's letter for the kind of a column; O for text and pandas categories."""
    if isinstance(column, Tensor) or not hasattr(column.dtype, "kind"):  # polars, for example
        column = as_array(column)
    return "O" if column.dtype.kind in "SUTO" else str(column.dtype.kind)


def _is_category(column: Any) -> bool:
    """Whether a column holds text or pandas categories; a column of objects that are all numbers does not."""
    if _kind(column) != "O":
        return False
    known = [value for value in np.asarray(column, dtype=object) if not _is_missing(value)]
    return str(column.dtype) == "category" or not all(isinstance(v, Number) for v in known) or not known


def _numbers(name: Name, column: Any) -> np.ndarray:
    """(N,) float64; missing values are NaN, dates and durations in seconds."""
    kind = _kind(column)
    if kind in "Mm":
        unit = "datetime64[us]" if kind == "M" else "timedelta64[us]"  # nanoseconds end in the year 2262
        dates = np.asarray(column.to_numpy(dtype=unit) if hasattr(column, "iloc") else column).astype(unit)
        return np.where(np.isnat(dates), np.nan, dates.astype(np.int64) / 1e6)
    if kind == "O":
        found = [np.nan if _is_missing(value) else value for value in np.asarray(column, dtype=object)]
        if text := [value for value in found if not isinstance(value, Number) or isinstance(value, complex)]:
            raise ValueError(f"expected numbers in column {name!r}, got {text[0]!r}; convert it, or use categories=")
        values = np.array([float(value) for value in found])
    elif kind == "c":
        raise ValueError(f"expected real numbers in column {name!r}, got complex ones; pass two columns")
    elif hasattr(column, "to_numpy") and not hasattr(column.dtype, "itemsize"):
        values = np.asarray(column.to_numpy(), dtype=np.float64)
    elif hasattr(column, "to_numpy"):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        values = as_array(column).astype(np.float64)
    if np.isinf(values).any():
        at = int(np.isinf(values).argmax())
        raise ValueError(f"expected finite or missing numbers in column {name!r}, got infinity in row {at}; correct it")
    return values


def _levels(column: Any) -> list[Level | None]:
    """Values as JSON types: 1 equals 1.0 and differs from "1"; None if missing."""
    objects = np.asarray(column.detach().cpu() if isinstance(column, Tensor) else column, dtype=object)
    plain = (value.item() if isinstance(value, np.generic) else value for value in objects)
    return [None if _is_missing(v) else v if isinstance(v, str | int | float | bool) else str(v) for v in plain]


def comparable_values(name: Name, column: Any) -> np.ndarray:
    """(N,) float64, equal wherever the column's values are equal: numbers unchanged, categories by their rank."""
    if not _is_category(column):
        values = _numbers(name, column)
        return np.where(np.isnan(values), np.nan, values) + 0.0  # one NaN, and −0 is 0
    levels = _levels(column)
    place = {level: at for at, level in enumerate(sorted({each for each in levels if each is not None}, key=_rank))}
    return np.array([-1.0 if each is None else place[each] for each in levels])


def _rank(level: Level) -> tuple[bool, Level]:
    """Numbers before text."""
    return isinstance(level, str), level


def _is_missing(value: Any) -> bool:
    # pandas' NA raises when it is compared
    is_nan = isinstance(value, Number) and value != value
    return value is None or type(value).__name__ in ("NAType", "NaTType") or is_nan


def _shape_text(columns: list[Any]) -> str:
    return f"{len(columns)} columns of lengths {sorted({len(column) for column in columns})}"
