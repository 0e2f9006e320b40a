"""The order statistic behind conformal promises: coverage, weights, too few rows, against knowledge."""

import math

import pytest
import torch

from dissensus.calibration.conformal import least_rows, sort_with_mass, weighted_quantile


def thresholds(scores, level, weight=None, new=None):
    """(B, P) of scores (n, P)."""
    weight = torch.ones(len(scores), dtype=torch.float64) if weight is None else weight
    new = torch.ones(1, dtype=torch.float64) if new is None else new
    return weighted_quantile(*sort_with_mass(scores, weight), level, new)


def beta_binomial_error(n, level, tests, splits):
    """Standard error of the mean coverage over splits, of one whose tests are a beta-binomial."""
    k = math.ceil((n + 1) * level - 1e-9)
    mean = k / (n + 1)
    of_threshold = mean * (1 - mean) / (n + 2)  # of Beta(k, n + 1 − k)
    return mean, math.sqrt((of_threshold + (mean * (1 - mean) - of_threshold) / tests) / splits)


@pytest.mark.parametrize("level", [0.9, 0.55, 0.7, 0.95, 0.99])
def test_the_threshold_is_the_order_statistic_that_exact_arithmetic_gives(level):
    from fractions import Fraction

    for n in (*range(1, 60), 99, 199, 999):
        rank = math.ceil((n + 1) * Fraction(str(level)))
        found = float(thresholds(torch.arange(1.0, n + 1, dtype=torch.float64)[:, None], level))
        assert found == (rank if rank <= n else math.inf)
        assert (n >= least_rows(level)) == (rank <= n)


def test_nine_rows_are_the_least_at_nine_tenths():
    assert [least_rows(level) for level in (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)] == [1, 4, 9, 19, 99, 999]


@pytest.mark.parametrize("n", [100, 1000])
def test_mean_coverage_of_splits_is_that_of_the_beta_binomial(n):
    scores, new = torch.randn(n, 200, dtype=torch.float64), torch.randn(1000, 200, dtype=torch.float64)
    coverage = (new <= thresholds(scores, 0.9)).double().mean(0)  # (200,)
    mean, error = beta_binomial_error(n, 0.9, 1000, 200)
    assert error * 3 == pytest.approx({100: 0.007, 1000: 0.003}[n], abs=5e-4)
    assert abs(float(coverage.mean()) - mean) < 3 * error
    assert float(coverage.std()) == pytest.approx(error * math.sqrt(200), rel=0.2)


def test_scores_that_tie_cover_no_less():
    scores, new = torch.randint(4, (100, 200)).double(), torch.randint(4, (1000, 200)).double()
    mean, error = beta_binomial_error(100, 0.7, 1000, 200)
    coverage = float((new <= thresholds(scores, 0.7)).double().mean())
    assert mean + 3 * error < coverage  # three of four values: at least 0.75


def test_weights_are_those_of_tibshirani_row_by_row():
    """By the definition: the level-quantile of Σ p_i δ(s_i) + p δ(∞)."""
    scores, weight = torch.randn(30, 1, dtype=torch.float64), torch.rand(30, dtype=torch.float64)
    new = torch.tensor([0.0, 0.1, 1.0, 3.0, 1e9, math.inf], dtype=torch.float64)
    found = thresholds(scores, 0.8, weight, new)[:, 0]
    for w, q in zip(new.tolist(), found.tolist(), strict=True):
        share = weight / (weight.sum() + w)
        fits = [s for s in scores[:, 0].tolist() if float(share[scores[:, 0] <= s].sum()) >= 0.8]
        assert q == (min(fits) if fits else math.inf)
    assert found[-2:].tolist() == [math.inf, math.inf]


def test_a_known_shift_is_covered_with_weights_and_not_without():
    """Calibration x ~ U(0, 1), new x of density 2x, errors that grow with x: y − f(x) ~ N(0, x²)."""
    n, splits, tests = 300, 200, 500
    x, moved = torch.rand(n, splits, dtype=torch.float64), torch.rand(tests, splits, dtype=torch.float64).sqrt()
    scores, new = (x * torch.randn_like(x)).abs(), (moved * torch.randn_like(moved)).abs()
    plain = (new <= thresholds(scores, 0.9)).double().mean()
    covered = [
        (new[:, j] <= thresholds(scores[:, j : j + 1], 0.9, 2 * x[:, j], 2 * moved[:, j])[:, 0]).double().mean()
        for j in range(splits)
    ]
    error = 3 * float(torch.stack(covered).std()) / math.sqrt(splits)
    assert 0.9 - error < float(torch.stack(covered).mean()) < 0.9 + error + 2 / n
    assert float(plain) < 0.85


def test_no_rows_at_all_give_no_finite_threshold():
    assert thresholds(torch.empty(0, 2, dtype=torch.float64), 0.9).tolist() == [[math.inf, math.inf]]
