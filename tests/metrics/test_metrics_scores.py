"""Accuracy, proper scores, calibration errors and regression metrics against scikit-learn, scipy, brute force and by hand."""

import math
from functools import partial

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import sklearn.metrics
import torch

from dissensus import metrics
from dissensus.metrics.classification import confidence_bin, mean_of_present
from refusals import refuses


# --------------------------------------------------------------------------------------- accuracy, NLL, Brier and mIoU
def log_forecasts(n=200, classes=4, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.log_softmax(sharpness * torch.randn(n, classes, dtype=torch.float64, generator=generator), dim=1)
    return log_p, torch.randint(classes, (n,), generator=generator)


def test_accuracy_nll_and_brier_equal_scikit_learn():
    log_p, y = log_forecasts()
    p = log_p.exp()
    one_hot = np.eye(4)[y.numpy()]
    accuracy = sklearn.metrics.accuracy_score(y.numpy(), p.argmax(1).numpy())
    assert metrics.accuracy(p, y).item() == pytest.approx(accuracy, abs=1e-12)
    nll = sklearn.metrics.log_loss(y.numpy(), p.numpy(), labels=range(4))
    assert metrics.nll(log_p, y).item() == pytest.approx(nll, abs=1e-12)
    assert metrics.brier(p, y).item() == pytest.approx(((p.numpy() - one_hot) ** 2).sum(1).mean(), abs=1e-12)
    log_p, y = log_forecasts(classes=2)  # of two classes theirs is half of it
    expected = 2 * sklearn.metrics.brier_score_loss(y.numpy(), log_p.exp()[:, 1].numpy())
    assert metrics.brier(log_p.exp(), y).item() == pytest.approx(expected, abs=1e-12)


def test_certain_and_undecided_forecasts_have_their_known_scores():
    p = torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64)
    assert metrics.brier(p, torch.tensor([0])).item() == pytest.approx(2e-18, rel=1e-6)
    log_p = torch.tensor([[0.0, -torch.inf]])
    assert metrics.nll(log_p, torch.tensor([1])).item() == torch.inf
    assert metrics.nll(log_p, torch.tensor([0])).item() == 0
    # Of equally probable classes the first counts.
    assert metrics.accuracy(torch.full((2, 2), 0.5), torch.tensor([0, 1])).item() == 0.5


def test_float32_inputs_are_averaged_in_float64():
    log_p, y = log_forecasts(n=1000)
    assert metrics.nll(log_p.float(), y).dtype == torch.float64
    assert metrics.nll(log_p.float(), y).item() == pytest.approx(metrics.nll(log_p, y).item(), abs=1e-7)


def test_void_pixels_count_for_nothing():
    log_p, y = log_forecasts(n=2 * 3 * 5)
    pixels = log_p.reshape(2, 3, 5, 4).movedim(-1, 1)
    labels = y.reshape(2, 3, 5).clone()
    void = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    labels[void] = 255
    kept = ~void.flatten()
    for metric, values in ((metrics.nll, log_p), (metrics.brier, log_p.exp()), (metrics.accuracy, log_p.exp())):
        shaped = values.reshape(2, 3, 5, 4).movedim(-1, 1)
        expected = metric(values[kept], y[kept]).item()
        assert metric(shaped, labels, ignore_index=255).item() == pytest.approx(expected, abs=1e-14)
    assert metrics.nll_values(pixels, labels, ignore_index=255).shape == (int(kept.sum()),)


@pytest.mark.parametrize("bins", [1, 3, 15, None])
def test_the_parts_of_the_brier_score_add_up_exactly(bins):
    log_p, y = log_forecasts()
    p = log_p.exp()
    d = metrics.brier_decomposition(p, y, bins=bins)
    total = d.reliability - d.resolution + d.uncertainty + d.variance_within - d.covariance_within
    assert total.item() == pytest.approx(metrics.brier(p, y).item(), abs=1e-14)
    frequency = np.bincount(y.numpy(), minlength=4) / len(y)
    assert d.uncertainty.item() == pytest.approx((frequency * (1 - frequency)).sum(), abs=1e-14)


