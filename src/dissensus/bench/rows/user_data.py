"""The user's data: from a function, from folders of images, or from tables and arrays in files."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.bench.rows.dataset_rows import DataRequest, DatasetRows, SetKind, TaskRows
from dissensus.bench.setting_checks import settings_errors
from dissensus.bench.user_code import import_object
from dissensus.data import split_indices
from dissensus.data.file_formats import npz_pair, pixels
from dissensus.data.images import ImageSet, Size, image_folder, image_stack, subfolders
from dissensus.data.tabular import REGRESSION_SETS, read_uci_folder, regression_split, uci_regression
from dissensus.numerics.lengthscales import check_finite_rows
from dissensus.numerics.randomness import preserve_random_state
from dissensus.utils.arrays import as_array
from dissensus.utils.checks import one_of
from dissensus.utils.extras import require_extra

HINT = 'write likelihood = "regression" in the task, or number the classes'


class RowConverter:
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
                if classes is None and not values.size:
                    raise ValueError(f"expected rows in {what!r}, got none; pass at least one for each class")
                count = int(values.max()) + 1 if classes is None and values.dtype.kind in "iu" else 0
                self.classes = tuple(map(str, range(count) if classes is None else classes))
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
        if values.dtype.kind == "f" and values.shape == (len(values), len(self.classes)) and self.levels is None:
            return torch.from_numpy(values)  # soft labels
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


def _inputs(x: Any, what: str) -> Tensor:
    """Images (N, C, H, W) uint8, or numbers (N, …); floating numbers keep their precision, others become float64."""
    if hasattr(x, "read"):  # images that are read batch by batch
        return x
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


MADE = ("train", "test", "validation", "ood", "shift", "classes")  # keys that a function may return


def function_rows(name: str, asked: DataRequest, **options: Any) -> DatasetRows:
    """Rows from the user's function: it returns a dict with train and test, each (x, y), and other keys of MADE."""
    make = import_object(name, "a function that makes data", asked.beside)
    with settings_errors(f"the data of {name}"), _seed_generators(asked.seed):
        found = make(**options)
    if not isinstance(found, Mapping) or not {"train", "test"} <= found.keys():
        got = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise ValueError(f'expected a dict with "train" and "test", each (x, y), from {name}, got {got}; return both')
    for key in found:
        one_of(f"a key of what {name} returns", key, MADE)
    learn = RowConverter(asked.kind, found["train"], f"train of {name}", found.get("classes"))
    elsewhere: dict[str, Any] = {"ood": {}, "shift": {}}
    for key, sets in elsewhere.items():
        for each, rows in dict(found.get(key, {})).items():
            sets[str(each)] = learn.rows(rows, f"{key} {each!r} of {name}", labelled=key == "shift")
    validation = learn.rows(found["validation"], f"validation of {name}") if "validation" in found else None
    test = learn.rows(found["test"], f"test of {name}")
    return DatasetRows(learn.train, test, learn.classes, validation, **elsewhere, sorted=True)


