import json
import logging

import numpy as np
import pytest
import torch

from dissensus.data.table_encoding import TableEncoder
from refusals import refuses

pd = pytest.importorskip("pandas")


@pytest.fixture
def frame():
    return pd.DataFrame(
        {
            "size": [10.0, 20.0, np.nan, 40.0, 30.0],
            "rooms": pd.array([1, None, 3, 4, 2], dtype="Int64"),
            "city": ["Oslo", None, "Rome", "Oslo", "Rome"],
            "zone": pd.Categorical([7, 9, 9, 7, 7]),
            "sold": pd.to_datetime(["2020-01-01", "2020-01-02", None, "2020-01-04", "2020-01-03"]),
            "new": [True, False, True, True, False],
            "country": ["X"] * 5,
            "floors": [2] * 5,
        },
        index=[4, 8, 15, 16, 23],
    )


def test_every_kind_of_column_becomes_numbers(frame):
    encoder = TableEncoder.of(frame)
    rows = dict(zip(encoder.features, encoder(frame, dtype=torch.float64).T.tolist(), strict=True))
    z = (np.array([10, 20, 40, 30]) - 25) / np.std([10, 20, 40, 30])
    assert rows["size"] == pytest.approx([z[0], z[1], 0, z[2], z[3]])
    assert rows["size missing"] == [0, 0, 1, 0, 0]
    assert rows["rooms missing"] == [0, 1, 0, 0, 0]
    assert [rows["city=Oslo"], rows["city=Rome"], rows["city missing"]] == [
        [1, 0, 0, 1, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0],
    ]  # fmt: skip
    assert rows["zone=7"] == [1, 0, 0, 1, 1]
    assert rows["sold"] == pytest.approx(np.array([-1.5, -0.5, 0, 1.5, 0.5]) / np.std([1, 2, 4, 3]))
    assert rows["new"] == pytest.approx((np.array([1, 0, 1, 1, 0]) - 0.6) / np.sqrt(0.24))
    assert rows["country=X"] == [1] * 5
    assert rows["floors"] == [0] * 5
    assert len(rows) == 14


def test_columns_are_found_by_name(frame):
    encoder = TableEncoder.of(frame)
    assert torch.equal(encoder(frame[frame.columns[::-1]].assign(price=1.0)), encoder(frame))
    assert torch.equal(encoder({name: list(frame[name]) for name in frame}), encoder(frame))
    refuses(lambda: encoder(frame.drop(columns="city")), "expected the columns city, got size")
    refuses(lambda: encoder(frame.to_numpy()), "by name, got an array")


def test_rows_do_not_depend_on_their_neighbours(frame):
    encoder = TableEncoder.of(frame)
    for i in range(len(frame)):
        assert torch.equal(encoder(frame.iloc[[i]]), encoder(frame)[i : i + 1])


def test_a_config_in_json_is_the_whole_encoder(frame):
    encoder = TableEncoder.of(frame, categories=["floors"])
    assert TableEncoder.of_config(json.loads(json.dumps(encoder.config()))) == encoder
    assert "floors=2" in encoder.features


def test_what_training_rows_did_not_have_is_logged(frame, caplog):
    encoder = TableEncoder.of(frame)
    with caplog.at_level(logging.WARNING, "dissensus"):
        encoder(frame)
        assert not caplog.records
        new = encoder(frame.assign(city="Bern", zone="7", floors=np.nan))
    assert new[:, [encoder.features.index(each) for each in ("city=Oslo", "city missing", "zone=7")]].sum() == 0
    assert "city: 5 of levels" in caplog.text
    assert "'7'" in caplog.text  # text is not the number 7
    assert "floors: 5 missing" in caplog.text


def test_codes_that_turn_to_floats_beside_a_missing_one_stay_the_same_levels():
    encoder = TableEncoder.of(pd.DataFrame({"code": [1, 2, 3]}), categories=["code"])
    assert encoder(pd.DataFrame({"code": [2.0, np.nan]})).tolist() == [[0, 1, 0], [0, 0, 0]]


