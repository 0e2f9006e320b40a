"""Resampled measures, means with intervals and p-values, against metric functions and scipy; how often they are wrong."""

import math
import random

import numpy as np
import pytest
import scipy.stats
import torch

from dissensus import metrics
from dissensus.bench.report import measures as of_measures
from dissensus.bench.report.comparisons import (
    MethodComparison,
    ResampledMeasure,
    Spread,
    VerdictWords,
    array_over,
    claim_of,
    compare_methods,
    comparison_family,
    holm_level,
    holm_p_values,
    mean_interval,
    resample_measure,
    slope_weights,
    spread_of,
    verdicts,
)
from dissensus.bench.report.measures import Measure, measures, number_text
from dissensus.evaluation.evaluation import Evaluation
from dissensus.metrics import Interval
from dissensus.metrics.bootstrap import resample_counts, student_quantile, student_tail
from refusals import refuses
from thinning import thinned

NLL = Measure("nll", "NLL", "test", "low", samples=(("test/nll",),))


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def evaluation(nll: torch.Tensor, target: torch.Tensor | None = None) -> Evaluation:
    arrays = {"test/nll": nll} if target is None else {"test/nll": nll, "test/target": target}
    return Evaluation("classification", {"nll": float(nll.mean())}, arrays, "max_probability")


def test_weights_count_draws_with_replacement():
    weights = resample_counts(50, 400, torch.Generator().manual_seed(0))
    assert (weights.sum(1) == 50).all()
    # multinomial: mean 1, variance 1 − 1/n
    assert float(weights.mean()) == 1
    assert float(weights.var()) == pytest.approx(1 - 1 / 50, abs=4 * (2 / weights.numel()) ** 0.5 * 1.5)


def test_measures_on_resamples_are_the_metrics_of_the_resamples():
    """Every statistic that a report knows, on drawn rows and with their weights."""
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(80, 3, generator=generator, dtype=torch.float64)
    logits[:20] = logits[20:40]  # ties
    y = torch.randint(3, (80,), generator=generator)
    log_p = logits.log_softmax(1)
    foreign = (2 * torch.rand(50, generator=generator, dtype=torch.float64)).round(decimals=1)
    arrays = {
        "test/correct": (log_p.argmax(1) == y).double(),
        "test/nll": metrics.nll_values(log_p, y),
        "test/brier": metrics.brier_values(log_p.exp(), y),
        "test/confidence": log_p.exp().amax(1),
        "test/score/max_probability": metrics.max_probability_score(log_p),
        "ood/far/score/max_probability": foreign,
    }
    foreign_keys = (f"ood/far/{k}" for k in ("auroc", "aupr", "fpr95", "fpr95_in"))
    keys = ("accuracy", "nll", "brier", "ece", "aurc", *foreign_keys)
    given = Evaluation("classification", dict.fromkeys(keys, 0.0), arrays, "max_probability", ("far",))
    weights = [resample_counts(n, 5, generator) for n in (80, 50)]
    found = {}
    for measure in measures(given):
        samples = [arrays[name] for group in measure.samples for name in group]
        found[measure.key] = measure.statistic(weights[: len(measure.samples)], *samples)
    for r in range(5):
        i, o = (torch.repeat_interleave(torch.arange(w.shape[1]), w[r].long()) for w in weights)
        inside, outside = arrays["test/score/max_probability"][i], foreign[o]
        expected = {
            "accuracy": arrays["test/correct"][i].mean(), "nll": metrics.nll(log_p[i], y[i]),
            "brier": metrics.brier(log_p[i].exp(), y[i]), "ece": metrics.ece(log_p[i].exp(), y[i]),
            "aurc": metrics.aurc(-inside, 1 - arrays["test/correct"][i]),
            "ood/far/auroc": metrics.auroc(inside, outside), "ood/far/aupr": metrics.aupr(inside, outside),
            "ood/far/fpr95": metrics.fpr95(inside, outside), "ood/far/fpr95_in": metrics.fpr95_in(inside, outside),
        }  # fmt: skip
        for key, values in found.items():
            assert float(values[r]) == pytest.approx(float(expected[key]), abs=1e-12), key
    assert len(measures(given)) == len(keys)
    root = of_measures.root_mean(weights[:1], arrays["test/nll"])
    torch.testing.assert_close(root.square(), of_measures.weighted_mean(weights[:1], arrays["test/nll"]))