@contextmanager
def _seed_generators(seed: int) -> Iterator[None]:
    """Context that seeds the global generators, so that every process makes the same rows; their states are restored."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with preserve_random_state(torch.device("cpu")):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


def npz_rows(asked: DataRequest, train_file: str, test_file: str, classes: int | None = None) -> DatasetRows:
    """Rows from arrays x, y (or images, labels) in .npz files. classes: their number, if training rows lack the last class."""
    names = None if classes is None else [*map(str, range(classes))]
    learn = RowConverter(asked.kind, npz_pair(asked.path(train_file)), train_file, names)

    def read(name: str, labelled: bool) -> TaskRows:
        return learn.rows(npz_pair(asked.path(name), labelled=labelled), name, labelled=labelled)

    return DatasetRows(learn.train, read(test_file, True), learn.classes, read_file=read, sorted=True)


def image_rows(images: ImageSet) -> TaskRows:
    """The images of a set with its labels."""
    return TaskRows(images.images, images.labels)


def folder_rows(asked: DataRequest, path: str = ".", size: Size = None, channels: int = 3) -> DatasetRows:
    """Rows of images in PATH/train/CLASS and test/CLASS; optional: validation/CLASS, ood/SET and shift/SET/CLASS."""
    root = asked.path(path)
    read = partial(image_folder, size=size, channels=channels)
    train = read(root / "train")
    classes = train.classes

    def labelled_rows(folder: Path) -> TaskRows:
        return image_rows(read(folder, classes=classes))

    def foreign_rows(folder: Path) -> TaskRows:
        images, _ = image_stack(folder, size=size, channels=channels)
        return TaskRows(images, torch.zeros(len(images), dtype=torch.int64))

    test, held = labelled_rows(root / "test"), root / "validation"
    validation = labelled_rows(held) if held.is_dir() else None
    ood = {each.name: foreign_rows(each) for each in subfolders(root / "ood")}
    shift = {each.name: labelled_rows(each) for each in subfolders(root / "shift")}
    return DatasetRows(image_rows(train), test, classes, validation, ood=ood, shift=shift, sorted=True)


def table_rows(
    asked: DataRequest,
    file: str,
    target: str,
    test_file: str | None = None,
    test_share: float = 0.2,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
) -> DatasetRows:
    """Rows of a CSV or Parquet file; without a test_file, a share `test_share` of them, chosen by data.seed, is held out."""
    from dissensus.data.table_encoding import TableEncoder

    def split_off(frame: Any, name: str) -> Any:
        """The input columns and the target; None if there is no target column."""
        for column in (each for each in drop if each not in frame.columns and name == file):
            one_of("a column to drop", column, frame.columns)
        return frame.drop(columns=[target, *drop], errors="ignore"), frame.get(target)

    def targets(name: str, column: Any) -> np.ndarray:
        if column is None:
            one_of(f"the target, a column of {name}", target, columns)
        if missing := int(column.isna().sum()):
            raise ValueError(f"expected {target} in every row of {name}, got {missing} without; drop these rows")
        values = column.to_numpy()
        if asked.kind == "regression":
            return np.asarray(values, dtype=np.float64)
        if values.dtype.kind == "f":
            raise ValueError(f"expected classes in {target} of {name}, got {values.dtype} numbers; {HINT}")
        return np.array([str(value) for value in values])

    whole = read_table(asked.path(file))
    columns = list(whole.columns)
    inputs, column = split_off(whole, file)
    y = targets(file, column)
    if test_file is None:
        labels = None if asked.kind == "regression" else torch.from_numpy(np.unique(y, return_inverse=True)[1])
        rest, held = split_indices(len(y), validation=float(test_share), seed=asked.seed, labels=labels)
        held_inputs, held_y, held_name = inputs.iloc[held.numpy()], y[held.numpy()], file
        inputs, y = inputs.iloc[rest.numpy()], y[rest.numpy()]
    else:
        held_inputs, held_column = split_off(read_table(asked.path(test_file)), test_file)
        held_y, held_name = targets(test_file, held_column), test_file
    encode = partial(TableEncoder.of(inputs, categories=categories), dtype=torch.float64)
    learn = RowConverter(asked.kind, (encode(inputs), y), f"the training rows of {file}", None)

    def read(name: str, labelled: bool) -> TaskRows:
        rows, column = split_off(read_table(asked.path(name)), name)
        return learn.rows((encode(rows), targets(name, column) if labelled else None), name, labelled=labelled)

    test = learn.rows((encode(held_inputs), held_y), f"the test rows of {held_name}")
    return DatasetRows(learn.train, test, learn.classes, read_file=read, sorted=True)


def read_table(path: Path) -> Any:
    """The DataFrame in a CSV or Parquet file, without a saved index: first columns without a name that number or name rows."""
    require_extra("tables")
    import pandas

    readers: dict[str, Callable[..., Any]] = {".csv": pandas.read_csv, ".parquet": pandas.read_parquet}
    one_of("a table's file, by its suffix,", path.suffix, readers)
    with settings_errors(f"{path}", wanted="a table in", remedy="save it again"):
        frame = readers[path.suffix](path)
    if path.suffix == ".csv" and list(frame.index) != list(range(len(frame))):  # pandas makes the first values an index
        raise ValueError(f"expected a name for each column of {path}, got one too few; name all, or drop final commas")

    def is_index(name: Any) -> bool:  # one that was saved
        return str(name).startswith("Unnamed: ") and frame[name].is_unique and frame[name].dtype.kind != "f"

    return frame[[*dropwhile(is_index, frame.columns)]]


def uci_rows(asked: DataRequest, set: str, split: int = 0, inner: float = 0.0) -> DatasetRows:
    """A split of a folder in the layout of UCI_Datasets; inner: share of training rows that replaces the test rows."""
    if set in REGRESSION_SETS:
        found = uci_regression(set, split, folder=asked.folder, dtype=torch.float64)
    else:
        arrays = read_uci_folder(_uci_folder(asked, set), split)
        found = regression_split(*map(torch.from_numpy, arrays), dtype=torch.float64)
    train = TaskRows(found.inputs.inverse(found.x_train), found.targets.inverse(found.y_train))
    if inner:
        rest, held = split_indices(len(train.y), validation=float(inner), seed=split)
        return DatasetRows(train.select(rest), train.select(held), ())
    return DatasetRows(train, TaskRows(found.inputs.inverse(found.x_test), found.targets.inverse(found.y_test)), ())


def _uci_folder(asked: DataRequest, name: str) -> Path:
    for place in (f"UCI_Datasets/{name}/data", f"{name}/data", name):
        with suppress(FileNotFoundError):
            return asked.path(f"{place}/data.txt").parent
    one_of("data.set (or a folder with data.txt, index_*.txt and n_splits.txt)", name, REGRESSION_SETS)
    raise AssertionError  # not reached: the name is none of them
