"""Ranking metrics against scikit-learn, brute force and by hand, ties included."""

import numpy as np
import pytest
import sklearn.metrics
import torch

from dissensus import metrics


def scores(n_in=150, n_ood=70, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    score_in = torch.randn(n_in, dtype=torch.float64, generator=generator)
    score_ood = torch.randn(n_ood, dtype=torch.float64, generator=generator) + 1
    return (score_in.mul(2).round(), score_ood.mul(2).round()) if ties else (score_in, score_ood)


def labels_and_scores(score_in, score_ood):
    return np.r_[np.zeros(len(score_in)), np.ones(len(score_ood))], np.r_[score_in.numpy(), score_ood.numpy()]


def fpr_by_brute_force(score_in, score_ood, recall):
    """Least share of score_in ≥ t over thresholds t with a share of at least `recall` of score_ood ≥ t."""
    candidates = sorted(set(score_ood.tolist()) | set(score_in.tolist()))
    return min((score_in >= t).double().mean().item() for t in candidates if (score_ood >= t).double().mean() >= recall)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_areas_equal_scikit_learn(ties, seed):
    pair = scores(seed=seed, ties=ties)
    truth, score = labels_and_scores(*pair)
    assert metrics.auroc(*pair).item() == pytest.approx(sklearn.metrics.roc_auc_score(truth, score), abs=1e-12)
    assert metrics.aupr(*pair).item() == pytest.approx(sklearn.metrics.average_precision_score(truth, score), abs=1e-12)
    assert metrics.aupr_in(*pair).item() == pytest.approx(
        sklearn.metrics.average_precision_score(1 - truth, -score), abs=1e-12
    )


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_counts_ties_one_half(ties):
    score_in, score_ood = scores(ties=ties)
    above = (score_ood[:, None] > score_in).double().mean()
    equal = (score_ood[:, None] == score_in).double().mean()
    assert metrics.auroc(score_in, score_ood).item() == pytest.approx((above + equal / 2).item(), abs=1e-13)


@pytest.mark.parametrize("ties", [False, True])
def test_curves_equal_scikit_learn(ties):
    pair = scores(ties=ties)
    truth, score = labels_and_scores(*pair)
    fpr, tpr, thresholds = sklearn.metrics.roc_curve(truth, score, drop_intermediate=False)
    roc = metrics.roc_curve(*pair)
    for ours, theirs in zip(roc, (fpr, tpr, thresholds), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-12)
    precision, recall, thresholds = sklearn.metrics.precision_recall_curve(truth, score)
    curve = metrics.precision_recall_curve(*pair)
    np.testing.assert_allclose(curve.precision.flip(0).numpy(), precision, rtol=0, atol=1e-12)
    np.testing.assert_allclose(curve.recall.flip(0).numpy(), recall, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(curve.thresholds.flip(0)[:-1].numpy(), thresholds)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("recall", [0.5, 0.8, 0.95])
def test_fpr_at_a_recall_equals_brute_force_with_either_class_positive(ties, recall):
    score_in, score_ood = scores(ties=ties)
    assert metrics.fpr95(score_in, score_ood, recall=recall).item() == pytest.approx(
        fpr_by_brute_force(score_in, score_ood, recall), abs=1e-14
    )
    assert metrics.fpr95_in(score_in, score_ood, recall=recall).item() == pytest.approx(
        fpr_by_brute_force(-score_ood, -score_in, recall), abs=1e-14
    )


def test_a_recall_of_exactly_95_percent_is_enough():
    # 20 OOD scores 1…20: the threshold 2 flags exactly 19/20 of them, and of the two others only the one at 5.
    score_ood = torch.arange(1.0, 21.0)
    assert metrics.fpr95(torch.tensor([5.0, 1.5]), score_ood).item() == 0.5
    for n in (20, 40, 60, 100, 140, 220, 1000):  # k/n ≥ 0.95 must not fail by rounding
        score_ood = torch.arange(n, dtype=torch.float64)
        below = n // 20  # as many may be missed
        assert metrics.fpr95(torch.tensor([below - 0.5]), score_ood).item() == 0
        assert metrics.fpr95(torch.tensor([below + 0.5]), score_ood).item() == 1


def test_the_two_conventions_of_fpr95_differ():
    score_in, score_ood = torch.tensor([0.0] * 19 + [10.0]), torch.tensor([1.0] * 10 + [-1.0] * 10)
    assert metrics.fpr95(score_in, score_ood).item() == 1.0  # OOD at −1 needs everything flagged
    assert metrics.fpr95_in(score_in, score_ood).item() == 0.5  # accepting 19 of 20 accepts the OOD at −1


def test_the_nearest_rule_equals_its_definition_by_brute_force():
    for seed in range(10):
        score_in, score_ood = scores(n_in=40, n_ood=13, seed=seed, ties=seed % 2 == 1)
        points = []
        for t in sorted(set(score_in.tolist() + score_ood.tolist())):  # lowest threshold first
            recall = (score_ood >= t).double().mean().item()
            points.append((abs(recall - 0.95), recall, (score_in >= t).double().mean().item()))
        nearest = min(distance for distance, _, _ in points)
        recall = max(r for d, r, _ in points if d == nearest)
        with_that_recall = [f for _, r, f in points if r == recall]
        # of thresholds with full recall the highest, of others with one recall the lowest
        expected = min(with_that_recall) if recall == 1 else max(with_that_recall)
        assert metrics.fpr95(score_in, score_ood, rule="nearest").item() == pytest.approx(expected, abs=1e-14)


def test_the_nearest_rule_may_stop_short_of_the_recall():
    score_ood = torch.arange(1.0, 17.0)  # 15/16 = 0.9375 is nearer to 0.95 than 1
    score_in = torch.tensor([1.0, 10.0])
    assert metrics.fpr95(score_in, score_ood, rule="nearest").item() == 0.5
    assert metrics.fpr95(score_in, score_ood).item() == 1.0


def test_adjusted_aupr_equals_weighted_average_precision_of_scikit_learn():
    score_in, score_ood = scores(ties=True)
    truth, score = labels_and_scores(score_in, score_ood)
    for prevalence in (0.01, 0.3, 0.5):
        weight = np.where(truth == 1, prevalence / len(score_ood), (1 - prevalence) / len(score_in))
        expected = sklearn.metrics.average_precision_score(truth, score, sample_weight=weight)
        assert metrics.aupr_adjusted(score_in, score_ood, prevalence=prevalence).item() == pytest.approx(
            expected, abs=1e-12
        )
    own = len(score_ood) / len(score)
    assert metrics.aupr_adjusted(score_in, score_ood, prevalence=own).item() == pytest.approx(
        metrics.aupr(score_in, score_ood).item(), abs=1e-14
    )


def test_adjusted_aupr_does_not_depend_on_how_many_ood_inputs_there_are():
    score_in, score_ood = scores()
    once = metrics.aupr_adjusted(score_in, score_ood)
    thrice = metrics.aupr_adjusted(score_in, score_ood.repeat(3))
    assert thrice.item() == pytest.approx(once.item(), abs=1e-14)
    assert metrics.aupr(score_in, score_ood.repeat(3)) > metrics.aupr(score_in, score_ood) + 0.05


def test_useless_and_perfect_scores_have_their_known_values():
    same_in, same_ood = torch.zeros(30), torch.zeros(10)
    assert metrics.auroc(same_in, same_ood).item() == 0.5
    assert metrics.aupr(same_in, same_ood).item() == 0.25
    assert metrics.aupr_in(same_in, same_ood).item() == 0.75
    assert metrics.fpr95(same_in, same_ood).item() == 1
    perfect = (torch.arange(30), 30 + torch.arange(10))
    assert [f(*perfect).item() for f in (metrics.auroc, metrics.aupr, metrics.aupr_in)] == [1, 1, 1]
    assert [f(*perfect).item() for f in (metrics.fpr95, metrics.fpr95_in)] == [0, 0]
    assert metrics.auroc(perfect[1], perfect[0]).item() == 0


def test_infinite_scores_rank_last():
    assert metrics.auroc(torch.tensor([0.0, -torch.inf]), torch.tensor([torch.inf, 1.0])).item() == 1


def test_per_image_metrics_skip_images_with_one_kind_of_pixel():
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(5, 6, 7, dtype=torch.float64, generator=generator)
    ood = torch.rand(5, 6, 7, generator=generator) < 0.3
    void = torch.rand(5, 6, 7, generator=generator) < 0.2
    ood[1], ood[3] = False, True
    ood[4] = void[4]  # the only OOD pixels of the last image are void
    result = metrics.per_image_ood(score, ood, void=void)
    assert result.images == 2
    expected = np.zeros(3)
    for i in (0, 2):
        valid = ~void[i]
        truth, s = ood[i][valid].numpy(), score[i][valid].numpy()
        expected += [
            sklearn.metrics.roc_auc_score(truth, s),
            sklearn.metrics.average_precision_score(truth, s),
            fpr_by_brute_force(torch.tensor(s[~truth]), torch.tensor(s[truth]), 0.95),
        ]
    np.testing.assert_allclose([v.item() for v in result[:3]], expected / 2, rtol=0, atol=1e-12)
    pooled = metrics.auroc(score[~ood & ~void], score[ood & ~void])
    assert abs(pooled - result.auroc) > 1e-3  # a mean over images is not the pooled number


def test_per_image_metrics_say_what_is_wrong():
    score = torch.zeros(2, 3, 3)
    with pytest.raises(ValueError, match="expected an image with both OOD and other pixels, got none of 2"):
        metrics.per_image_ood(score, torch.zeros(2, 3, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"expected a boolean mask in ood, got torch\.int64"):
        metrics.per_image_ood(score, torch.zeros(2, 3, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected void of shape \(2, 3, 3\), got \(3, 3\)"):
        metrics.per_image_ood(score, score > 0, void=score[0] > 0)