def test_one_seed_counts_examples_as_the_t_test_does():
    first = random_values(500)
    second = first + 0.02 * random_values(500, seed=1) + 0.002
    a, b = (resample_measure(NLL, [evaluation(v)], resamples=4000) for v in (first, second))
    pair, mine = compare_methods(a, b), a.interval()
    error = float((first - second).std()) / 500**0.5
    # the variance of 4000 draws has a relative error of √(2/4000), its root half of that
    assert pair.spread.examples == pytest.approx(error, rel=4 * (0.5 / 4000) ** 0.5)
    assert pair.p_value == pytest.approx(float(scipy.stats.ttest_rel(first, second).pvalue), rel=0.2)
    assert mine.estimate == float(first.mean())
    assert mine.upper - mine.lower == pytest.approx(2 * 1.96 * float(first.std()) / 500**0.5, rel=0.06)
    assert pair.counted_text == "test examples, not seeds"


def test_seeds_are_counted_by_students_t():
    same = torch.ones(100, dtype=torch.float64)
    several = resample_measure(NLL, [evaluation(same + shift) for shift in (0.0, 0.3, 0.9)])
    interval = several.interval()
    # examples do not vary: the t interval of 1, 1.3 and 1.9
    low, high = scipy.stats.ttest_1samp([1.0, 1.3, 1.9], 0).confidence_interval()
    assert (interval.lower, interval.upper) == (pytest.approx(low), pytest.approx(high))
    other = resample_measure(NLL, [evaluation(same + shift) for shift in (0.1, 0.35, 1.05)])
    pair = compare_methods(other, several)
    assert pair.p_value == pytest.approx(scipy.stats.ttest_rel([0.1, 0.35, 1.05], [0.0, 0.3, 0.9]).pvalue)
    assert pair.counted_text == "test examples and 3 seeds"


def test_seeds_are_paired_by_their_numbers_and_only_common_ones_are_compared():
    values = [evaluation(random_values(40, seed=i) + i) for i in range(3)]
    three = resample_measure(NLL, values, seeds=[0, 1, 2])
    two = resample_measure(NLL, [values[2], values[0]], seeds=[2, 0])
    assert compare_methods(three, two) is None  # the same numbers on both seeds
    moved = [evaluation(values[2].arrays["test/nll"].flip(0)), values[0]]
    pair = compare_methods(three, resample_measure(NLL, moved, seeds=[2, 0]))
    assert (pair.difference, pair.seeds, pair.p_value) == (pytest.approx(0.0, abs=1e-12), 2, pytest.approx(1.0))
    assert compare_methods(three, resample_measure(NLL, values, seeds=[7, 8, 9])) is None
    refuses(lambda: resample_measure(NLL, values, seeds=[0, 1, 1]), "got a seed twice")


def test_splits_are_counted_by_the_seeds_alone_whatever_their_sizes():
    rows = [random_values(n, seed=n) for n in (40, 40, 37)]
    split = resample_measure(NLL, [evaluation(each, target=each) for each in rows])
    assert split.seed_overlap == "own"
    low, high = scipy.stats.ttest_1samp([float(each.mean()) for each in rows], 0).confidence_interval()
    assert (split.interval().lower, split.interval().upper) == (pytest.approx(low), pytest.approx(high))
    pair = compare_methods(split, resample_measure(NLL, [evaluation(1.1 * each, target=each) for each in rows]))
    assert pair.counted_text == "3 seeds with test examples of their own"
    one = compare_methods(split.for_seeds([1]), resample_measure(NLL, [evaluation(1.1 * rows[1], rows[1])], seeds=[1]))
    assert one.counted_text == "test examples, not seeds"


def test_examples_in_another_order_are_counted_as_if_seeds_erred_alike():
    nll, target = random_values(200), torch.arange(200) % 7
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    ordered = resample_measure(NLL, [evaluation(nll, target), evaluation(nll, target)])
    shuffled = resample_measure(NLL, [evaluation(nll, target), evaluation(nll[order], target[order])])
    assert (ordered.seed_overlap, shuffled.seed_overlap) == ("shared", "shuffled")
    widths = [each.interval().upper - each.interval().lower for each in (ordered, shuffled)]
    assert widths[1] == pytest.approx(widths[0], rel=0.1)
    assert compare_methods(ordered, shuffled) is None  # not the same example by example


