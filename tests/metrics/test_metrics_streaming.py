"""Streamed statistics: exact where they claim to be, within their own bounds where not, in constant memory."""

import pytest
import torch

from dissensus import metrics
from dissensus.metrics.streaming import _leading_bits
from refusals import refuses
from thinning import thinned


def batches(count=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        p = torch.softmax(2 * torch.randn(2, classes, 5, 7, generator=generator), dim=1)
        y = torch.randint(classes, (2, 5, 7), generator=generator)
        y[torch.rand(2, 5, 7, generator=generator) < 0.2] = 255
        yield p, y


def joined():
    p, y = zip(*batches(), strict=True)
    return torch.cat(p), torch.cat(y)


def test_streamed_ece_and_miou_equal_the_plain_ones():
    calibration, confusion = metrics.CalibrationBins.empty(), metrics.ConfusionCounts.empty(3)
    for p, y in batches():
        calibration = calibration.update(p, y, ignore_index=255)
        confusion = confusion.update(p, y, ignore_index=255)
    p, y = joined()
    assert calibration.ece().item() == pytest.approx(metrics.ece(p, y, ignore_index=255).item(), abs=1e-13)
    assert confusion.miou().item() == pytest.approx(metrics.miou(p, y, ignore_index=255).item(), abs=1e-14)
    assert confusion.accuracy().item() == pytest.approx(metrics.accuracy(p, y, ignore_index=255).item(), abs=1e-14)


def test_streamed_ece_keeps_confidence_one_in_the_last_bin():
    p = torch.tensor([[1.0, 0.0], [0.95, 0.05]], dtype=torch.float64)
    state = metrics.CalibrationBins.empty()
    for i, label in enumerate([1, 0]):
        state = state.update(p[i : i + 1], torch.tensor([label]))
    assert state.ece().item() == pytest.approx(0.475, abs=1e-15)


def test_merged_workers_equal_one():
    generator = torch.Generator().manual_seed(0)
    whole, parts = metrics.ScoreHistogram.empty(12), [metrics.ScoreHistogram.empty(12) for _ in range(2)]
    calibration, halves = metrics.CalibrationBins.empty(), [metrics.CalibrationBins.empty() for _ in range(2)]
    for i, (p, y) in enumerate(batches()):
        score_in, score_ood = torch.randn(40, generator=generator), torch.randn(9, generator=generator)
        whole, parts[i % 2] = whole.update(score_in, score_ood), parts[i % 2].update(score_in, score_ood)
        calibration = calibration.update(p, y, ignore_index=255)
        halves[i % 2] = halves[i % 2].update(p, y, ignore_index=255)
    torch.testing.assert_close(parts[0].merge(parts[1]), whole, rtol=0, atol=0)
    torch.testing.assert_close(halves[0].merge(halves[1]), calibration, rtol=0, atol=1e-12)


def test_an_update_leaves_the_old_state_alone():
    empty = metrics.ScoreHistogram.empty(10)
    empty.update(torch.zeros(3), torch.ones(2))
    assert empty.in_counts.sum() == 0
    assert empty.ood_counts.sum() == 0


@pytest.mark.parametrize(
    ("bits", "prevalence", "kind"), thinned([10, 12, 14, 18], [0.02, 0.5], ["normal", "positive", "tied"], every=3)
)
def test_the_exact_metrics_lie_within_the_bounds(bits, prevalence, kind):
    generator = torch.Generator().manual_seed(bits)
    n = 3000
    shift = 1.0 if kind == "normal" else 0.1
    score = torch.randn(n, dtype=torch.float64, generator=generator)
    ood = torch.rand(n, generator=generator) < prevalence
    score = score + shift * ood
    score = {"normal": score, "positive": (4 * score - 10).exp(), "tied": score.round(decimals=1)}[kind]
    score_in, score_ood = score[~ood], score[ood]
    histogram = metrics.ScoreHistogram.empty(bits).update(score_in, score_ood)
    exact = {
        "auroc": metrics.auroc(score_in, score_ood), "aupr": metrics.aupr(score_in, score_ood),
        "aupr_in": metrics.aupr_in(score_in, score_ood), "fpr95": metrics.fpr95(score_in, score_ood),
        "fpr95_in": metrics.fpr95_in(score_in, score_ood),
    }  # fmt: skip
    for name, value in exact.items():
        bounded = getattr(histogram, name)()
        assert bounded.lower - 1e-12 <= value <= bounded.upper + 1e-12, name
        assert bounded.lower - 1e-12 <= bounded.value <= bounded.upper + 1e-12, name
        if bits == 18 and kind != "tied":  # true ties share a bin however narrow, and their order stays unknown
            assert bounded.upper - bounded.lower < 0.02, name


def test_the_bounds_of_one_bin_are_attained():
    # all scores share the bin [1, 1 + 2^-3): nothing is known about their order
    def both(order_in, order_ood):
        pair = torch.tensor(order_in) / 1000 + 1, torch.tensor(order_ood) / 1000 + 1
        return pair, metrics.ScoreHistogram.empty(12).update(*pair)

    best, histogram = both([0.0, 0.0], [1.0, 1.0, 1.0])
    assert tuple(v.item() for v in histogram.auroc()) == (0.5, 0.0, 1.0)
    assert metrics.auroc(*best).item() == histogram.auroc().upper.item() == 1
    assert metrics.aupr(*best).item() == histogram.aupr().upper.item() == 1
    assert metrics.fpr95(*best).item() == histogram.fpr95().lower.item() == 0
    worst, histogram = both([9.0, 9.0], [1.0, 2.0])
    assert metrics.auroc(*worst).item() == histogram.auroc().lower.item() == 0
    # two positives: the chord bound of the concave precision is the sum itself
    assert metrics.aupr(*worst).item() == pytest.approx(histogram.aupr().lower.item(), abs=1e-15)
    assert metrics.fpr95(*worst).item() == histogram.fpr95().upper.item() == 1


def test_bins_keep_the_order_of_all_numbers():
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.exp(40 * torch.randn(2000, dtype=torch.float64, generator=generator))
    score = torch.cat([magnitude, -magnitude, torch.tensor([0.0, torch.inf, -torch.inf, 1.0, -1.0, 1e-45, 1e-300])])
    index = _leading_bits(score.sort().values, 2**16)
    assert (index.diff() >= 0).all()
    assert index.min() >= 0
    assert index.max() < 2**16
    assert _leading_bits(torch.tensor([-0.0, 0.0]), 2**16).unique().numel() == 1
    relative = torch.tensor([1.0, 1.0 + 1 / 100])  # 16 bits: steps of 1/128
    assert _leading_bits(relative, 2**16).diff().item() == 1


def test_memory_does_not_grow_with_the_pixels():
    state = metrics.ScoreHistogram.empty(16)
    size = sum(t.numel() for t in state)
    for seed in range(3):
        state = state.update(torch.randn(50_000, generator=torch.Generator().manual_seed(seed)), torch.zeros(0))
        assert sum(t.numel() for t in state) == size
        assert all(t.untyped_storage().nbytes() == t.numel() * 8 for t in state)


def test_images_of_one_kind_and_void_ones_may_be_streamed():
    histogram = metrics.ScoreHistogram.empty(12).update(torch.zeros(5), torch.zeros(0))
    refuses(lambda: histogram.auroc(), "expected in-distribution and OOD scores")
    assert histogram.update(torch.zeros(0), torch.ones(2)).auroc().value.item() == 1
    void = torch.full((1, 2, 2), 255)
    state = metrics.CalibrationBins.empty().update(torch.full((1, 2, 2, 2), 0.5), void, ignore_index=255)
    refuses(lambda: state.ece(), "at least one labelled example, got none")


def test_sizes_out_of_range_are_refused():
    refuses(lambda: metrics.ScoreHistogram.empty(8), "expected bits of at least 10 and of at most 24, got 8")
    refuses(lambda: metrics.CalibrationBins.empty(0), "expected bins of at least 1")


def test_streamed_risks_are_those_of_the_binned_scores():
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(1, 50, (4, 300), generator=generator).double()  # ties, each in a bin of its own
    wrong = torch.rand(4, 300, generator=generator) < score / 60
    parts = [metrics.RiskHistogram.empty(), metrics.RiskHistogram.empty()]
    for i in range(4):
        parts[i % 2] = parts[i % 2].update(score[i], wrong[i])
    found = parts[0].merge(parts[1])
    assert found.aurc().item() == pytest.approx(metrics.aurc(-score, wrong.double()).item(), abs=1e-12)
    curve, exact = found.risk_coverage(), metrics.risk_coverage(-score, wrong.double())
    assert len(curve.coverage) == 49
    places = (curve.coverage * 1200).round().long() - 1
    torch.testing.assert_close(curve.risk, exact.risk[places], rtol=0, atol=1e-12)
    assert len(found.risk_coverage(10).coverage) <= 10
    refuses(lambda: metrics.RiskHistogram.empty().aurc(), "at least one")


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])  # the last one: nearly all confidences above 0.99999
def test_streamed_calibration_errors_are_those_of_all_examples(scale):
    generator = torch.Generator().manual_seed(0)
    log_p = (scale * torch.randn(20_000, 5, generator=generator, dtype=torch.float64)).log_softmax(1)
    y = torch.multinomial(log_p.mul(0.7).softmax(1), 1, generator=generator)[:, 0]
    found = metrics.RiskHistogram.empty()
    for rows, labels in zip(log_p.chunk(3), y.chunk(3), strict=True):
        found = found.update(metrics.max_probability_score(rows), rows.argmax(1) != labels)
    direct = [metric(log_p.exp(), y) for metric in (metrics.adaptive_ece, metrics.smooth_ece)]
    bound = 4e-4  # scores move by less than 0.001 |s|, confidences exp(−s) by less than 0.001 s exp(−s) ≤ 0.00037
    assert found.adaptive_ece().item() == pytest.approx(direct[0].item(), abs=bound)
    assert found.smooth_ece().item() == pytest.approx(direct[1].item(), abs=bound)
    assert direct[0] > 20 * bound