def test_groups_of_equal_forecasts_leave_nothing_within():
    # Three distinct forecasts; Murphy's three parts by hand.
    table = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    which = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    y = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1])
    d = metrics.brier_decomposition(table[which], y, bins=None)
    observed = np.array([0.75, 0.5, 0.0])  # share of class 0 in each group
    share = np.array([0.4, 0.2, 0.4])
    assert d.reliability.item() == pytest.approx(2 * (share * (np.array([0.9, 0.5, 0.2]) - observed) ** 2).sum())
    assert d.resolution.item() == pytest.approx(2 * (share * (observed - 0.4) ** 2).sum())
    assert d.uncertainty.item() == pytest.approx(2 * 0.4 * 0.6)
    assert d.variance_within.item() == pytest.approx(0, abs=1e-16)
    assert d.covariance_within.item() == pytest.approx(0, abs=1e-16)
    # and the binned grouping finds the same three groups here
    torch.testing.assert_close(metrics.brier_decomposition(table[which], y), d, rtol=0, atol=1e-15)


def test_confusion_matrix_and_miou_equal_scikit_learn():
    log_p, y = log_forecasts(n=300, classes=5)
    prediction = log_p.argmax(1)
    theirs = sklearn.metrics.confusion_matrix(y.numpy(), prediction.numpy(), labels=range(5))
    np.testing.assert_array_equal(metrics.confusion_matrix(prediction, y, classes=5).numpy(), theirs)
    expected = sklearn.metrics.jaccard_score(y.numpy(), prediction.numpy(), average="macro")
    assert metrics.miou(log_p.exp(), y).item() == pytest.approx(expected, abs=1e-12)


def test_classes_neither_true_nor_predicted_are_skipped_in_miou():
    p = torch.eye(4)[torch.tensor([0, 0, 1, 3])]
    y = torch.tensor([0, 1, 1, 255])  # the predicted 3 lies on void
    confusion = metrics.confusion_matrix(p.argmax(1), y, classes=4, ignore_index=255)
    iou = metrics.intersection_over_union(confusion)
    assert iou[:2].tolist() == [0.5, 0.5]
    assert iou[2:].isnan().all()
    assert mean_of_present(iou).item() == metrics.miou(p, y, ignore_index=255).item() == 0.5
    # a class predicted but never true counts with zero
    assert metrics.miou(torch.eye(4)[[0, 0, 2]], torch.tensor([0, 0, 0])).item() == pytest.approx((2 / 3 + 0) / 2)


def test_confusion_matrix_refuses_what_is_not_a_class_index():
    y = torch.tensor([0, 1])
    for prediction, told in (
        (torch.zeros(2, 3), "expected prediction of shape .*; pass class indices"),
        (torch.zeros(2), "expected integer class indices in prediction"),
        (torch.tensor([0, 3]), "expected class indices from 0 to 2 in prediction, got 3 at row"),
    ):
        refuses(partial(metrics.confusion_matrix, prediction, y, classes=3), told, (ValueError, TypeError))


# -------------------------------------------------------------------------------------------------- calibration errors
def forecasts(n=400, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(n, classes, dtype=torch.float64, generator=generator), dim=1)
    return p, torch.randint(classes, (n,), generator=generator)


def binary(confidence, correct):
    """(N, 2) probabilities and labels with these confidences (at least ½) and correctness."""
    confidence = torch.tensor(confidence, dtype=torch.float64)
    return torch.stack([confidence, 1 - confidence], 1), 1 - torch.tensor(correct, dtype=torch.long)


def ece_by_brute_force(confidence, correct, bins):
    """Loop over bins k and examples i: k/bins < confidence ≤ (k+1)/bins."""
    total, n = 0.0, len(confidence)
    for k in range(bins):
        inside = [i for i in range(n) if k / bins < confidence[i] <= (k + 1) / bins]
        if inside:
            gap = sum(correct[i] for i in inside) / len(inside) - sum(confidence[i] for i in inside) / len(inside)
            total += len(inside) / n * abs(gap)
    return total


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_equals_brute_force(bins):
    p, y = forecasts()
    confidence, prediction = p.max(1)
    expected = ece_by_brute_force(confidence.tolist(), (prediction == y).double().tolist(), bins)
    assert metrics.ece(p, y, bins=bins).item() == pytest.approx(expected, abs=1e-12)


