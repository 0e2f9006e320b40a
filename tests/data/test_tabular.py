"""UCI folders come back standardised by their train rows; wrong splits, columns and values are refused."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from dissensus.data import CLASSIFICATION_SETS, REGRESSION_SETS, regression_split, uci_classification, uci_regression
from dissensus.data.tabular import read_tabular_npz, read_uci_folder
from refusals import refuses


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("DISSENSUS_DATA", raising=False)


@pytest.fixture
def table() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(20, 4)) * [1, 10, 100, 5] + [0, 3, -7, 50]


def write_folder(path, table, *, train=range(15), test=range(15, 20), features=(0, 1, 3), target=2, form="%d"):
    path.mkdir(parents=True, exist_ok=True)
    np.savetxt(path / "data.txt", table, fmt="%.17g")
    np.savetxt(path / "index_features.txt", features, fmt=form)
    np.savetxt(path / "index_target.txt", [target], fmt=form)
    np.savetxt(path / "n_splits.txt", [2], fmt="%d")
    for split in range(2):
        np.savetxt(path / f"index_train_{split}.txt", list(train), fmt=form)
        np.savetxt(path / f"index_test_{split}.txt", list(test), fmt=form)


@pytest.mark.parametrize("form", ["%d", "%.18e"])
def test_folders_are_read_exactly_whether_indices_are_written_as_integers_or_floats(tmp_path, table, form):
    write_folder(tmp_path, table, form=form)
    x, y, train, test = read_uci_folder(tmp_path, 1)
    np.testing.assert_array_equal(x, table[:, [0, 1, 3]])
    np.testing.assert_array_equal(y, table[:, 2])
    assert train.tolist() == list(range(15))
    assert test.tolist() == list(range(15, 20))


@pytest.mark.parametrize("sub", ["UCI_Datasets/concrete/data", "concrete/data", "concrete", "."])
def test_uci_sets_are_standardised_by_their_train_rows_alone(tmp_path, sub):
    table = np.random.default_rng(1).normal(size=(1030, 9)) * 4 + 30
    write_folder(tmp_path / sub, table, train=range(900), test=range(900, 1030), features=range(8), target=8)
    split = uci_regression("concrete", 0, folder=tmp_path, dtype=torch.float64)
    train, test = torch.from_numpy(table[:900]), torch.from_numpy(table[900:])
    mean, std = train.mean(0), train.std(0, correction=0)
    torch.testing.assert_close(split.x_train, ((train - mean) / std)[:, :8], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(split.x_test, ((test - mean) / std)[:, :8], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(split.targets.inverse(split.y_test), test[:, 8:], rtol=1e-12, atol=0)
    assert split.y_train.shape == (900, 1)
    assert uci_regression("concrete", 0, folder=tmp_path).x_train.dtype == torch.float32


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    table = np.random.default_rng(2).normal(size=(506, 14))
    write_folder(tmp_path / "bostonHousing/data", table, features=range(13), target=13)
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path))
    assert uci_regression("bostonHousing").x_test.shape == (5, 13)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": range(16)}, "disjoint train and test rows, got 1 in both"),
        ({"test": range(15, 21)}, "whole numbers from 0 to 19"),
        ({"test": [-1, 16]}, "whole numbers from 0 to 19"),
        ({"train": [0, 0, 1]}, "each at most once"),
        ({"features": (0, 1, 2)}, "one target column outside the features"),
        ({"features": (0, 4)}, "whole numbers from 0 to 3"),
        ({"train": [0.5, 1], "form": "%.3f"}, "whole numbers"),
        ({"train": [np.nan, 1], "form": "%.3f"}, "whole numbers"),
    ],
)
def test_wrong_indices_are_refused(tmp_path, table, changes, message):
    write_folder(tmp_path, table, **changes)
    refuses(lambda: regression_split(*map(torch.from_numpy, read_uci_folder(tmp_path, 0))), message)


@pytest.mark.parametrize("column", [0, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, table, column, value):
    table[3, column] = value
    write_folder(tmp_path, table)
    refuses(lambda: regression_split(*map(torch.from_numpy, read_uci_folder(tmp_path, 0))), "finite inputs and targets")
    x, y = torch.from_numpy(table[:, [0, 1, 3]]), torch.from_numpy(table[:, 2])
    refuses(lambda: regression_split(x, y, torch.arange(15), torch.arange(15, 20)), "finite inputs and targets")


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([0, 1, 2], [2, 3], "disjoint train and test rows, got 1 in both"),
        ([0, 1, -1], [3], "expected train rows from 0 to 19"),
        ([0, 1], [20], "expected test rows from 0 to 19"),
        ([0, 0], [3], "each at most once"),
        ([0, 1], [], "at least one"),
    ],
)
def test_splits_whose_rows_overlap_repeat_or_do_not_exist_are_refused(table, train, test, message):
    x, y = torch.from_numpy(table[:, [0, 1, 3]]), torch.from_numpy(table[:, 2])
    refuses(lambda: regression_split(x, y, torch.tensor(train), torch.tensor(test, dtype=torch.int64)), message)


@pytest.mark.parametrize("content", ["", "\n\n", "1 2 3\n4 5\n", "one two\n", "# nothing\n"])
def test_damaged_tables_are_value_errors(tmp_path, table, content):
    write_folder(tmp_path, table)
    (tmp_path / "data.txt").write_text(content)
    refuses(lambda: read_uci_folder(tmp_path, 0), "table of numbers")


def test_a_split_that_does_not_exist_is_refused(tmp_path, table):
    write_folder(tmp_path, table)
    for split in (-1, 2):
        with pytest.raises(ValueError, match="split from 0 to 1"):
            read_uci_folder(tmp_path, split)


def test_unknown_missing_and_mistaken_sets_are_refused(tmp_path, table):
    refuses(lambda: uci_regression("boston", folder=tmp_path), "expected name of bostonHousing")
    with pytest.raises(FileNotFoundError, match=r"UCI_Datasets/concrete/data/data\.txt"):
        uci_regression("concrete", folder=tmp_path)
    refuses(lambda: uci_regression("concrete"), "no DISSENSUS_DATA", FileNotFoundError)
    write_folder(tmp_path / "concrete", table)
    with pytest.raises(ValueError, match="expected concrete of shape \\(1030, 8\\), got \\(20, 3\\)"):
        uci_regression("concrete", folder=tmp_path)
    refuses(lambda: uci_classification("titanic", folder=tmp_path), "expected name of breast_cancer")
    with pytest.raises(FileNotFoundError, match=r"uci_classification/iris\.npz, iris\.npz"):
        uci_classification("iris", folder=tmp_path)


def test_the_six_regression_sets_and_twelve_classification_sets_are_listed():
    assert len(REGRESSION_SETS) == 6
    assert len(CLASSIFICATION_SETS) == 12


@pytest.mark.parametrize("sub", ["uci_classification", "."])
def test_classification_sets_are_read(tmp_path, sub):
    iris = load_iris()
    (tmp_path / sub).mkdir(exist_ok=True)
    np.savez(tmp_path / sub / "iris.npz", x=iris.data, y=iris.target.astype(np.uint8), class_names=iris.target_names)
    found = uci_classification("iris", folder=tmp_path, dtype=torch.float64)
    np.testing.assert_array_equal(found.x.numpy(), iris.data)
    np.testing.assert_array_equal(found.y.numpy(), iris.target)
    assert found.classes == ("setosa", "versicolor", "virginica")
    np.savez(tmp_path / sub / "wine.npz", x=iris.data, y=iris.target, class_names=iris.target_names)
    refuses(lambda: uci_classification("wine", folder=tmp_path), "expected wine with 178 rows")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.array([[1.0], [np.nan]])}, "finite inputs"),
        ({"x": np.zeros(2)}, "x \\(N, D\\)"),
        ({"y": np.array([0.0, 1.0])}, "class indices"),
        ({"y": np.array([0, 2])}, "y from 0 to 2, and 2 names"),
        ({"y": np.array([0, 1, 1])}, "class indices"),
        ({"class_names": np.array([{}])}, "plain arrays"),
        ({"class_names": np.array([["a", "b"]])}, r"class_names \(C,\) in .* got a damaged one"),
        (
            {"class_names": np.array([2**31 - 1, 98], dtype=np.uint32).view("<U1")},
            r"class_names \(C,\) in .* got a damaged one",
        ),
    ],
)
def test_wrong_classification_files_are_refused(tmp_path, changes, message):
    arrays = {"x": np.zeros((2, 1)), "y": np.array([0, 1]), "class_names": np.array(["a", "b"])} | changes
    np.savez(tmp_path / "set.npz", **arrays)
    refuses(lambda: read_tabular_npz(tmp_path / "set.npz", name="set"), message)
    np.savez(tmp_path / "set.npz", x=np.zeros((2, 1)))
    refuses(lambda: read_tabular_npz(tmp_path / "set.npz", name="set"), r"got a damaged one .KeyError: 'y'")


def test_what_is_too_large_for_the_dtype_is_refused(tmp_path):
    path = tmp_path / "table.npz"
    np.savez(path, x=np.array([[1.0, 2.0], [3.0, 1e300]]), y=np.array([0, 1]), class_names=np.array(["a", "b"]))
    assert read_tabular_npz(path, name="table", dtype=torch.float64).x[1, 1] == 1e300
    with pytest.raises(ValueError, match=r"expected finite inputs in torch.float32, got inf in row 1, column 1 of"):
        read_tabular_npz(path, name="table")


def test_the_row_and_column_that_are_not_finite_are_named():
    x, y = torch.randn(5, 2), torch.randn(5)
    with pytest.raises(ValueError, match=r"expected x \(N, D\) and y \(N,\), got \(5, 2\) and \(5, 1\)"):
        regression_split(x, y[:, None], torch.arange(2), torch.arange(2, 4))
    y[3] = float("nan")
    with pytest.raises(ValueError, match=r"the last column\), got nan in row 3, column 2"):
        regression_split(x, y, torch.arange(2), torch.arange(2, 4))
