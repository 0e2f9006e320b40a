"""Settings that must be numbers, wherever they are given, and settings under their former names."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import dissensus as ds
import tiny
from dissensus.data import Batches
from dissensus.storage.folder import CHECKSUM, METADATA, checksum
from dissensus.utils.checks import fraction, integer, number, one_of
from refusals import refuses


@pytest.mark.parametrize(
    ("method", "keyword", "value"),
    [
        (ds.Laplace, "samples", "30"), (ds.Laplace, "samples", 2.5), (ds.MCDropout, "samples", "30"),
        (ds.MCDropout, "samples", 2.5), (ds.SWAG, "rank", 2.5), (ds.SWAG, "start", 2.5), (ds.SWAG, "every", "2"),
        (ds.TRADI, "features", 2.5), (ds.SnapshotEnsemble, "members", "3"),
    ],
)  # fmt: skip
def test_counts_that_are_no_whole_numbers_are_named(method, keyword, value):
    told = rf"^expected {keyword} as a whole number, got {re.escape(repr(value))}; pass an int"
    refuses(lambda: method(tiny.mlp(dropout=0.1), **{keyword: value}), told, TypeError)


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
    refuses(call, f"^{re.escape(message)}")


def test_values_within_bounds_come_back():
    assert integer("rank", 1) == 1
    assert fraction("rate", 0.5) == 0.5
    assert number("level", 1, above=0, most=1) == 1
    assert one_of("mode", "a", {"a": 1}) == "a"


ROWS = [  # method, former settings, settings now
    (ds.DropoutEnsemble, {"keep": 0.9}, {"rate": 0.1}),
    (ds.DropoutEnsemble, {"keep": 0.7}, {"rate": 0.3}),
    (ds.NodeBNN, {"gamma": 4.0, "rate": "curvature"}, {"posterior_temperature": 5.0, "lr": "curvature"}),
    (ds.SWAG, {"scale": 0.25}, {"posterior_temperature": 0.25}),
]
NEEDED = {ds.NodeBNN: {"data_size": 12}}


@pytest.mark.parametrize(("method", "former", "now"), ROWS)
def test_a_file_with_former_names_loads(method, former, now, tmp_path):
    posterior = method(ds.nets.MLP(2, 3, hidden=(4,)), **now, **NEEDED.get(method, {}))
    if method is ds.SWAG:
        ds.fit(posterior, [(torch.randn(12, 2), tiny.points()[1])] * 2, epochs=4, progress=False)
    ds.refresh(posterior, [])
    ds.save(posterior, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()[METADATA])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    del config[CHECKSUM]
    assert now.items() <= config["arguments"].items()
    config["arguments"] = {k: v for k, v in config["arguments"].items() if k not in now} | former
    config[CHECKSUM] = checksum(config, tensors)
    save_file(tensors, path, {METADATA: json.dumps(config)})
    loaded = ds.load(tmp_path)
    assert loaded.config() == posterior.config()
    assert torch.equal(loaded.predict(torch.ones(3, 2)).mean, posterior.predict(torch.ones(3, 2)).mean)


@pytest.mark.parametrize(("method", "former", "now"), ROWS)
def test_a_former_keyword_is_an_error_that_names_the_new_one(method, former, now):
    for (old, value), new in zip(former.items(), now, strict=True):
        with pytest.raises(
            TypeError, match=f"expected a keyword of {method.__name__}, one of .*, got '{old}'; pass {new}="
        ):
            method(ds.nets.MLP(2, 3, hidden=(4,)), **{old: value}, **NEEDED.get(method, {}))