def test_confidence_of_exactly_one_belongs_to_the_last_bin():
    p, y = binary([1.0, 0.95], [0, 1])  # together: |0.5 − 0.975|; apart it would be 0.525
    assert metrics.ece(p, y).item() == pytest.approx(0.475, abs=1e-15)
    assert metrics.ece(p.float(), y).item() == pytest.approx(0.475, abs=1e-7)
    assert ece_by_brute_force([1.0, 0.95], [0, 1], 15) == pytest.approx(0.475, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_confidence_on_an_edge_belongs_to_the_lower_bin(dtype):
    edges = torch.tensor([k / 15 for k in range(16)], dtype=dtype)
    assert confidence_bin(edges, 15).tolist() == [0, *range(15)]
    assert confidence_bin(torch.tensor([1.0000001]), 15).tolist() == [14]  # by rounding
    assert confidence_bin(torch.nextafter(edges[1:-1], edges.new_tensor(2.0)), 15).tolist() == list(range(1, 15))
    # 0.6 = 9/15 is an edge: with 0.59 in one bin, with 0.61 in two
    p, y = binary([0.59, 0.6], [0, 1])
    assert metrics.ece(p.to(dtype), y).item() == pytest.approx(abs(0.5 - 0.595), abs=1e-6)
    p, y = binary([0.61, 0.6], [0, 1])
    assert metrics.ece(p.to(dtype), y).item() == pytest.approx((0.61 + 0.4) / 2, abs=1e-6)


def test_reliability_bins_hold_what_the_diagram_shows():
    p, y = binary([0.95, 1.0, 0.6, 0.65], [1, 0, 1, 1])
    bins = metrics.reliability_bins(p, y)
    assert bins.counts.tolist() == [0] * 8 + [1, 1, 0, 0, 0, 0, 2]
    assert bins.confidence[[8, 9, 14]].tolist() == pytest.approx([0.6, 0.65, 0.975])
    assert bins.accuracy[[8, 9, 14]].tolist() == [1.0, 1.0, 0.5]
    assert bins.confidence[:8].isnan().all()
    assert bins.edges.tolist() == [k / 15 for k in range(16)]


def test_adaptive_ece_equals_brute_force_over_sorted_chunks():
    p, y = forecasts(n=103)
    confidence, prediction = p.max(1)
    gap = ((prediction == y).double() - confidence)[confidence.argsort()].numpy()
    chunk = np.arange(103) * 10 // 103
    assert set(np.bincount(chunk)) <= {10, 11}
    expected = sum(abs(gap[chunk == k].sum()) for k in range(10)) / 103
    assert metrics.adaptive_ece(p, y, bins=10).item() == pytest.approx(expected, abs=1e-12)


def test_adaptive_ece_of_ties_is_the_mean_gap_whatever_the_order():
    p, y = binary([0.8] * 10, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
    assert metrics.adaptive_ece(p, y, bins=5).item() == pytest.approx(0.2, abs=1e-12)
    p, y = binary([0.7, 0.8, 0.8, 0.8, 0.9, 0.9], [1, 0, 1, 1, 1, 0])
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(s)) for s in range(20)]
    values = [metrics.adaptive_ece(p[i], y[i], bins=3).item() for i in orders]
    assert max(values) - min(values) < 1e-15
    p, y = binary([0.7, 0.8, 0.9], [1, 0, 1])  # more bins than examples: each counts
    assert metrics.adaptive_ece(p, y, bins=15).item() == pytest.approx((0.3 + 0.8 + 0.1) / 3)


def smooth_ece_by_sums(confidence, correct):
    """The definition on a fine grid: a sum over examples and mirror images, and the width found by scipy."""
    t = np.linspace(0, 1, 4001)
    gap = correct - confidence
    copies = [sign * confidence + 2 * shift for sign in (1, -1) for shift in (-1, 0, 1)]

    def error(width):
        density = sum(
            (gap * np.exp(-0.5 * ((t[:, None] - place) / width) ** 2)).sum(1) for place in copies
        ) / (len(gap) * width * np.sqrt(2 * np.pi))  # fmt: skip
        return np.trapezoid(abs(density), t)

    return scipy.optimize.brentq(lambda width: error(width) - width, 1e-3, 1)


