"""Settings that must be numbers, wherever they are given."""

import re

import numpy as np
import pytest
import torch

import dissensus as ds
import tiny
from dissensus.data import Batches
from dissensus.utils.checks import fraction, integer, number, one_of


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
    [
        (ds.MCDropout, "rate"),
        (ds.SWAG, "posterior_temperature"),
        (ds.TRADI, "bandwidth"),
        (ds.GaussianPerturbation, "noise"),
    ],
)
def test_settings_that_are_no_numbers_are_named(method, keyword):
    with pytest.raises(TypeError, match=f"^expected {keyword} as a number, got '0.5'; pass a float"):
        method(tiny.mlp(dropout=0.1), **{keyword: "0.5"})


def test_numbers_of_other_libraries_are_numbers():
    for value in (3, np.int64(3)):
        assert integer("samples", value) == 3
    for value in (3, 0.5, np.float32(0.5), torch.tensor(0.5)):
        assert number("noise", value) is value


def test_a_batch_size_is_a_whole_number():
    x, y = tiny.points()
    for value in ("5", 2.5):
        with pytest.raises(TypeError, match=r"^expected batch_size as a whole number"):
            Batches(x, y, batch_size=value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: integer("rank", 0), "expected rank of at least 1, got 0; pass a larger number"),
        (
            lambda: integer("start", -1, least=0, hint="0 is the start"),
            "expected start of at least 0, got -1; 0 is the start",
        ),
        (
            lambda: fraction("rate", 1.0),
            "expected rate above 0 and below 1, got 1.0; pass a number within these bounds",
        ),
        (lambda: number("std", float("nan")), "expected std as a finite number, got nan"),
        (lambda: number("std", -1, least=0), "expected std of at least 0, got -1"),
        (lambda: number("level", 1.5, above=0, most=1), "expected level above 0 and of at most 1, got 1.5"),
        (lambda: one_of("mode", "c", ["a", "b"]), "expected mode of a, b, got 'c'; name one of them"),
        (lambda: one_of("bits", True, [1, 2]), "expected bits of 1, 2, got True"),
    ],
)
def test_a_value_out_of_bounds_is_one_error(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


def test_values_within_bounds_come_back():
    assert integer("rank", 1) == 1
    assert fraction("rate", 0.5) == 0.5
    assert number("level", 1, above=0, most=1) == 1
    assert one_of("mode", "a", {"a": 1}) == "a"
