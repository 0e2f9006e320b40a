"""Intervals and p-values of a mean over seeds: against scipy, against each other, and by how often they are wrong."""

import math
import random

import pytest
import scipy.stats
import torch

from dissensus.bench.report.comparisons import (
    Spread,
    holm_level,
    holm_p_values,
    spread_of,
    student_quantile,
    student_tail,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 19, 50])
def test_students_t_is_scipys(freedom):
    for t in (0.0, 0.1, 1.0, 2.5, 12.7, 60.0):
        assert student_tail(t, freedom) == pytest.approx(2 * scipy.stats.t.sf(t, freedom), abs=1e-13)
    for level in (0.5, 0.95, 0.999):
        assert student_quantile(level, freedom) == pytest.approx(scipy.stats.t.ppf(0.5 + level / 2, freedom), rel=1e-9)


def test_seeds_alone_are_the_paired_t_test_and_examples_alone_the_z_test():
    differences = [0.3, -0.1, 0.4, 0.25]
    found = spread_of(differences, 0.0)
    theirs = scipy.stats.ttest_1samp(differences, 0)
    mean = sum(differences) / 4
    assert found.p_value(mean) == pytest.approx(theirs.pvalue, rel=1e-9)
    low, high = theirs.confidence_interval(0.9)
    assert found.half_width(0.9) == pytest.approx((high - low) / 2, rel=1e-9)
    assert Spread(0.0, 0, 0.5).p_value(1.0) == pytest.approx(2 * scipy.stats.norm.sf(2.0), rel=1e-12)
    assert Spread(0.0, 0, 0.5).half_width() == pytest.approx(0.5 * scipy.stats.norm.ppf(0.975), rel=1e-12)


def test_both_add_up_in_squares():
    t, z = scipy.stats.t.ppf(0.975, 2), scipy.stats.norm.ppf(0.975)
    assert Spread(0.3, 2, 0.4).half_width() == pytest.approx(math.hypot(0.3 * t, 0.4 * z), rel=1e-9)


def test_nothing_to_vary_and_no_difference():
    for nothing in (Spread(0.0, 0, 0.0), Spread(0.0, 2, 0.0)):
        assert math.isnan(nothing.half_width())
        assert math.isnan(nothing.p_value(0.1))
    assert Spread(0.3, 2, 0.1).p_value(0.0) == 1.0
    assert Spread(0.0, 0, 0.1, 5).p_value(0.0) == 1.0
    assert spread_of([1.5], 0.2, 7) == Spread(0.0, 0, 0.2, 7)


@pytest.mark.parametrize("n", [2, 3, 8, 31, 400])
def test_one_seed_is_the_paired_t_test_over_examples(n):
    differences = [0.3 + math.sin(3.0 * i) for i in range(n)]
    theirs = scipy.stats.ttest_1samp(differences, 0)
    found = Spread(0.0, 0, scipy.stats.sem(differences), n)
    assert found.p_value(sum(differences) / n) == pytest.approx(theirs.pvalue, rel=1e-8)
    low, high = theirs.confidence_interval(0.95)
    assert found.half_width() == pytest.approx((high - low) / 2, rel=1e-9)


def test_few_examples_beside_seeds_are_counted_by_students_t_too():
    t = scipy.stats.t.ppf(0.975, 4)
    for n in (3, 5, 10, 30, 900):
        u = scipy.stats.t.ppf(0.975, n - 1)
        # Wallace's formula is on the safe side, 4 % at three examples
        found, exact = Spread(0.3, 4, 0.4, n).half_width(), math.hypot(0.3 * t, 0.4 * u)
        assert exact < found < exact * (1 + 0.3 / (n - 1) ** 3 + 1e-3)


def test_an_interval_holds_zero_exactly_where_p_is_not_below():
    draw = random.Random(0)
    for _ in range(2000):
        size = 10 ** draw.uniform(-4, 2)
        one = draw.random() < 0.2
        found = Spread(
            0.0 if one else size * draw.random(),
            0 if one else draw.randint(1, 12),
            draw.choice([1e-3 if one else 0.0, draw.random()]) * size,
            draw.choice([2, 3, 10, 400, 5000]),
        )
        level = draw.choice([0.5, 0.9, 0.95, 0.99, 0.9995])
        # half of the means at the edge itself, where rounding would show
        mean = found.half_width(level) * draw.choice([1 + 1e-7, 1 - 1e-7, draw.expovariate(1)]) * draw.choice([-1, 1])
        outside = abs(mean) > found.half_width(level)
        assert outside == (found.p_value(mean) < 1 - level), (found, mean, level)


def test_holm_is_the_step_down_procedure_and_its_intervals_agree():
    assert holm_p_values([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_p_values([0.5, 0.9]) == [1.0, 1.0]
    assert holm_p_values([]) == []
    draw = random.Random(1)
    for _ in range(300):
        several = [
            (Spread(1.0, draw.randint(1, 9), draw.random()), draw.gauss(0, 12)) for _ in range(draw.randint(1, 8))
        ]
        alone = [each.p_value(mean) for each, mean in several]
        level = holm_level(alone)
        for (each, mean), adjusted in zip(several, holm_p_values(alone), strict=True):
            assert (abs(mean) > each.half_width(level)) == (adjusted < 0.05)


def simulated(seeds: int, *, of_seeds: float, of_examples: float, effect: float = 0.0, count: int = 2000) -> float:
    """Share of intervals without zero: `count` differences of two methods over so many seeds on 60 examples.

    d_si = effect + seed_s + (example_i + noise_si): what examples have in common between seeds, and what they have not, have
    equal shares. Means over examples have the standard deviations of_seeds and of_examples (one seed alone, for both).
    """
    generator = torch.Generator().manual_seed(1000 * seeds + int(100 * of_seeds))
    n, kwargs = 60, {"generator": generator, "dtype": torch.float64}
    seed = of_seeds * torch.randn(count, seeds, 1, **kwargs)
    scale = of_examples * (n / 2) ** 0.5
    example, noise = scale * torch.randn(count, 1, n, **kwargs), scale * torch.randn(count, seeds, n, **kwargs)
    d = effect + seed + example + noise  # (count, S, n)
    values, examples = d.mean(2), (d.mean(1).var(1, correction=0) / n).sqrt()  # the bootstrap's variance of a mean
    pairs = zip(values.tolist(), examples.tolist(), strict=True)
    return sum(abs(sum(v) / seeds) > spread_of(v, e).half_width() for v, e in pairs) / count


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("noise", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3), (1.0, 1.0), (0.3, 1.0)], ids=str)
def test_methods_that_are_equal_differ_in_at_most_one_comparison_in_twenty(seeds, noise):
    share = simulated(seeds, of_seeds=noise[0], of_examples=noise[1])
    # 5 % of 2000 have a standard deviation of 0.49 points; 60 examples make z too small by 0.7 points
    assert share <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 2000)
    if noise[1] == 0:  # the t test is exact
        assert share == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 2000))


def test_a_real_difference_is_found():
    # five seeds, both noises: the standard error is √(1/5 + 0.6) = 0.89, and the effect 4.5 of them
    assert simulated(5, of_seeds=1.0, of_examples=1.0, effect=4.0, count=500) > 0.95
    # two seeds, seed noise alone: with one degree of freedom the same 4.5 errors are found about every third time
    assert 0.2 < simulated(2, of_seeds=1.0, of_examples=0.0, effect=3.2, count=500) < 0.45
