"""Counts at distinct scores."""

import torch

from dissensus.metrics.ranked_counts import RankedCounts, ranked_counts
from refusals import refuses


def test_counts_stand_at_distinct_scores_from_high_to_low():
    thresholds, counts = ranked_counts(torch.tensor([1.0, 2.0, 2.0, 0.0]), torch.tensor([2.0, 3.0, 3.0]))
    assert thresholds.tolist() == [3.0, 2.0, 1.0, 0.0]
    assert counts.in_counts.tolist() == [0, 2, 1, 1]
    assert counts.ood_counts.tolist() == [2, 1, 0, 0]


def test_swapping_equals_negating_the_scores_and_exchanging_the_classes():
    generator = torch.Generator().manual_seed(0)
    score_in, score_ood = torch.randn(30, generator=generator).round(), torch.randn(20, generator=generator).round()
    swapped = ranked_counts(score_in, score_ood)[1].swap_classes()
    torch.testing.assert_close(swapped, ranked_counts(-score_ood, -score_in)[1], rtol=0, atol=0)
    torch.testing.assert_close(swapped.swap_classes(), ranked_counts(score_in, score_ood)[1], rtol=0, atol=0)


def test_empty_bins_change_nothing():
    full = RankedCounts(torch.tensor([1, 2, 3]), torch.tensor([4, 1, 1]))
    gaps = RankedCounts(torch.tensor([0, 1, 0, 2, 3, 0]), torch.tensor([0, 4, 0, 1, 1, 0]))
    assert gaps.auroc() == full.auroc()
    assert gaps.aupr() == full.aupr()
    assert gaps.aupr(0.3) == full.aupr(0.3)
    assert gaps.fpr() == full.fpr()


def test_an_unknown_rule_is_refused():
    refuses(lambda: RankedCounts(torch.tensor([1]), torch.tensor([1])).fpr(0.95, "closest"), "expected rule")