def test_resamples_are_shared_by_methods():
    values = random_values(50)
    wave = 1e-6 * random_values(50, seed=1)
    same = compare_methods(*(resample_measure(NLL, [evaluation(v)]) for v in (values, values + 0.3 + wave)))
    interval = same.interval()
    assert (interval.lower, interval.upper) == (pytest.approx(-0.3, abs=2e-6), pytest.approx(-0.3, abs=2e-6))
    assert same.p_value < 1e-9


def test_one_example_and_equal_differences_have_no_interval_and_no_p():
    one, other = (resample_measure(NLL, [evaluation(torch.tensor([value]))]) for value in (0.5521, 0.7))
    assert one.interval() is None
    assert compare_methods(one, other) is None
    values = random_values(50)
    methods = [resample_measure(NLL, [evaluation(values + shift)]) for shift in (0.0, 0.3)]  # equal up to rounding
    assert methods[0].interval() is not None
    assert compare_methods(*methods) is None
    # two splits, each better by the same: nothing says how far another split would be
    rows = [random_values(n, seed=n) for n in (40, 37)]
    splits = [resample_measure(NLL, [evaluation(each + shift, target=each) for each in rows]) for shift in (0.0, 0.1)]
    assert compare_methods(*splits) is None


def test_what_cannot_be_resampled_has_no_interval():
    bare = Evaluation("classification", {"nll": 1.0}, {}, "max_probability")
    assert resample_measure(NLL, [bare]).interval() is None
    assert resample_measure(NLL, [bare, bare]).interval() is None  # seeds alone would leave the examples out
    values = torch.rand(50)
    assert compare_methods(resample_measure(NLL, [bare]), resample_measure(NLL, [evaluation(values)])) is None
    infinite = resample_measure(NLL, [evaluation(torch.tensor([1.0, float("inf")]))])
    assert infinite.interval() is None
    assert compare_methods(infinite, infinite) is None
    assert compare_methods(*[resample_measure(NLL, [bare, bare])] * 2, seeds_alone=True) is None  # both the same
    two = [Evaluation("classification", {"nll": value}, {}, "max_probability") for value in (1.0, 1.5)]
    pair = compare_methods(resample_measure(NLL, [bare, bare]), resample_measure(NLL, two), seeds_alone=True)
    assert pair.counted_text == "2 seeds, not test examples"


def test_intervals_stay_inside_of_what_is_possible():
    accuracy = Measure("accuracy", "Accuracy", "test", "high", 100, samples=(("test/correct",),))
    correct = torch.cat([torch.ones(49), torch.zeros(1)])
    found = Evaluation("classification", {"accuracy": 0.98}, {"test/correct": correct}, "")
    interval = resample_measure(accuracy, [found]).interval()
    assert interval.upper == 1.0
    assert 0.9 < interval.lower < 0.98
    assert NLL.possible_range == (-float("inf"), float("inf"))  # a density may be above one


def test_interval_and_p_value_of_a_comparison_never_disagree():
    for seed in range(60):
        seeds, n = 1 + seed % 5, 30
        noise = random_values(2, seeds, n, seed=seed)
        first, second = noise + 0.5 * random_values(2, seeds, 1, seed=seed + 100) * (seed % 3)
        a, b = (resample_measure(NLL, [evaluation(each) for each in m], resamples=100) for m in (first, second + 0.4))
        pair = compare_methods(a, b)
        interval = pair.interval()
        assert (interval.lower <= 0 <= interval.upper) == (pair.p_value >= 0.05)


def test_a_family_may_be_adjusted_by_holm():
    pairs = {("nll", str(i)): comparison(difference) for i, difference in enumerate((2.5, 3.5, 0.1))}
    alone, together = comparison_family(pairs | {("nll", "none"): None}), comparison_family(pairs, holm=True)
    assert list(alone.p_values) == [("nll", "0"), ("nll", "1"), ("nll", "2")]
    assert [p < 0.05 for p in alone.p_values.values()] == [True, True, False]
    expected = [factor * p for factor, p in zip((2, 3, 1), alone.p_values.values(), strict=True)]
    assert list(together.p_values.values()) == pytest.approx(expected)
    for pair, each in together.comparisons.items():
        interval = each.interval(together.level)
        assert (interval.lower <= 0 <= interval.upper) == (together.p_values[pair] >= 0.05)
    assert comparison_family({}, holm=True).level == 0.95