def test_rare_levels_share_a_feature_with_unknown_ones():
    encoder = TableEncoder.of({"id": list("aaabbcd")}, most_levels=2)
    assert encoder.features == ["id=a", "id=b", "id other"]
    assert encoder({"id": ["a", "d", "z", None]}).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1]]


def test_large_numbers_keep_their_differences():
    """In float32 all of them are one number."""
    stamps = 1.7e9 + np.arange(100.0)
    z = TableEncoder.of({"t": stamps})({"t": stamps}).flatten()
    expected = torch.from_numpy((np.arange(100) - 49.5) / np.std(np.arange(100)))
    assert torch.allclose(z.double(), expected, atol=1e-6)
    assert TableEncoder.of({"t": [1e300, -1e300]})({"t": [1e300, 0.0]}).tolist() == [[1], [0]]


def test_arrays_have_columns_by_position():
    x = torch.tensor([[0.0, 5.0], [2.0, 6.0]])
    encoder = TableEncoder.of(x, categories=[1])
    assert encoder(x.numpy()).tolist() == [[-1, 1, 0], [1, 0, 1]]
    assert torch.equal(encoder(x.numpy().astype(object)), encoder(x))
    assert torch.equal(encoder(pd.DataFrame(x.numpy(), columns=["a", "b"])), encoder(x))


@pytest.mark.parametrize(("table", "error"), [
    (np.zeros(3), r"shape \(N, D\), got ndarray of shape \(3,\); pass one row"), ({}, "got 0 columns"),
    (np.zeros((0, 2)), "pass the training rows"), ({"a": [1, 2], "b": [1]}, "columns of one length"),
    ({"a": [1.0, np.inf]}, "column 'a', got infinity in row 1"),
    ({"a": np.array([1j, 2])}, "real numbers in column 'a'"),
    (pd.DataFrame([[1, 2]], columns=["a", "a"]), "every column name once"),
    (pd.Series([1.0, 2.0]), r"got Series of shape \(2,\).*to_frame"),
])  # fmt: skip
def test_tables_that_are_none_are_refused_in_words(table, error):
    refuses(lambda: TableEncoder.of(table), error)


def test_text_in_a_column_of_numbers_is_refused():
    encoder = TableEncoder.of({"a": [1.0, 2.0]})
    refuses(lambda: encoder({"a": [1.0, "three"]}), "numbers in column 'a', got 'three'")
    refuses(lambda: TableEncoder.of({"a": [1.0]}, categories=["b"]), "expected categories among the columns a, got b")


def test_dates_far_off_and_dates_as_objects_are_dates():
    far = np.array(["2020-01-01", "2021-01-01", "9999-12-31"], dtype="datetime64[s]")
    for column in (far, pd.Series(far), pd.Series(far.astype(object)), list(far.astype(object))):
        (made,) = TableEncoder.of({"end": column}).columns
        assert made.mean == pytest.approx(np.mean(far.astype(np.int64)))
        assert made.std == pytest.approx(np.std(far.astype(np.int64)))


def test_text_that_reads_as_numbers_is_taken_as_categories_with_a_word(caplog):
    price = ["1,234", " 99.5", "-2", "?"]
    TableEncoder.of({"price": price, "door": ["2", "3more", "5more", "-"], "zone": pd.Categorical(["1", "2"] * 2)})
    assert caplog.messages == [
        "price is treated as categories, though its text looks like numbers (' 99.5'): convert it, or name it in categories"
    ]
    TableEncoder.of({"price": price}, categories=["price"])
    assert len(caplog.messages) == 1


def test_which_levels_are_kept_does_not_depend_on_the_order_of_rows():
    words = [f"w{i}" for i in range(9)]
    assert TableEncoder.of({"w": words}, most_levels=4) == TableEncoder.of({"w": words[::-1]}, most_levels=4)
