"""Calibration errors against brute force, by hand, and in expectation."""

import math

import numpy as np
import pytest
import torch

from dissensus import metrics
from dissensus.metrics.classification import confidence_bin


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
    assert confidence_bin(torch.nextafter(edges[1:-1], edges.new_tensor(2.0)), 15).tolist() == list(range(1, 15))
    # 0.6 = 9/15 is an edge: with 0.59 in one bin, with 0.61 in two
    p, y = binary([0.59, 0.6], [0, 1])
    assert metrics.ece(p.to(dtype), y).item() == pytest.approx(abs(0.5 - 0.595), abs=1e-6)
    p, y = binary([0.61, 0.6], [0, 1])
    assert metrics.ece(p.to(dtype), y).item() == pytest.approx((0.61 + 0.4) / 2, abs=1e-6)


def test_rounding_above_one_stays_in_the_last_bin():
    assert confidence_bin(torch.tensor([1.0000001]), 15).tolist() == [14]


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
    order = confidence.argsort()
    gap = ((prediction == y).double() - confidence)[order].numpy()
    chunk = np.arange(103) * 10 // 103
    assert set(np.bincount(chunk)) <= {10, 11}
    expected = sum(abs(gap[chunk == k].sum()) for k in range(10)) / 103
    assert metrics.adaptive_ece(p, y, bins=10).item() == pytest.approx(expected, abs=1e-12)


def test_adaptive_ece_of_ties_is_the_mean_gap_whatever_the_order():
    p, y = binary([0.8] * 10, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
    assert metrics.adaptive_ece(p, y, bins=5).item() == pytest.approx(0.2, abs=1e-12)
    p, y = binary([0.7, 0.8, 0.8, 0.8, 0.9, 0.9], [1, 0, 1, 1, 1, 0])
    values = [
        metrics.adaptive_ece(p[i], y[i], bins=3).item()
        for i in (torch.randperm(6, generator=torch.Generator().manual_seed(s)) for s in range(20))
    ]
    assert max(values) - min(values) < 1e-15


def test_adaptive_ece_with_more_bins_than_examples_counts_each_example():
    p, y = binary([0.7, 0.8, 0.9], [1, 0, 1])
    assert metrics.adaptive_ece(p, y, bins=15).item() == pytest.approx((0.3 + 0.8 + 0.1) / 3)


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
        accuracy = 1 - y_all[:, confidence == level].double().mean(1)
        plain += 0.5 * (accuracy - level).square()
    error = 4 * debiased.std().item() / math.sqrt(repeats)
    assert debiased.mean().item() == pytest.approx(0.0025, abs=error)
    assert plain.mean().item() > 0.0025 + 2 * error


def test_debiased_ece_is_a_root_that_is_never_negative():
    p, y = binary([0.9] * 10, [1] * 9 + [0])  # the gap is zero, so the debiased square is below zero
    assert metrics.debiased_squared_ece(p, y).item() == pytest.approx(-0.9 * 0.1 / 9)
    assert metrics.debiased_ece(p, y).item() == 0
    p, y = binary([0.9] * 10, [1] * 4 + [0] * 6)
    assert metrics.debiased_ece(p, y).item() == pytest.approx(math.sqrt(0.25 - 0.4 * 0.6 / 9))


def test_a_bin_with_one_example_adds_nothing_to_the_debiased_error():
    p, y = binary([0.9] * 4 + [0.6], [1, 1, 0, 0, 0])
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
    with pytest.raises(ValueError, match="prevalence above 0 and below 1"):
        metrics.union_ece(p, y, ood, prevalence=1.0)
    assert expected == pytest.approx((3 * abs(2 / 3 - 2.9 / 3) + 0.6 + 0.75) / 5)


def test_void_pixels_are_left_out_of_the_ece():
    p, y = forecasts(n=24)
    pixels, labels = p.reshape(2, 3, 4, 5).movedim(-1, 1), y.reshape(2, 3, 4).clone()
    labels[0, 0] = -100
    kept = labels.flatten() != -100
    assert metrics.ece(pixels, labels, ignore_index=-100).item() == pytest.approx(
        metrics.ece(p[kept], y[kept]).item(), abs=1e-14
    )


def test_bins_below_one_are_refused():
    p, y = forecasts(n=4)
    for metric in (metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.reliability_bins):
        with pytest.raises(ValueError, match="expected bins of at least 1, got 0"):
            metric(p, y, bins=0)
