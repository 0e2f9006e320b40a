"""The user's arrays and tensors as rows of a task."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.bench.rows.learned import SetKind, TaskRows
from dissensus.data.formats import pixels
from dissensus.numerics.arrays import as_array
from dissensus.numerics.lengthscales import check_finite_rows

HINT = 'write likelihood = "regression" in the task, or number the classes'


class Learner:
    """Turns the user's arrays or tensors into TaskRows: the training rows, and other rows of the same form."""

    def __init__(self, kind: SetKind, train: Any, what: str, classes: Sequence[str] | None) -> None:
        self.kind = kind
        self.levels: list[Any] | None = None  # class labels in y; None if classes are numbered already
        x, y = self._pair(train, what)
        self.classes: tuple[str, ...] = ()
        if kind == "classification":
            values = as_array(y)
            if values.dtype.kind in "USOb":
                self.levels = sorted(set(values.tolist()) if classes is None else classes)
                self.classes = tuple(map(str, self.levels))
            else:
                self.classes = tuple(map(str, classes if classes is not None else range(_count(values, what))))
        self.train = self.rows((x, y), what)

    def rows(self, given: Any, what: str, *, labelled: bool = True) -> TaskRows:
        """TaskRows of (x, y), or of x alone if unlabelled; `what`: their name in errors."""
        x, y = self._pair(given, what, labelled=labelled)
        inputs = _inputs(x, what)
        if not labelled:
            empty = torch.zeros(len(inputs), dtype=torch.int64)
            return TaskRows(inputs, empty if self.classes else empty[:, None].double())
        targets = self._values(y, what) if self.kind == "regression" else self._labels(y, what)
        if len(targets) != len(inputs):
            raise ValueError(f"expected {len(inputs)} targets in {what}, got {len(targets)}; pass one per row")
        return TaskRows(inputs, targets)

    def _pair(self, given: Any, what: str, *, labelled: bool = True) -> tuple[Any, Any]:
        if isinstance(given, tuple | list) and len(given) == 2:
            return given[0], given[1]
        if labelled or isinstance(given, tuple | list | Mapping):
            raise ValueError(f"expected (x, y) for {what}, got {type(given).__name__}; return a tuple of two arrays")
        return given, None

    def _values(self, y: Any, what: str) -> Tensor:
        values = as_array(y)
        if values.dtype.kind not in "fiu" or values.ndim not in (1, 2):
            got = f"{values.dtype} {values.shape}"
            raise ValueError(f"expected numbers (N,) or (N, D) as y of {what}, got {got}; {HINT}")
        found = torch.from_numpy(np.require(values, np.float64, ["C", "W"]))
        found = found[:, None] if found.ndim == 1 else found
        check_finite_rows(found, what=f"targets of {what}")
        return found

    def _labels(self, y: Any, what: str) -> Tensor:
        values = as_array(y)
        if values.shape == (len(values), 1):
            values = values[:, 0]
        if values.ndim != 1 or values.dtype.kind == "f":
            raise ValueError(f"expected class labels (N,) as y of {what}, got {values.dtype} {values.shape}; {HINT}")
        if self.levels is None:
            if values.dtype.kind not in "iu":
                raise ValueError(f"expected whole numbers as labels of {what}, got {values.dtype}; label all alike")
            return torch.from_numpy(values.astype(np.int64))
        place = {level: i for i, level in enumerate(self.levels)}
        if strange := [value for value in dict.fromkeys(values.tolist()) if value not in place]:
            known = f"the training classes ({', '.join(self.classes)})"
            raise ValueError(f"expected {known} in {what}, got {strange[0]!r} too; train on it too, or remove its rows")
        return torch.tensor([place[value] for value in values.tolist()], dtype=torch.int64)


def _count(labels: np.ndarray, what: str) -> int:
    if not labels.size:
        raise ValueError(f"expected rows in {what!r}, got none; pass at least one for each class")
    return int(labels.max()) + 1 if labels.dtype.kind in "iu" else 0


def _inputs(x: Any, what: str) -> Tensor:
    """Images (N, C, H, W) uint8, or numbers (N, …); floating numbers keep their precision, others become float64."""
    values = as_array(x)
    if values.dtype == np.uint8 and values.ndim in (3, 4):
        return torch.from_numpy(pixels(values, what))
    if values.dtype.kind not in "fiub" or values.ndim < 2 or not values.size:
        got = f"{values.dtype} {values.shape}"
        raise ValueError(f"expected x of {what} as uint8 (N, C, H, W) or numbers (N, D), got {got}; convert it")
    wanted = values.dtype if values.dtype in (np.float32, np.float64) else np.dtype(np.float64)
    found = torch.from_numpy(np.require(values, wanted.newbyteorder("="), ["C", "W"]))
    check_finite_rows(found.flatten(1), what=f"inputs of {what}")
    return found
