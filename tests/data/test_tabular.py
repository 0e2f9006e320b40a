"""UCI folders come back standardised by their train rows; standardising is undone exactly; splits are disjoint and complete."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.preprocessing import StandardScaler

from dissensus.data import (
    CLASSIFICATION_SETS,
    REGRESSION_SETS,
    ImageSet,
    Standardiser,
    regression_split,
    split_indices,
    train_validation,
    uci_classification,
    uci_regression,
)
from dissensus.data.input_transforms import RowInputs, as_input_transform
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


@pytest.mark.parametrize(("changes", "message"), [
    ({"train": range(16)}, "disjoint train and test rows, got 1 in both"),
    ({"test": range(15, 21)}, "whole numbers from 0 to 19"), ({"test": [-1, 16]}, "whole numbers from 0 to 19"),
    ({"train": [0, 0, 1]}, "each at most once"), ({"features": (0, 1, 2)}, "one target column outside the features"),
    ({"features": (0, 4)}, "whole numbers from 0 to 3"), ({"train": [0.5, 1], "form": "%.3f"}, "whole numbers"),
    ({"train": [np.nan, 1], "form": "%.3f"}, "whole numbers"),
])  # fmt: skip
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


@pytest.mark.parametrize(("train", "test", "message"), [
    ([0, 1, 2], [2, 3], "disjoint train and test rows, got 1 in both"),
    ([0, 1, -1], [3], "expected train rows from 0 to 19"), ([0, 1], [20], "expected test rows from 0 to 19"),
    ([0, 0], [3], "each at most once"), ([0, 1], [], "at least one"),
])  # fmt: skip
def test_splits_whose_rows_overlap_repeat_or_do_not_exist_are_refused(table, train, test, message):
    x, y = torch.from_numpy(table[:, [0, 1, 3]]), torch.from_numpy(table[:, 2])
    refuses(lambda: regression_split(x, y, torch.tensor(train), torch.tensor(test, dtype=torch.int64)), message)


@pytest.mark.parametrize("content", ["", "\n\n", "1 2 3\n4 5\n", "one two\n", "# nothing\n"])
def test_damaged_tables_are_value_errors(tmp_path, table, content):
    write_folder(tmp_path, table)
    refuses(lambda: read_uci_folder(tmp_path, -1), "split from 0 to 1")
    refuses(lambda: read_uci_folder(tmp_path, 2), "split from 0 to 1")
    (tmp_path / "data.txt").write_text(content)
    refuses(lambda: read_uci_folder(tmp_path, 0), "table of numbers")


def test_unknown_missing_and_mistaken_sets_are_refused(tmp_path, table):
    refuses(lambda: uci_regression("boston", folder=tmp_path), "expected name of bostonHousing")
    told = r"UCI_Datasets/concrete/data/data\.txt"
    refuses(lambda: uci_regression("concrete", folder=tmp_path), told, FileNotFoundError)
    refuses(lambda: uci_regression("concrete"), "no DISSENSUS_DATA", FileNotFoundError)
    write_folder(tmp_path / "concrete", table)
    told = r"expected concrete of shape \(1030, 8\), got \(20, 3\)"
    refuses(lambda: uci_regression("concrete", folder=tmp_path), told)
    refuses(lambda: uci_classification("titanic", folder=tmp_path), "expected name of breast_cancer")
    told = r"uci_classification/iris\.npz, iris\.npz"
    refuses(lambda: uci_classification("iris", folder=tmp_path), told, FileNotFoundError)
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


@pytest.mark.parametrize(("changes", "message"), [
    ({"x": np.array([[1.0], [np.nan]])}, "finite inputs"),
    ({"x": np.zeros(2)}, "x \\(N, D\\)"),
    ({"y": np.array([0.0, 1.0])}, "class indices"),
    ({"y": np.array([0, 2])}, "y from 0 to 2, and 2 names"),
    ({"y": np.array([0, 1, 1])}, "class indices"),
    ({"class_names": np.array([{}])}, "plain arrays"),
    ({"class_names": np.array([["a", "b"]])}, r"class_names \(C,\) in .* got a damaged one"),
    ({"class_names": np.array([2**31 - 1, 98], np.uint32).view("<U1")}, r"class_names \(C,\) in .* got a damaged one"),
])  # fmt: skip
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
    told = "expected finite inputs in torch.float32, got inf in row 1, column 1 of"
    refuses(lambda: read_tabular_npz(path, name="table"), told)


def test_the_row_and_column_that_are_not_finite_are_named():
    x, y = torch.randn(5, 2), torch.randn(5)
    rows, told = (torch.arange(2), torch.arange(2, 4)), r"expected x \(N, D\) and y \(N,\), got \(5, 2\) and \(5, 1\)"
    refuses(lambda: regression_split(x, y[:, None], *rows), told)
    y[3] = float("nan")
    refuses(lambda: regression_split(x, y, *rows), r"the last column\), got nan in row 3, column 2")


# ------------------------------------------------------------------------------------------------------- standardising
def test_rows_agree_with_scikit_learn():
    x = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 7 + 3
    train, test = x[:40], x[40:]
    reference = StandardScaler().fit(train.numpy())
    expected = torch.from_numpy(reference.transform(test.numpy()))
    torch.testing.assert_close(Standardiser.of_rows(train)(test), expected, rtol=1e-12, atol=1e-12)


def test_train_rows_get_mean_zero_and_deviation_one_and_come_back():
    x = torch.rand(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 100
    standardiser = Standardiser.of_rows(x)
    z = standardiser(x)
    torch.testing.assert_close(z.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(standardiser.inverse(z), x, rtol=1e-13, atol=1e-12)


def test_constant_columns_become_zero_even_where_their_mean_rounds():
    x = torch.full((7, 2), 0.1, dtype=torch.float64)
    x[:, 1] = torch.arange(7)
    standardiser = Standardiser.of_rows(x)
    assert standardiser.std[0] == 1
    assert standardiser(x)[:, 0].abs().max() < 1e-15


def test_channels_agree_with_the_moments_of_the_scaled_pixels():
    images = torch.randint(0, 256, (20, 3, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    images[:, 2] = 17
    standardiser = Standardiser.of_channels(images)
    scaled = images.double() / 255
    torch.testing.assert_close(standardiser.mean, scaled.mean((0, 2, 3))[:, None, None], rtol=1e-13, atol=0)
    deviation = scaled.std((0, 2, 3), correction=0)[:2, None, None]
    torch.testing.assert_close(standardiser.std[:2], deviation, rtol=1e-12, atol=0)
    assert standardiser.std[2] == 1
    z = standardiser(images)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z.double(), (scaled - standardiser.mean) / standardiser.std, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(standardiser(scaled.float()), z)


def test_the_dtype_of_floats_is_kept():
    x = torch.arange(6.0).reshape(3, 2)
    assert Standardiser.of_rows(x)(x).dtype == torch.float32
    assert Standardiser.of_rows(x)(x.double()).dtype == torch.float64
    assert Standardiser.of_rows(x).mean.dtype == torch.float64
    assert Standardiser.of_rows(x.long())(x.long()).dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named_and_not_spread_over_its_column(value):
    x = torch.randn(6, 3)
    x[4, 1] = value
    refuses(lambda: Standardiser.of_rows(x), rf"expected finite rows, got {value} in row 4, column 1; remove such rows")
    x[5, 2] = value
    refuses(lambda: Standardiser.of_rows(x), r"in row 4, column 1 and 1 more; ")


def test_one_column_is_not_spread_over_several():
    rows, one = Standardiser.of_rows(torch.randn(5, 3)), Standardiser.of_rows(torch.randn(5, 1))
    grey = Standardiser.of_channels(torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8))
    for apply in (rows, rows.inverse):
        for wrong in (torch.zeros(5, 1), torch.zeros(5), torch.zeros(5, 3, 1)):
            with pytest.raises(ValueError, match="expected 3 columns as in the training data, got shape"):
                apply(wrong)
    refuses(lambda: Standardiser.of_rows(torch.zeros(3)), "rows of shape")
    refuses(lambda: Standardiser.of_channels(torch.zeros(2, 1, 3, 3)), "uint8 images")
    refuses(lambda: one(torch.zeros(5, 3)), "expected 1 columns")
    refuses(lambda: grey(torch.zeros(2, 3, 4, 4)), "expected 1 channels")
    assert rows.inverse(torch.zeros(7, 5, 3)).shape == (7, 5, 3)  # of every member
    assert one(torch.zeros(5)).shape == (5,)


def test_columns_of_a_frame_keep_their_order():
    frame = pytest.importorskip("pandas").DataFrame({"age": [20.0, 30, 40], "pay": [1e3, 2e3, 5e3]})
    scale = Standardiser.of_rows(frame)
    for apply in (scale, as_input_transform(scale), RowInputs(**as_input_transform(scale).config())):
        with pytest.raises(ValueError, match="columns age, pay in this order, as in training, got pay, age"):
            apply(frame[["pay", "age"]])
        assert torch.equal(apply(frame).float(), apply(frame.to_numpy()).float())


def test_rows_of_small_whole_numbers_are_no_pixels():
    """One byte or eight: the same numbers are the same rows, of the standardiser and of what is saved with a posterior."""
    rows = torch.tensor([[0, 200], [100, 40], [50, 255]], dtype=torch.uint8)
    for scale in (Standardiser.of_rows(rows), Standardiser.of_rows(rows.double())):
        expected = scale(rows.double())
        assert torch.allclose(expected.std(0, correction=0), torch.ones(2, dtype=torch.float64))
        for apply in (scale, as_input_transform(scale)):
            for given in (rows, rows.numpy(), rows.long()):
                assert torch.allclose(apply(given).double(), expected, atol=1e-6)


# -------------------------------------------------------------------------------------------------------------- splits
@pytest.mark.parametrize("labels", [None, torch.arange(101) % 7])
def test_train_and_validation_rows_are_disjoint_and_complete(labels):
    train, held = split_indices(101, validation=30, labels=labels)
    assert len(held) == 30
    assert torch.equal(torch.cat([train, held]).sort().values, torch.arange(101))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(held, held.sort().values)


def test_stratified_shares_follow_the_largest_remainder():
    """held · n_c / N = 3.6, 2.4, 1.0 for 36, 24 and 10 of 70 rows and 7 held: floors 3, 2, 1 and the one left to class 0."""
    labels = torch.repeat_interleave(torch.tensor([5, 2, 9]), torch.tensor([36, 24, 10]))
    _, held = split_indices(70, validation=7, labels=labels, seed=4)
    assert labels[held].bincount(minlength=10)[[5, 2, 9]].tolist() == [4, 2, 1]


@pytest.mark.parametrize("labels", [None, torch.arange(20) % 2])
def test_every_row_is_held_out_equally_often(labels):
    """Each of 20 rows is held in a share 0.2 of 400 seeds, within 4 standard errors."""
    times = torch.zeros(20)
    for seed in range(400):
        times[split_indices(20, validation=4, seed=seed, labels=labels)[1]] += 1
    assert ((times / 400 - 0.2).abs() < 4 * (0.2 * 0.8 / 400) ** 0.5).all()


def test_the_seed_alone_decides_and_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    first = split_indices(50, validation=0.2, seed=3)
    torch.manual_seed(99)
    again = split_indices(50, validation=0.2, seed=3)
    other = split_indices(50, validation=0.2, seed=4)
    torch.random.set_rng_state(before)
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
    split_indices(50, validation=10)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_share_is_a_number_of_rows():
    assert len(split_indices(1000, validation=0.1)[1]) == 100


@pytest.mark.parametrize("validation", [0, 10, -1, 0.0, 1.0, 1.5, 11])
def test_a_validation_set_must_leave_both_parts_with_rows(validation):
    refuses(lambda: split_indices(10, validation=validation), "between 1 and 9 validation rows of 10")


def test_wrong_types_and_label_shapes_are_refused():
    refuses(lambda: split_indices(10, validation=True), "expected validation as a number", TypeError)
    refuses(lambda: split_indices(10, validation=2, labels=torch.zeros(9, dtype=torch.int64)), "labels of shape")


def test_image_sets_are_cut_with_their_labels():
    labels = torch.arange(40) % 4
    images = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(40, 1, 2, 2)
    train, held = train_validation(ImageSet(images, labels, "forty", tuple("abcd")), validation=8, seed=1)
    assert held.labels.bincount().tolist() == [2] * 4
    for part in (train, held):
        assert torch.equal(part.images[:, 0, 0, 0].long() % 4, part.labels)
    forty = ImageSet(images, labels, "forty", tuple("abcd"))
    loose = train_validation(forty, validation=8, seed=1, stratified=False)[1]
    assert torch.equal(loose.images[:, 0, 0, 0].long(), split_indices(40, validation=8, seed=1)[1])
