"""Settings that must be numbers, wherever they are given."""

import re

import numpy as np
import pytest
import torch

import dissensus as ds
import tiny
from dissensus.data import Batches
from dissensus.numerics.checks import check_number, check_whole


@pytest.mark.parametrize(
    ("method", "keyword", "value"),
    [
        (ds.Laplace, "samples", "30"),
        (ds.Laplace, "samples", 2.5),
        (ds.MCDropout, "samples", "30"),
        (ds.MCDropout, "samples", 2.5),
        (ds.SWAG, "rank", 2.5),
        (ds.SWAG, "start", 2.5),
        (ds.SWAG, "every", "2"),
        (ds.TRADI, "features", 2.5),
        (ds.SnapshotEnsemble, "members", "3"),
    ],
)
def test_counts_that_are_no_whole_numbers_are_named(method, keyword, value):
    with pytest.raises(
        TypeError, match=rf"^expected {keyword} as a whole number, got {re.escape(repr(value))}; pass an int"
    ):
        method(tiny.mlp(dropout=0.1), **{keyword: value})


@pytest.mark.parametrize(
    ("method", "keyword"),
    [(ds.MCDropout, "rate"), (ds.SWAG, "scale"), (ds.TRADI, "bandwidth"), (ds.GaussianPerturbation, "noise")],
)
def test_settings_that_are_no_numbers_are_named(method, keyword):
    with pytest.raises(TypeError, match=f"^expected {keyword} as a number, got '0.5'; pass a float"):
        method(tiny.mlp(dropout=0.1), **{keyword: "0.5"})


def test_numbers_of_other_libraries_are_numbers():
    for value in (3, np.int64(3)):
        check_whole("samples", value)
    for value in (3, 0.5, np.float32(0.5), torch.tensor(0.5)):
        check_number("noise", value)


def test_a_batch_size_is_a_whole_number():
    x, y = tiny.points()
    for value in ("5", 2.5):
        with pytest.raises(TypeError, match=r"^expected batch_size as a whole number"):
            Batches(x, y, batch_size=value)
