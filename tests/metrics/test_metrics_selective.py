"""Risk and coverage against brute force and by averaging over orders."""

import itertools

import pytest
import torch

from dissensus import metrics


def aurc_in_given_order(loss):
    return sum(sum(loss[: k + 1]) / (k + 1) for k in range(len(loss))) / len(loss)


def test_aurc_equals_brute_force():
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(50, dtype=torch.float64, generator=generator)
    wrong = torch.rand(50, generator=generator) < 0.3
    ranked = wrong[confidence.argsort(descending=True)].double().tolist()
    assert metrics.aurc(confidence, wrong).item() == pytest.approx(aurc_in_given_order(ranked), abs=1e-14)


def test_ties_count_as_the_mean_over_all_their_orders():
    confidence = torch.tensor([0.9, 0.9, 0.9, 0.5, 0.5, 0.2])
    loss = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
    orders = [
        aurc_in_given_order([*a, *b, 1.0])
        for a in itertools.permutations([1.0, 0.0, 0.5])
        for b in itertools.permutations([2.0, 0.0])
    ]
    expected = sum(orders) / len(orders)
    for seed in range(5):
        i = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        assert metrics.aurc(confidence[i], loss[i]).item() == pytest.approx(expected, abs=1e-14)


def test_the_curve_ends_at_full_coverage_with_the_mean_loss():
    curve = metrics.risk_coverage(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([3.0, 0.0, 1.0]))
    assert curve.coverage.tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    assert curve.risk.tolist() == pytest.approx([0, 0.5, 4 / 3])


def test_excess_aurc_is_zero_for_the_best_ranking_and_above_for_any_other():
    generator = torch.Generator().manual_seed(0)
    loss = torch.rand(6, dtype=torch.float64, generator=generator).round(decimals=1)
    assert metrics.excess_aurc(-loss, loss).item() == pytest.approx(0, abs=1e-15)
    best = min(aurc_in_given_order(order) for order in itertools.permutations(loss.tolist()))
    worst = loss  # most confident where the loss is largest
    assert metrics.excess_aurc(worst, loss).item() == pytest.approx(metrics.aurc(worst, loss).item() - best, abs=1e-14)


def test_excess_aurc_approaches_the_formula_for_many_examples():
    n, error = 20000, 0.1
    wrong = torch.arange(n) < error * n
    # confidence says nothing: AURC = r; the least AURC for 0/1 losses tends to r + (1 − r) log(1 − r)
    limit = error - (error + (1 - error) * torch.log1p(torch.tensor(-error)).item())
    assert metrics.excess_aurc(torch.zeros(n), wrong).item() == pytest.approx(limit, abs=1e-3)


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"expected loss of the shape \(3,\) of confidence, got \(2,\)"):
        metrics.aurc(torch.zeros(3), torch.zeros(2))
