"""Regression metrics against scipy, numerical integrals and Monte Carlo."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch

from dissensus import metrics


def mixture(m=3, n=6, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(m, n, d, dtype=torch.float64, generator=generator)
    variances = torch.rand(m, n, d, dtype=torch.float64, generator=generator) + 0.2
    return means, variances, torch.randn(n, d, dtype=torch.float64, generator=generator)


def test_rmse_equals_scikit_learn():
    means, _, y = mixture(d=1)
    expected = sklearn.metrics.root_mean_squared_error(y.numpy(), means[0].numpy())
    assert metrics.rmse(means[0], y).item() == pytest.approx(expected, abs=1e-14)


def test_gaussian_nll_equals_scipy_and_sums_over_dimensions():
    means, variances, y = mixture()
    log_density = scipy.stats.norm.logpdf(y, means[0], variances[0].sqrt())
    assert metrics.gaussian_nll(means[0], variances[0], y).item() == pytest.approx(-log_density.sum(1).mean())


def test_mixture_nll_equals_scipy_with_a_joint_density():
    means, variances, y = mixture()
    density = np.exp(scipy.stats.norm.logpdf(y, means, variances.sqrt()).sum(2)).mean(0)
    assert metrics.mixture_nll(means, variances, y).item() == pytest.approx(-np.log(density).mean(), abs=1e-12)


def test_one_member_is_its_own_mixture():
    means, variances, y = mixture(m=1)
    single = metrics.gaussian_nll(means[0], variances[0], y)
    torch.testing.assert_close(metrics.mixture_nll(means, variances, y), single, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        metrics.crps_mixture(means, variances, y), metrics.crps_gaussian(means[0], variances[0], y), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(metrics.moment_match(means, variances).mean, means[0], rtol=0, atol=0)
    torch.testing.assert_close(metrics.moment_match(means, variances).variance, variances[0], rtol=0, atol=0)


def test_targets_without_a_dimension_axis_are_accepted():
    means, variances, y = mixture(d=1)
    for metric in (metrics.mixture_nll, metrics.crps_mixture):
        flat = metric(means.squeeze(2), variances.squeeze(2), y.squeeze(1))
        torch.testing.assert_close(flat, metric(means, variances, y), rtol=0, atol=1e-14)


def test_matched_moments_are_those_of_the_mixture():
    means, variances, _ = mixture()
    matched = metrics.moment_match(means, variances)
    second = (variances + means.square()).mean(0)
    torch.testing.assert_close(matched.variance, second - means.mean(0).square(), rtol=0, atol=1e-14)
    # far from zero, where E x² − (E x)² would lose all digits
    far = metrics.moment_match(means + 1e9, variances)
    torch.testing.assert_close(far.variance, matched.variance, rtol=1e-5, atol=0)


def test_crps_of_a_mixture_equals_its_integral():
    means, variances, y = mixture(m=3, n=2, d=1)
    values = metrics.crps_mixture_values(means, variances, y)
    for i in range(2):

        def squared_difference(x, i=i):
            cdf = scipy.stats.norm.cdf(x, means[:, i, 0], variances[:, i, 0].sqrt()).mean()
            return (cdf - (x >= y[i, 0].item())) ** 2

        expected = sum(
            scipy.integrate.quad(squared_difference, a, b, epsabs=1e-11)[0]
            for a, b in ((-12, y[i, 0].item()), (y[i, 0].item(), 12))
        )
        assert values[i, 0].item() == pytest.approx(expected, abs=1e-9)


def test_crps_of_a_gaussian_equals_its_closed_form():
    means, variances, y = mixture()
    std = variances[0].sqrt()
    z = ((y - means[0]) / std).numpy()
    expected = std.numpy() * (
        z * (2 * scipy.stats.norm.cdf(z) - 1) + 2 * scipy.stats.norm.pdf(z) - 1 / math.sqrt(math.pi)
    )
    assert metrics.crps_gaussian(means[0], variances[0], y).item() == pytest.approx(expected.mean(), abs=1e-13)


def test_crps_of_points_is_the_energy_form():
    # E|X − y| − ½ E|X − X'| with X uniform on the members
    means, variances, y = mixture()
    x = means.numpy()
    expected = np.abs(x - y.numpy()).mean(0) - np.abs(x[:, None] - x[None]).mean((0, 1)) / 2
    values = metrics.crps_mixture_values(means, 0 * variances, y)
    np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=1e-14)
    assert metrics.crps_gaussian(means[0], 0 * y, y).item() == pytest.approx((means[0] - y).abs().mean().item())


def test_coverage_counts_both_ends_and_width_is_in_units():
    lower, upper = torch.zeros(4), torch.full((4,), 2.0)
    y = torch.tensor([0.0, 2.0, 2.1, 1.0])
    assert metrics.interval_coverage(lower, upper, y).item() == 0.75
    assert metrics.mean_interval_width(lower, upper).item() == 2.0
    with pytest.raises(ValueError, match="expected lower ≤ upper"):
        metrics.interval_coverage(upper, lower, y)


def test_coverage_of_true_gaussian_intervals_is_their_level():
    n = 20000
    y = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    half = torch.full((n,), scipy.stats.norm.ppf(0.95))
    assert metrics.interval_coverage(-half, half, y).item() == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / n))


def test_pinball_loss_equals_scikit_learn():
    means, _, y = mixture(d=1)
    for level in (0.1, 0.5, 0.9):
        expected = sklearn.metrics.mean_pinball_loss(y.numpy(), means[0].numpy(), alpha=level)
        assert metrics.pinball_loss(means[0], y, level=level).item() == pytest.approx(expected, abs=1e-14)


def test_nll_in_standardised_units_plus_the_shift_is_the_nll_in_original_units():
    means, variances, y = mixture()
    location, scale = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([10.0, 0.3], dtype=torch.float64)
    original = metrics.unstandardise(means, variances, location=location, scale=scale)
    y_original = y * scale + location
    for nll in (metrics.mixture_nll, lambda m, v, t: metrics.gaussian_nll(*metrics.moment_match(m, v), t)):
        shifted = nll(means, variances, y) + original.nll_shift
        assert nll(original.mean, original.variance, y_original).item() == pytest.approx(shifted.item(), abs=1e-12)
    one = metrics.unstandardise(means[..., 0], variances[..., 0], location=location[0], scale=scale[0])
    assert one.nll_shift.item() == pytest.approx(math.log(10))
    with pytest.raises(ValueError, match="expected scales above zero"):
        metrics.unstandardise(means, variances, location=location, scale=-scale)
