"""Standardising is undone exactly, measured on train rows alone, and safe for columns that never vary."""

import pytest
import torch
from sklearn.preprocessing import StandardScaler

from dissensus.data import Standardiser
from dissensus.data.input_transforms import RowInputs, as_input_transform
from refusals import refuses


def test_rows_agree_with_scikit_learn():
    x = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 7 + 3
    train, test = x[:40], x[40:]
    reference = StandardScaler().fit(train.numpy())
    torch.testing.assert_close(
        Standardiser.of_rows(train)(test), torch.from_numpy(reference.transform(test.numpy())), rtol=1e-12, atol=1e-12
    )


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
    torch.testing.assert_close(
        standardiser.std[:2], scaled.std((0, 2, 3), correction=0)[:2, None, None], rtol=1e-12, atol=0
    )
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


def test_shapes_it_cannot_mean_are_refused():
    refuses(lambda: Standardiser.of_rows(torch.zeros(3)), "rows of shape")
    refuses(lambda: Standardiser.of_channels(torch.zeros(2, 1, 3, 3)), "uint8 images")


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
    refuses(lambda: one(torch.zeros(5, 3)), "expected 1 columns")
    refuses(lambda: grey(torch.zeros(2, 3, 4, 4)), "expected 1 channels")
    assert rows.inverse(torch.zeros(7, 5, 3)).shape == (7, 5, 3)  # of every member
    assert one(torch.zeros(5)).shape == (5,)


def test_columns_of_a_frame_keep_their_order():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"age": [20.0, 30, 40], "pay": [1e3, 2e3, 5e3]})
    scale = Standardiser.of_rows(frame)
    for apply in (scale, as_input_transform(scale), RowInputs(**as_input_transform(scale).config())):
        with pytest.raises(
            ValueError, match="expected the columns age, pay in this order, as in training, got pay, age"
        ):
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
