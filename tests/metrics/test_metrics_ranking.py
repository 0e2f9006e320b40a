"""Rankings and what is read off them, against scikit-learn, brute force and by hand, ties and example weights included."""

import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics
import torch

from dissensus import metrics
from dissensus.metrics.classification import confidence_ece
from dissensus.metrics.ranking import RankedCounts, ranked_counts
from refusals import refuses


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
    other = sklearn.metrics.average_precision_score(1 - truth, -score)
    assert metrics.aupr_in(*pair).item() == pytest.approx(other, abs=1e-12)


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
    for ours, theirs in zip(metrics.roc_curve(*pair), (fpr, tpr, thresholds), strict=True):
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
    expected = fpr_by_brute_force(score_in, score_ood, recall)
    assert metrics.fpr95(score_in, score_ood, recall=recall).item() == pytest.approx(expected, abs=1e-14)
    expected = fpr_by_brute_force(-score_ood, -score_in, recall)
    assert metrics.fpr95_in(score_in, score_ood, recall=recall).item() == pytest.approx(expected, abs=1e-14)


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
    score_in, score_ood = torch.tensor([1.0, 10.0]), torch.arange(1.0, 17.0)  # 15/16 is nearer to 0.95 than 1
    assert metrics.fpr95(score_in, score_ood, rule="nearest").item() == 0.5
    assert metrics.fpr95(score_in, score_ood).item() == 1.0


def test_adjusted_aupr_equals_weighted_average_precision_of_scikit_learn():
    score_in, score_ood = scores(ties=True)
    truth, score = labels_and_scores(score_in, score_ood)
    for prevalence in (0.01, 0.3, 0.5):
        weight = np.where(truth == 1, prevalence / len(score_ood), (1 - prevalence) / len(score_in))
        expected = sklearn.metrics.average_precision_score(truth, score, sample_weight=weight)
        found = metrics.aupr_adjusted(score_in, score_ood, prevalence=prevalence).item()
        assert found == pytest.approx(expected, abs=1e-12)
    own = metrics.aupr_adjusted(score_in, score_ood, prevalence=len(score_ood) / len(score)).item()
    assert own == pytest.approx(metrics.aupr(score_in, score_ood).item(), abs=1e-14)
    # It does not depend on how many OOD inputs there are.
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
    told = "expected an image with both OOD and other pixels, got none of 2"
    refuses(lambda: metrics.per_image_ood(score, score > 0), told)
    told = r"expected a boolean mask in ood, got torch\.int64"
    refuses(lambda: metrics.per_image_ood(score, score.long()), told, TypeError)
    told = r"expected void of shape \(2, 3, 3\), got \(3, 3\)"
    refuses(lambda: metrics.per_image_ood(score, score > 0, void=score[0] > 0), told)


# ------------------------------------------------------------------------------------------- counts at distinct scores
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
    refuses(lambda: full.fpr(0.95, "closest"), "expected rule")


# -------------------------------------------------------------------------- OOD scores, also where a softmax saturates
def members(m=4, n=30, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(m, n, classes, dtype=torch.float64, generator=generator), dim=2)


def test_scores_equal_their_definitions():
    log_p = members()[0]
    torch.testing.assert_close(metrics.max_probability_score(log_p), -log_p.amax(1), rtol=0, atol=1e-14)
    entropy = scipy.stats.entropy(log_p.exp().numpy(), axis=1)
    torch.testing.assert_close(metrics.total_uncertainty(log_p), torch.from_numpy(entropy), rtol=0, atol=1e-14)
    logits = 3 * log_p + 1
    energy = -2 * scipy.special.logsumexp(logits.numpy() / 2, axis=1)
    found = metrics.energy_score(logits, temperature=2.0)
    torch.testing.assert_close(found, torch.from_numpy(energy), rtol=0, atol=1e-13)
    refuses(lambda: metrics.energy_score(logits, temperature=0.0), "expected temperature above 0")