@pytest.mark.parametrize("seed", range(3))
def test_smooth_ece_is_the_width_at_which_the_smoothed_gap_equals_it(seed):
    p, _ = forecasts(n=60, seed=seed)
    y = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))[:, 0]  # gaps of both signs
    confidence, prediction = p.max(1)
    expected = smooth_ece_by_sums(confidence.numpy(), (prediction == y).double().numpy())
    assert metrics.smooth_ece(p, y).item() == pytest.approx(expected, abs=3e-6)
    assert expected > 1.2 * abs((prediction == y).double().mean() - confidence.mean())  # which no width would change


def test_smooth_ece_of_one_confidence_is_its_gap_at_any_width():
    p, y = binary([0.8] * 10, [1] * 6 + [0] * 4)
    assert metrics.smooth_ece(p, y).item() == pytest.approx(0.2, abs=1e-6)
    p, y = binary([1.0] * 4, [1, 0, 0, 0])  # at the edge, all mass is reflected
    assert metrics.smooth_ece(p, y).item() == pytest.approx(0.75, abs=1e-6)


def test_classwise_ece_equals_brute_force_class_by_class():
    p, y = forecasts(n=200, classes=3)
    p[0] = torch.tensor([0.0, 0.0, 1.0])  # probability exactly zero belongs to the first bin
    expected = 0.0
    for c in range(3):
        q, hit = p[:, c].tolist(), (y == c).double().tolist()
        q = [max(value, 1e-300) for value in q]
        expected += ece_by_brute_force(q, hit, 15) / 3
    assert metrics.classwise_ece(p, y).item() == pytest.approx(expected, abs=1e-12)


