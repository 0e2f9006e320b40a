"""Modulations: moments against samples and closed forms, and that a law survives JSON."""

import json
import math

import pytest
import torch

import dissensus as ds
from refusals import refuses

LAWS = [
    ds.Modulation.constant(1.3),
    ds.Modulation.sign(),
    ds.Modulation.sign(0.8),
    ds.Modulation.normal(0.6, 0.8),
    ds.Modulation.normal(0.7, 0.0),
    ds.Modulation.bernoulli(0.8),
    ds.Modulation.bernoulli(0.8, scale=1.25),
    ds.Modulation.between(0.3),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_moments_are_those_of_samples(law):
    n = 200_000
    drawn = law.sample((n,), torch.Generator().manual_seed(1), dtype=torch.float64)
    for expected, values in (
        (law.mean, drawn),
        (law.second_moment, drawn**2),
        (law.halves[0], drawn.clamp(min=0)),
        (law.halves[1], (-drawn).clamp(min=0)),
    ):
        assert float(values.mean()) == pytest.approx(expected, abs=4 * float(values.std()) / n**0.5 + 1e-12)


def test_moments_are_the_closed_forms():
    assert ds.Modulation.sign(0.8).collectivity == pytest.approx((2 * 0.8 - 1) ** 2)
    assert ds.Modulation.normal(1, 0.5).collectivity == pytest.approx(0.8)
    assert ds.Modulation.bernoulli(0.7).collectivity == pytest.approx(0.7)
    assert ds.Modulation.bernoulli(0.7, scale=1 / 0.7).collectivity == pytest.approx(0.7)  # whatever the scale
    assert ds.Modulation.between(0.3).collectivity == pytest.approx(0.09)
    assert ds.Modulation.between(0.3).second_moment == pytest.approx(1)
    assert ds.Modulation.normal(0, 1).halves == pytest.approx((1 / math.sqrt(2 * math.pi),) * 2)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_law_survives_json(law):
    assert ds.Modulation.from_config(json.loads(json.dumps(law.config()))) == law


def test_the_same_generator_gives_the_same_factors_and_leaves_the_global_one_alone():
    before = torch.random.get_rng_state()
    for law in LAWS:
        one, two = (law.sample((3, 4), torch.Generator().manual_seed(5)) for _ in range(2))
        assert torch.equal(one, two)
        assert one.shape == (3, 4)
        assert one.dtype == torch.float32
    assert torch.equal(torch.random.get_rng_state(), before)


def test_wrong_laws_are_refused():
    with pytest.raises(ValueError, match=r"expected p of at least 0 and of at most 1, got 1\.5; it is a probability"):
        ds.Modulation.sign(1.5)
    refuses(lambda: ds.Modulation.normal(0, -1), "expected std of at least 0, got -1")
    refuses(lambda: ds.Modulation.bernoulli(-0.1), r"expected keep of at least 0 and of at most 1, got -0\.1")
    refuses(lambda: ds.Modulation.constant(math.nan), "expected value as a finite number, got nan")
    with pytest.raises(ValueError, match="expected p of at least -1 and of at most 1, got 2; p² is the collectivity"):
        ds.Modulation.between(2)
    with pytest.raises(ValueError, match="expected law of constant, sign, normal, bernoulli, got 'cauchy'"):
        ds.Modulation.from_config({"law": "cauchy"})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'std'"):
        ds.Modulation.from_config({"law": "normal", "mean": 1.0})
    refuses(lambda: ds.Modulation.normal(0, 1).atoms(), "expected a discrete modulation", TypeError)


@pytest.mark.parametrize("make", [lambda: ds.Modulation.constant(0), lambda: ds.Modulation.bernoulli(0.0),
                                  lambda: ds.Modulation.bernoulli(0.5, 0.0), lambda: ds.Modulation.normal(0, 0)])  # fmt: skip
def test_factors_that_let_nothing_pass_are_refused(make):
    refuses(lambda: make(), "expected factors that are not all 0, got")