def test_mutual_information_is_the_entropy_of_the_mixture_less_that_of_the_members():
    log_p = members()
    mixture = scipy.stats.entropy(log_p.exp().mean(0).numpy(), axis=1)
    own = scipy.stats.entropy(log_p.exp().numpy(), axis=2).mean(0)
    found = metrics.epistemic_uncertainty(log_p)
    torch.testing.assert_close(found, torch.from_numpy(mixture - own), rtol=0, atol=1e-14)
    # Of equal members it is zero, of opposed ones log M.
    assert metrics.epistemic_uncertainty(members(m=1).expand(3, -1, -1)).abs().max() < 1e-15
    opposed = torch.eye(3).log().unsqueeze(1)  # three members, each sure of its own class
    assert metrics.epistemic_uncertainty(opposed).item() == pytest.approx(math.log(3), abs=1e-14)


def test_float32_log_probabilities_of_a_saturated_softmax_do_not_tie():
    margin = torch.arange(5.0, 80.0)  # from 1 − 0.007 to 1 − 1e-34: all but the first dozen round to 1 in float32
    log_p = torch.log_softmax(torch.stack([margin, torch.zeros_like(margin)], 1), dim=1)
    assert (log_p.exp().amax(1) == 1).sum() > 50
    exact = torch.log1p(torch.exp(-margin.double()))
    score = metrics.max_probability_score(log_p)
    assert len(score.unique()) == len(margin)
    torch.testing.assert_close(score, exact, rtol=1e-5, atol=0)
    p = torch.exp(-margin.double()) / (1 + torch.exp(-margin.double()))
    exact_entropy = p * (margin.double() + exact) + (1 - p) * exact
    torch.testing.assert_close(metrics.total_uncertainty(log_p), exact_entropy, rtol=1e-5, atol=0)


def test_certain_predictions_have_score_zero():
    log_p = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert metrics.max_probability_score(log_p).item() == 0
    assert metrics.total_uncertainty(log_p).item() == 0
    assert metrics.epistemic_uncertainty(log_p.expand(2, 1, 3)).item() == 0


def test_pixels_keep_their_places():
    log_p = members(m=3, n=2 * 4 * 6).reshape(3, 2, 4, 6, 5)
    pixels = log_p.movedim(-1, 2)  # (M, N, C, H, W)
    for score in (metrics.max_probability_score, metrics.total_uncertainty, metrics.energy_score):
        maps = score(pixels[0])
        assert maps.shape == (2, 4, 6)
        torch.testing.assert_close(maps[1, 2, 3], score(log_p[0, 1, 2, 3].unsqueeze(0))[0], rtol=0, atol=1e-14)
    information = metrics.epistemic_uncertainty(pixels)
    alone = metrics.epistemic_uncertainty(log_p[:, 1, 2, 3].unsqueeze(1))[0]
    torch.testing.assert_close(information[1, 2, 3], alone, rtol=0, atol=1e-14)


# --------------------------------------------------------------------------------------------------- risk and coverage
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
    orders = itertools.product(itertools.permutations([1.0, 0.0, 0.5]), itertools.permutations([2.0, 0.0]))
    areas = [aurc_in_given_order([*a, *b, 1.0]) for a, b in orders]
    expected = sum(areas) / len(areas)
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


def test_augrc_is_the_closed_form_of_accuracy_and_ranking_and_the_mean_over_orders_of_ties():
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(50, dtype=torch.float64, generator=generator).round(decimals=1)  # with ties
    wrong = torch.rand(50, generator=generator) < 0.3
    error = wrong.double().mean().item()
    told = metrics.auroc(-confidence[~wrong], -confidence[wrong]).item()
    expected = error * (1 - error) * (1 - told) + error**2 / 2
    assert metrics.augrc(confidence, wrong).item() == pytest.approx(expected, abs=1e-14)
    assert metrics.augrc(torch.zeros(4), torch.ones(4)).item() == 0.5