def test_debiased_squared_ece_is_unbiased_where_the_plain_one_is_not():
    # Two levels of confidence, both off by 0.05: the squared error is 0.0025.
    generator = torch.Generator().manual_seed(0)
    n, repeats = 60, 500
    confidence = torch.tensor([0.65, 0.85], dtype=torch.float64).repeat(n // 2)
    y_all = (torch.rand(repeats, n, generator=generator) >= confidence - 0.05).long()  # 0 = correct
    p = torch.stack([confidence, 1 - confidence], 1)
    debiased, plain = torch.zeros(repeats), torch.zeros(repeats)
    for r in range(repeats):
        debiased[r] = metrics.debiased_squared_ece(p, y_all[r])
    for level in (0.65, 0.85):
        plain += 0.5 * ((1 - y_all[:, confidence == level].double().mean(1)) - level).square()
    error = 4 * debiased.std().item() / math.sqrt(repeats)
    assert debiased.mean().item() == pytest.approx(0.0025, abs=error)
    assert plain.mean().item() > 0.0025 + 2 * error


def test_debiased_ece_is_a_root_that_is_never_negative():
    p, y = binary([0.9] * 10, [1] * 9 + [0])  # the gap is zero, so the debiased square is below zero
    assert metrics.debiased_squared_ece(p, y).item() == pytest.approx(-0.9 * 0.1 / 9)
    assert metrics.debiased_ece(p, y).item() == 0
    p, y = binary([0.9] * 10, [1] * 4 + [0] * 6)
    assert metrics.debiased_ece(p, y).item() == pytest.approx(math.sqrt(0.25 - 0.4 * 0.6 / 9))
    p, y = binary([0.9] * 4 + [0.6], [1, 1, 0, 0, 0])  # a bin with one example adds nothing
    expected = 0.8 * ((0.5 - 0.9) ** 2 - 0.25 / 3)
    assert metrics.debiased_squared_ece(p, y).item() == pytest.approx(expected)


def test_union_ece_counts_every_ood_answer_as_wrong():
    p, y = binary([0.95, 1.0, 0.6], [1, 1, 0])
    ood, _ = binary([0.95, 0.75], [1, 1])
    expected = ece_by_brute_force([0.95, 1.0, 0.6, 0.95, 0.75], [1, 1, 0, 0, 0], 15)
    assert metrics.union_ece(p, y, ood).item() == pytest.approx(expected, abs=1e-14)
    # The share they have when each is there four times: the same bins, weighted.
    share = 4 * len(ood) / (4 * len(ood) + len(p))
    repeated = metrics.union_ece(p, y, ood.repeat(4, 1))
    assert metrics.union_ece(p, y, ood, prevalence=share).item() == pytest.approx(repeated.item(), abs=1e-14)
    refuses(lambda: metrics.union_ece(p, y, ood, prevalence=1.0), "prevalence above 0 and below 1")
    assert expected == pytest.approx((3 * abs(2 / 3 - 2.9 / 3) + 0.6 + 0.75) / 5)


def test_void_pixels_are_left_out_of_the_ece():
    p, y = forecasts(n=24)
    pixels, labels = p.reshape(2, 3, 4, 5).movedim(-1, 1), y.reshape(2, 3, 4).clone()
    labels[0, 0] = -100
    kept = labels.flatten() != -100
    expected = metrics.ece(p[kept], y[kept]).item()
    assert metrics.ece(pixels, labels, ignore_index=-100).item() == pytest.approx(expected, abs=1e-14)


def test_bins_below_one_are_refused():
    p, y = forecasts(n=4)
    for metric in (metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.reliability_bins):
        refuses(partial(metric, p, y, bins=0), "expected bins of at least 1, got 0")


# ---------------------------------------------------------------------------------------------------------- regression
def mixture(m=3, n=6, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(m, n, d, dtype=torch.float64, generator=generator)
    variances = torch.rand(m, n, d, dtype=torch.float64, generator=generator) + 0.2
    return means, variances, torch.randn(n, d, dtype=torch.float64, generator=generator)


def test_rmse_and_pinball_loss_equal_scikit_learn():
    means, _, y = mixture(d=1)
    expected = sklearn.metrics.root_mean_squared_error(y.numpy(), means[0].numpy())
    assert metrics.rmse(means[0], y).item() == pytest.approx(expected, abs=1e-14)
    for level in (0.1, 0.5, 0.9):
        expected = sklearn.metrics.mean_pinball_loss(y.numpy(), means[0].numpy(), alpha=level)
        assert metrics.pinball_loss(means[0], y, level=level).item() == pytest.approx(expected, abs=1e-14)


def test_nll_equals_scipy_with_a_joint_density():
    means, variances, y = mixture()
    log_density = scipy.stats.norm.logpdf(y, means[0], variances[0].sqrt())
    assert metrics.gaussian_nll(means[0], variances[0], y).item() == pytest.approx(-log_density.sum(1).mean())
    density = np.exp(scipy.stats.norm.logpdf(y, means, variances.sqrt()).sum(2)).mean(0)
    assert metrics.mixture_nll(means, variances, y).item() == pytest.approx(-np.log(density).mean(), abs=1e-12)


def test_one_member_is_its_own_mixture():
    means, variances, y = mixture(m=1)
    single = metrics.gaussian_nll(means[0], variances[0], y)
    torch.testing.assert_close(metrics.mixture_nll(means, variances, y), single, rtol=0, atol=1e-14)
    crps = metrics.crps_gaussian(means[0], variances[0], y)
    torch.testing.assert_close(metrics.crps_mixture(means, variances, y), crps, rtol=0, atol=1e-14)
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
    unit = z * (2 * scipy.stats.norm.cdf(z) - 1) + 2 * scipy.stats.norm.pdf(z) - 1 / math.sqrt(math.pi)
    expected = std.numpy() * unit
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
    refuses(lambda: metrics.interval_coverage(upper, lower, y), "expected lower ≤ upper")


def test_coverage_of_true_gaussian_intervals_is_their_level():
    n = 20000
    y = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    half = torch.full((n,), scipy.stats.norm.ppf(0.95))
    assert metrics.interval_coverage(-half, half, y).item() == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / n))


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
    other = {"location": location, "scale": -scale}
    refuses(lambda: metrics.unstandardise(means, variances, **other), "expected scales above zero")
