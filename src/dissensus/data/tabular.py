"""Tables: the UCI regression sets with their standard splits, and small classification sets.

Regression uses the splits of Hernández-Lobato & Adams 2015 and Gal & Ghahramani 2016, on which papers report. Their folders
contain data.txt, index_features.txt, index_target.txt, n_splits.txt and index_train_i.txt, index_test_i.txt.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dissensus.data.catalogue import Folder, find_place
from dissensus.data.file_formats import npz_arrays, open_embedded
from dissensus.data.input_transforms import Standardiser
from dissensus.numerics.lengthscales import check_finite_rows
from dissensus.utils.checks import one_of
from dissensus.utils.file_errors import read_errors

_SIZES = tomllib.load(open_embedded("tables.toml"))
# name -> rows, features
REGRESSION_SETS: dict[str, tuple[int, int]] = {name: tuple(sizes) for name, sizes in _SIZES["regression"].items()}
# name -> rows, features, classes, size of the usual train set (the first rows) or None
CLASSIFICATION_SETS: dict[str, tuple[int, int, int, int | None]] = {
    name: (*sizes, train or None) for name, (*sizes, train) in _SIZES["classification"].items()
}


@dataclass(frozen=True, eq=False)
class RegressionSplit:
    """One split of a regression set, standardised with its train rows. `.targets.inverse` undoes it for predictions."""

    x_train: Tensor  # (N, D)
    y_train: Tensor  # (N, 1)
    x_test: Tensor  # (T, D)
    y_test: Tensor  # (T, 1)
    inputs: Standardiser  # of the original x_train
    targets: Standardiser  # of the original y_train; targets.inverse turns predictions into original units


@dataclass(frozen=True, eq=False)
class TabularSet:
    """Rows with class labels, in original units: x (N, D), y (N,) int64."""

    x: Tensor  # (N, D)
    y: Tensor  # (N,) int64
    name: str
    classes: tuple[str, ...]


def uci_regression(
    name: str, split: int = 0, *, folder: Folder = None, dtype: torch.dtype = torch.float32
) -> RegressionSplit:
    """Reads one of the 20 standard splits of a UCI regression set (5 for the protein set) as a RegressionSplit.

    Nothing is downloaded.

    Args:
        name: one of REGRESSION_SETS.
        split: number of the split, from 0.
        folder: contains UCI_Datasets/NAME/data, NAME/data, NAME or the files; None means the variable DISSENSUS_DATA.
    """
    one_of("name", name, REGRESSION_SETS, hint="read other folders with read_uci_folder")
    path = regression_folder(folder, name)
    x, y, train, test = read_uci_folder(path, split)
    if x.shape != REGRESSION_SETS[name]:
        raise ValueError(f"expected {name} of shape {REGRESSION_SETS[name]}, got {x.shape}; download {path} again")
    return regression_split(*map(torch.from_numpy, (x, y, train, test)), dtype=dtype)


def regression_folder(folder: Folder, *names: str) -> Path:
    """The folder with the files of the first regression set found; FileNotFoundError lists the possible places."""
    subs = [*(sub for name in names for sub in (f"UCI_Datasets/{name}/data/", f"{name}/data/", f"{name}/")), ""]
    return find_place(folder, [f"{sub}data.txt" for sub in subs], "data.txt, index_*.txt and n_splits.txt").parent


def regression_split(
    x: Tensor, y: Tensor, train: Tensor, test: Tensor, *, dtype: torch.dtype = torch.float32
) -> RegressionSplit:
    """Builds a RegressionSplit from x (N, D), y (N,) and row indices; standardises both with the train rows only.

    Args:
        train, test: int64 row indices, (n,) and (T,).
        dtype: dtype of the standardised tensors.
    """
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(f"expected x (N, D) and y (N,), got {tuple(x.shape)} and {tuple(y.shape)}; reshape them")
    x, y = x.double(), y.double()[:, None]
    check_finite_rows(torch.cat([x, y], dim=1), what="inputs and targets (the last column)")
    for name, rows in (("train", train), ("test", test)):
        if len(rows) == 0 or not ((rows >= 0) & (rows < len(x))).all() or len(torch.unique(rows)) != len(rows):
            wanted = f"{name} rows from 0 to {len(x) - 1}, each at most once, at least one"
            raise ValueError(f"expected {wanted}, got others; correct the split")
    if both := int(torch.isin(train, test).sum()):
        raise ValueError(f"expected disjoint train and test rows, got {both} in both; correct the split")
    inputs, targets = Standardiser.of_rows(x[train]), Standardiser.of_rows(y[train])
    # Standardise in float64, then round once.
    standardised = (inputs(x[train]), targets(y[train]), inputs(x[test]), targets(y[test]))
    x_train, y_train, x_test, y_test = (each.to(dtype) for each in standardised)
    return RegressionSplit(x_train, y_train, x_test, y_test, inputs, targets)


def uci_classification(name: str, *, folder: Folder = None, dtype: torch.dtype = torch.float32) -> TabularSet:
    """Reads a small classification set as a TabularSet. CLASSIFICATION_SETS has the size of its usual train set.

    Nothing is downloaded.

    Args:
        name: one of CLASSIFICATION_SETS.
        folder: contains uci_classification/NAME.npz or NAME.npz; None means the environment variable DISSENSUS_DATA.
    """
    one_of("name", name, CLASSIFICATION_SETS, hint="read other files with read_tabular_npz")
    path = find_place(folder, [f"uci_classification/{name}.npz", f"{name}.npz"], "arrays x, y and class_names")
    table = read_tabular_npz(path, name=name, dtype=dtype)
    rows, features, classes, _ = CLASSIFICATION_SETS[name]
    if (*table.x.shape, len(table.classes)) != (rows, features, classes):
        wanted = f"{name} with {rows} rows, {features} features and {classes} classes"
        got = f"{tuple(table.x.shape)} and {len(table.classes)} in {path}"
        raise ValueError(f"expected {wanted}, got {got}; download the file again")
    return table


def read_tabular_npz(path: str | Path, *, name: str, dtype: torch.dtype = torch.float32) -> TabularSet:
    """TabularSet of an .npz file with x (N, D), y (N,) class indices and class_names (C,)."""
    arrays = npz_arrays(path)
    kind = "numbers x (N, D), class indices y (N,) and class_names (C,) in"
    with read_errors(path, "store these three arrays", kind=kind):
        x, y, names = (arrays[key] for key in ("x", "y", "class_names"))
        (_,), classes = names.shape, tuple(map(str, names))  # invalid text: NumPy raises a SystemError
        if x.ndim != 2 or y.shape != x.shape[:1] or x.dtype.kind not in "fiu" or y.dtype.kind not in "iu":
            raise ValueError(f"{x.dtype} {x.shape} and {y.dtype} {y.shape}")
        if y.size and not 0 <= y.min() <= y.max() < len(classes):
            raise ValueError(f"y from {y.min()} to {y.max()}, and {len(classes)} names")
    plain = x.astype(x.dtype if x.dtype in (np.float32, np.float64) else np.float64)  # torch lacks some dtypes
    inputs = torch.from_numpy(plain.astype(plain.dtype.newbyteorder("="))).to(dtype)
    # Numbers in the file may be too large for the dtype.
    check_finite_rows(inputs, what=f"inputs in {dtype}", where=f" of {path}")
    return TabularSet(inputs, torch.from_numpy(y.astype(np.int64)), name, classes)


def read_uci_folder(path: str | Path, split: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x (N, D) and y (N,) float64, and the int64 rows of the train and test part of one split."""
    path = Path(path)
    data = _numbers_in(path / "data.txt", rank=2)
    features = _indices(path / "index_features.txt", data.shape[1])
    target = _indices(path / "index_target.txt", data.shape[1])
    splits = float(_numbers_in(path / "n_splits.txt", rank=1).flat[0])
    if len(target) != 1 or target[0] in features or not 0 <= split < splits:
        wanted = f"one target column outside the features and split from 0 to {splits - 1:g}"
        raise ValueError(f"expected {wanted}, got {target} and {split} in {path}; correct split or index_*.txt")
    train = _indices(path / f"index_train_{split}.txt", len(data))
    return data[:, features], data[:, target[0]], train, _indices(path / f"index_test_{split}.txt", len(data))


def _numbers_in(path: Path, *, rank: Literal[1, 2]) -> np.ndarray:
    with read_errors(path, "download the file again", kind="a table of numbers in"):
        lines = path.read_text().splitlines()
        if not any(map(str.strip, lines)):
            raise ValueError("it is empty")
        return np.loadtxt(lines, dtype=np.float64, comments=None, ndmin=rank)


def _indices(path: Path, size: int) -> np.ndarray:
    """(K,) distinct int64 indices below `size`; some copies of the files write them as floats."""
    values = _numbers_in(path, rank=1)
    whole = values.ndim == 1 and ((values >= 0) & (values < size) & (values == values.round())).all()
    if not whole or len(np.unique(values)) != len(values):
        raise ValueError(f"expected whole numbers from 0 to {size - 1}, each at most once, got others; correct {path}")
    return values.astype(np.int64)
