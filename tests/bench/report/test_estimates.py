"""Rows as arrays, means with intervals of seeds and examples, slopes, and what claims show."""

import math

import numpy as np
import pytest

from dissensus.bench.report.comparisons import (
    VerdictWords,
    array_over,
    claim_of,
    mean_interval,
    slope_weights,
    student_quantile,
    verdicts,
)


def test_intervals_count_seeds_and_examples():
    right = np.array([1.0, 0.0, 1.0, 1.0])  # of four examples
    values = np.array([right - 0.05, right + 0.05, right + 0.15])  # (S, n)
    value, lower, upper, seeds = mean_interval(values)
    assert (value, seeds) == (pytest.approx(0.8), 3)
    # s = 0.1; sd of examples 0.5, n = 4, whose t is taken by a formula that is 1.3 % too large
    half = math.hypot(student_quantile(0.95, 2) * 0.1 / 3**0.5, student_quantile(0.95, 3) * 0.5 / 2)
    assert (upper - value, value - lower) == pytest.approx((half, half), rel=0.013)
    seeds_alone = mean_interval(values.mean(1, keepdims=True))
    assert seeds_alone[2] - value == pytest.approx(student_quantile(0.95, 2) * 0.1 / 3**0.5)
    missing = np.concatenate([values, np.full((1, 4), math.nan)])  # a seed that diverged
    assert mean_interval(missing) == mean_interval(values)
    assert mean_interval(missing[3:])[3] == 0


def test_the_mean_of_slopes_over_seeds_is_the_slope_of_all_points():
    widths, generator = (375, 750, 1500), np.random.default_rng(0)
    errors = np.array(widths) ** -0.5 * np.exp(0.3 * generator.standard_normal((40, 3)))  # (S, W)
    slopes = np.log2(errors) @ slope_weights(widths)
    value, lower, upper, _ = mean_interval(slopes[:, None])
    assert value == pytest.approx(np.polyfit(np.log(np.tile(widths, 40)), np.log(errors).ravel(), 1)[0], abs=1e-12)
    half = student_quantile(0.95, 39) * slopes.std(ddof=1) / 40**0.5
    assert (value - lower, upper - value) == pytest.approx((half, half))


def test_rows_become_an_array_over_their_columns_with_nan_where_there_is_none():
    rows = [{"a": a, "b": b, "one": 10 * a + b, "many": np.array([a, b, 7])} for a in (1, 2) for b in (3, 4)]
    found = array_over(rows[:-1], "many", b=(3, 4), a=(1, 2))
    assert found.shape == (2, 2, 3)
    assert found[1, 0].tolist() == [1, 4, 7]
    assert np.isnan(found[1, 1]).all()
    assert array_over(rows, "one", a=(2,), b=(3, 4)).tolist() == [[[23], [24]]]
    assert array_over(rows, "one", a=(), b=(3, 4)).shape == (0, 2, 1)


@pytest.mark.parametrize(
    ("centre", "word"), [(0.03, "above"), (-0.03, "below"), (0.0, "equal"), (0.01, "neither")], ids=str
)
def test_words_go_by_where_the_interval_lies(centre, word):
    values = np.array([[centre - 1e-3], [centre], [centre + 1e-3]])  # half-width 0.0025
    claim = claim_of("Which?", "this one", values, "points")
    words = VerdictWords("above", "below", "neither", near=0.01, equal="equal")
    (said,) = verdicts([claim], {"Which?": words, "Unasked?": words})
    assert said.startswith(f"Which? this one: {word}, {claim.text}")
    assert claim.text.startswith(f"{100 * centre:+.2f} (".replace("-", "−"))


def test_the_interval_beside_a_word_is_adjusted_as_the_word_is():
    """What one claim alone shows is not shown among two, and the interval is wider there."""
    words = {"Which?": VerdictWords("above", "below", "neither", near=0.01, equal="equal")}
    one = claim_of("Which?", "this one", np.array([[0.013], [0.02], [0.027]]), "points")  # half-width 0.0174
    far = claim_of("Which?", "that one", np.array([[0.049], [0.05], [0.051]]), "points")  # half-width 0.0025
    near = one._replace(value=0.0, lower=-0.009, upper=0.009)
    assert "this one: neither, +2.00 (+0.26 … +3.74)" in verdicts([one], words)[0]
    (said,) = verdicts([far, far._replace(about="this one", value=0.013, lower=0.0105, upper=0.0155)], words)
    assert "that one: above, +5.00 (+4.75 … +5.25)" in said  # the first of two, and then only one is left to adjust for
    assert "this one: above, +1.30 (+1.05 … +1.55)" in said
    assert "equal, +0.00 (−0.90 … +0.90)" in verdicts([near], words)[0]
    ratio = student_quantile(0.975, 2) / student_quantile(0.95, 2)
    assert f"neither, +0.00 (−{0.9 * ratio:.2f} … +{0.9 * ratio:.2f})" in verdicts([near, near], words)[0]