def comparison(difference: float) -> MethodComparison:
    values, draws = {0: difference}, random_values(1, 1000) / float(random_values(1, 1000).std())
    both = (values, draws), ({0: 0.0}, 0 * draws)
    return compare_methods(*(ResampledMeasure(NLL, v, d, (None,), ((900,),)) for v, d in both))


def test_measures_know_which_way_is_better():
    assert NLL.goodness(0.1) > NLL.goodness(0.2)
    coverage = Measure("coverage90", "Coverage", "test", 0.9, 100, 1, "%")
    assert coverage.goodness(0.91) > coverage.goodness(0.8)
    assert coverage.goodness(0.89) == pytest.approx(coverage.goodness(0.91))
    assert coverage.text(0.913) == "91.3"
    assert Measure("cost/parameters", "Parameters", "cost", digits=0).text(199210.0) == "199,210"
    assert [m.key for m in measures(evaluation(torch.ones(3)))] == ["nll"]


@pytest.mark.parametrize(("value", "half", "signed", "text"), [
    (0.11920472, 0.0293, False, "0.119"),  # to the second digit of the half-width
    (96.7, 0.8, False, "96.70"),
    (96.7, 12.3, False, "97"),
    (199_210.4, 52.0, False, "199,210"),
    (1234.5678, None, False, "1,235"),
    (0.5, None, False, "0.50"),  # without an interval: two decimals
    (0.00004, None, False, "0.00004"),  # or its first digit, never a power of ten
    (-0.00004, 0.0045, True, "0.0000"),  # zero has no sign
    (0.00004, 0.0045, True, "0.0000"),
    (-0.0004, 0.12, False, "0.00"),
    (-0.0062, 0.12, False, "−0.01"),
    (0.0, 0.1, True, "0.00"),
    (1.0, 1e-9, False, "1.0000"),  # at most two decimals more than without an interval
    (math.nan, None, False, "nan"),
    (1.0, math.inf, False, "1.00"),
])  # fmt: skip
def test_a_number_is_shown_to_the_precision_of_its_interval(value, half, signed, text):
    assert number_text(value, half, signed=signed) == text


@pytest.mark.parametrize(("ends", "signed", "text"), [
    ((0.967, 0.959, 0.975), False, "95.90–97.50"),
    ((-0.0054, -0.0108, -0.00001), True, "−1.08 to 0.00"),
    ((0.015, 0.014999999, 0.015000001), False, "± 0.0000001"),  # not 1.5000–1.5000
])  # fmt: skip
def test_an_interval_has_the_decimals_of_its_value(ends, signed, text):
    accuracy = Measure("accuracy", "Accuracy", "test", "high", 100, 2, "%")
    assert accuracy.interval_text(Interval(*ends), (ends[2] - ends[1]) / 2, signed=signed) == text


# ----------------------------------------------------------------------------------- intervals and p-values over seeds
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
    assert found.p_value(sum(differences) / 4) == pytest.approx(theirs.pvalue, rel=1e-9)
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
    for _ in range(600):
        size = 10 ** draw.uniform(-4, 2)
        one = draw.random() < 0.2
        found = Spread(
            0.0 if one else size * draw.random(), 0 if one else draw.randint(1, 12),
            draw.choice([1e-3 if one else 0.0, draw.random()]) * size, draw.choice([2, 3, 10, 400, 5000]),
        )  # fmt: skip
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
    for _ in range(100):
        count = draw.randint(1, 8)
        several = [(Spread(1.0, draw.randint(1, 9), draw.random()), draw.gauss(0, 12)) for _ in range(count)]
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


@pytest.mark.parametrize(
    ("seeds", "noise"), thinned([2, 3, 5, 10], [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3), (1.0, 1.0), (0.3, 1.0)], every=2)
)
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


# ------------------------------------------------------------------------ rows as arrays, slopes, and what claims show
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