@pytest.mark.parametrize(("risk", "expected"), [(0.0, 0.2), (0.2, 0.2), (0.25, 0.8), (0.4, 0.9), (0.5, 1.0)])
def test_coverage_at_risk_is_the_largest_share_that_a_threshold_reaches(risk, expected):
    confidence = torch.tensor([0.9, 0.9, 0.7, 0.7, 0.7, 0.6, 0.5, 0.5, 0.2, 0.1])
    loss = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0, 1, 2])  # risk 2/5 at 0.7, 2/6 at 0.6, 2/8 at 0.5, 3/9, 5/10
    i = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert metrics.coverage_at_risk(confidence[i], loss[i], risk=risk).item() == pytest.approx(expected)
    assert metrics.coverage_at_risk(torch.tensor([0.9, 0.1]), torch.tensor([1, 0]), risk=0.2).item() == 0
    refuses(lambda: metrics.coverage_at_risk(torch.ones(2), torch.ones(2), risk=-1), "expected risk of at least 0")


# ------------------------------------- example weights: ones are the plain metric, whole numbers are repeated examples
RANKINGS = {
    "auroc": {}, "aupr": {}, "aupr_in": {}, "aupr_adjusted": {"prevalence": 0.3}, "fpr95": {},
    "fpr95_in": {"rule": "nearest", "recall": 0.8},
}  # fmt: skip


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Scores with many ties, and four rows of weights for both."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.randint(30, (70,), generator=generator).double()
    outside = torch.randint(10, 40, (50,), generator=generator).double()
    weights = [torch.randint(4, (4, n), generator=generator) for n in (70, 50)]
    return inside, outside, (weights[0], weights[1])


@pytest.mark.parametrize(("name", "options"), RANKINGS.items())
@pytest.mark.parametrize("seed", range(5))
def test_weighted_rankings_are_the_rankings_of_repeated_inputs(name, options, seed):
    inside, outside, (a, b) = drawn(seed)
    metric = getattr(metrics, name)
    found = metric(inside, outside, weights=(a, b), **options)
    assert found.shape == (4,)
    for r in range(4):
        plain = metric(inside.repeat_interleave(a[r]), outside.repeat_interleave(b[r]), **options)
        assert float(found[r]) == pytest.approx(float(plain), abs=1e-12)
    ones = torch.ones(70), torch.ones(50)
    plain = float(metric(inside, outside, **options))
    assert float(metric(inside, outside, weights=ones, **options)) == pytest.approx(plain, abs=1e-12)


def test_weighted_calibration_and_selection_are_those_of_repeated_examples():
    inside, _, (weights, _) = drawn(0)
    confidence, correct = 0.2 + 0.8 * inside / 30, (torch.arange(70) % 3 > 0).double()
    loss = torch.linspace(0, 2, 70, dtype=torch.float64)
    ece = confidence_ece(confidence, correct, weights=weights)
    area = metrics.aurc(confidence, loss, weights=weights)
    for r, w in enumerate(weights):
        again = [each.repeat_interleave(w) for each in (confidence, correct, loss)]
        assert float(ece[r]) == pytest.approx(float(confidence_ece(again[0], again[1])), abs=1e-12)
        assert float(area[r]) == pytest.approx(float(metrics.aurc(again[0], again[2])), abs=1e-12)
    # the plain area is the mean of the curve it is named after
    torch.testing.assert_close(metrics.aurc(confidence, loss), metrics.risk_coverage(confidence, loss).risk.mean())


def test_what_is_no_weight_is_named():
    inside, outside, (a, b) = drawn(0)
    told = r"expected the weights of score_ood \(..., 50\), got \(4, 70\)"
    refuses(lambda: metrics.auroc(inside, outside, weights=(a, a)), told)
    told = r"expected loss of the shape \(3,\) of confidence, got \(2,\)"
    refuses(lambda: metrics.aurc(torch.zeros(3), torch.zeros(2)), told)
    refuses(lambda: metrics.auroc(inside, outside, weights=(-a, b)), "at least zero with a positive sum")
    none = torch.zeros(70)
    refuses(lambda: confidence_ece(inside / 30, inside > 3, weights=none), "at least zero with a positive sum")
    refuses(lambda: metrics.aurc(inside, inside, weights=torch.full((70,), 0.5)), "expected whole numbers as weights")
