"""Bootstrap intervals and tests against theory, scipy and each other."""

import math

import pytest
import scipy.stats
import torch

from dissensus import metrics
from refusals import refuses
from thinning import often


def values(n=400, seed=0, shift=0.0):
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + shift


def test_the_interval_of_a_mean_has_the_width_of_the_central_limit_theorem():
    x = values()
    result = metrics.bootstrap_mean(x, resamples=4000)
    half = 1.96 * x.std(correction=0).item() / math.sqrt(len(x))
    assert result.estimate == pytest.approx(x.mean().item())
    # an end of the interval is an order statistic of 4000 draws: its own sd is about 2.1 % of the half width
    assert result.lower == pytest.approx(result.estimate - half, abs=0.1 * half)
    assert result.upper == pytest.approx(result.estimate + half, abs=0.1 * half)


def test_the_general_and_the_vectorised_versions_agree():
    x = values(n=50)
    general = metrics.bootstrap_interval(torch.mean, x, resamples=200, seed=3)
    fast = metrics.bootstrap_mean(x, resamples=200, seed=3)
    assert tuple(general) == pytest.approx(tuple(fast), abs=1e-13)
    y = values(n=50, seed=1)
    general = metrics.paired_bootstrap(torch.mean, [x], [y], resamples=200, seed=3)
    fast = metrics.paired_test(x, y, resamples=200, seed=3)
    assert tuple(general) == pytest.approx(tuple(fast), abs=1e-13)


def test_vectorised_draws_do_not_depend_on_the_chunk_size(monkeypatch):
    x = values(n=50)
    whole = metrics.bootstrap_mean(x, resamples=30)
    monkeypatch.setattr("dissensus.metrics.bootstrap._CHUNK", 120)  # two rows at a time
    assert tuple(metrics.bootstrap_mean(x, resamples=30)) == pytest.approx(tuple(whole), abs=1e-15)


def test_intervals_cover_the_truth_as_often_as_they_say():
    covered = 0
    for seed in range(300):
        result = metrics.bootstrap_mean(values(n=60, seed=seed), level=0.9, resamples=300, seed=seed)
        covered += result.lower <= 0 <= result.upper
    # percentile intervals of 60 examples undercover by about a point; sd of the count's share is 1.7 points
    assert covered / 300 == pytest.approx(0.89, abs=4 * math.sqrt(0.09 / 300))


def test_tensors_are_resampled_together():
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(80, 3, generator=generator), dim=1)
    y = torch.randint(3, (80,), generator=generator)
    together = metrics.bootstrap_interval(metrics.brier, p, y, resamples=100, seed=5)
    by_value = metrics.bootstrap_mean(metrics.brier_values(p, y), resamples=100, seed=5)
    assert tuple(together) == pytest.approx(tuple(by_value), abs=1e-12)


def test_two_samples_are_resampled_each_by_itself():
    score_in, score_ood = values(n=100), values(n=60, seed=1, shift=1.0)
    result = metrics.bootstrap_two_samples(metrics.auroc, score_in, score_ood, resamples=400)
    assert result.estimate == metrics.auroc(score_in, score_ood).item()
    # DeLong: var = var_ood(placement)/60 + var_in(placement)/100
    above = (score_ood[:, None] > score_in).double()
    deviation = math.sqrt(above.mean(1).var().item() / 60 + above.mean(0).var().item() / 100)
    assert (result.upper - result.lower) / (2 * 1.96) == pytest.approx(deviation, rel=0.15)


def test_the_same_seed_gives_the_same_interval_and_the_global_generator_is_left_alone():
    x = values(n=30)
    before = torch.get_rng_state()
    first = metrics.bootstrap_interval(torch.median, x, resamples=50, seed=1)
    assert first == metrics.bootstrap_interval(torch.median, x, resamples=50, seed=1)
    assert first != metrics.bootstrap_interval(torch.median, x, resamples=50, seed=2)
    (
        metrics.bootstrap_mean(x),
        metrics.paired_test(x, x),
        metrics.bootstrap_two_samples(metrics.auroc, x, x, resamples=2),
    )
    assert torch.equal(before, torch.get_rng_state())


def test_the_p_value_of_a_paired_test_is_that_of_the_t_test():
    noise = values(n=300, seed=2)
    for shift in (0.0, 0.1, 0.3):
        difference = 0.8 * values(n=300, seed=3) + shift
        result = metrics.paired_test(noise + difference, noise, resamples=4000)
        expected = scipy.stats.ttest_1samp(difference.numpy(), 0).pvalue
        # binomial error of 4000 draws, and the difference between z and t
        assert result.p_value == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 4000))
        assert result.difference == pytest.approx(difference.mean().item())


def test_pairing_finds_differences_that_separate_intervals_miss():
    easy = 5 * values(n=200)
    first, second = easy + 0.1 * values(n=200, seed=1) + 0.05, easy
    separate = [metrics.bootstrap_mean(x) for x in (first, second)]
    assert separate[0].lower < separate[1].upper
    assert metrics.paired_test(first, second).p_value < 0.01


def test_one_example_and_equal_differences_have_no_interval_and_no_p():
    x = values(n=20)
    for first, second in ((x, x), (x, x + 0.3), (x[:1], x[1:2])):
        found = metrics.paired_test(first, second)
        assert all(map(math.isnan, (found.lower, found.upper, found.p_value)))
    one = metrics.bootstrap_mean(x[:1])
    assert one.estimate == x[0]
    assert all(map(math.isnan, one[1:]))


@pytest.mark.parametrize("n", often([2, 30], [3, 5, 10]))
def test_few_examples_are_compared_by_the_t_test(n):
    found = [metrics.paired_test(values(n, s), values(n, s + 500), resamples=300, seed=s).p_value for s in range(400)]
    # 5 % of 400 have a standard deviation of 1.1 points
    assert sum(p < 0.05 for p in found) / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (3, 9), (5, 5), (12, 2), (400, 450), (0, 7)])
def test_mcnemar_is_the_exact_binomial_test(b, c):
    first = torch.tensor([1] * b + [0] * c + [1, 0, 1])
    second = torch.tensor([0] * b + [1] * c + [1, 0, 1])
    result = metrics.mcnemar(first, second)
    expected = scipy.stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert (result.only_first, result.only_second) == (b, c)
    assert result.p_value == pytest.approx(expected, abs=1e-10)
    assert metrics.mcnemar(second.bool(), first.bool()).p_value == pytest.approx(expected, abs=1e-10)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match=r"expected tensors of one length above zero, got \[2, 3\]"):
        metrics.bootstrap_interval(torch.mean, torch.zeros(2), torch.zeros(3))
    refuses(lambda: metrics.bootstrap_mean(torch.zeros(3), level=95), "expected level above 0 and below 1, got 95")
    refuses(lambda: metrics.bootstrap_mean(torch.zeros(3), resamples=0), "expected resamples of at least 1")
    refuses(lambda: metrics.mcnemar(torch.tensor([0.5]), torch.tensor([1.0])), "expected correctness of 0 or 1")


def test_the_interval_of_a_difference_holds_zero_exactly_where_p_is_not_below():
    for seed in range(200):
        n = 20 + seed % 40
        first, second = values(n=n, seed=seed), values(n=n, seed=seed + 1000, shift=0.1 * (seed % 7))
        level = (0.8, 0.9, 0.95)[seed % 3]
        found = metrics.paired_test(first, second, level=level, resamples=99 + seed % 50, seed=seed)
        assert (found.lower <= 0 <= found.upper) == (found.p_value >= 1 - level)
        assert found.upper - found.difference == pytest.approx(found.difference - found.lower)
