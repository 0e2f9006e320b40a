"""Resampled metrics against the metric functions, intervals and tests against the library's bootstrap."""

import pytest
import torch

from dissensus import metrics
from dissensus.bench import resampling
from dissensus.bench.measures import Measure, measures
from dissensus.bench.statistics import Resampled, compared, resampled
from dissensus.bench.tables import signed
from dissensus.evaluate import Evaluation


def drawn(count: int, resamples: int = 6, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights (R, n), and the indices they stand for."""
    weights = resampling.draw_weights(count, resamples, torch.Generator().manual_seed(seed))
    return weights, [torch.repeat_interleave(torch.arange(count), row.long()) for row in weights]


def example_values(count: int = 80) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    confidence = torch.rand(count, generator=generator)
    confidence[:20] = confidence[20:40]  # ties
    return {
        "confidence": confidence,
        "correct": (torch.rand(count, generator=generator) < confidence).double(),
        "value": torch.rand(count, generator=generator, dtype=torch.float64),
    }


def test_weights_count_draws_with_replacement():
    weights, _ = drawn(50, 400)
    assert (weights.sum(1) == 50).all()
    # multinomial: mean 1, variance 1 − 1/n
    assert float(weights.mean()) == 1
    assert float(weights.var()) == pytest.approx(1 - 1 / 50, abs=4 * (2 / weights.numel()) ** 0.5 * 1.5)


def test_resampled_metrics_are_the_metrics_of_the_resamples():
    values = example_values()
    weights, indices = drawn(80)
    confidence, correct, value = values["confidence"], values["correct"], values["value"]
    found = {
        "mean": resampling.mean(weights, value),
        "root_mean": resampling.root_mean(weights, value),
        "ece": resampling.ece(weights, confidence, correct),
        "aurc": resampling.aurc(weights, -confidence, correct),
    }
    for r, i in enumerate(indices):
        probabilities = torch.stack([confidence[i] / 2 + 0.5, 0.5 - confidence[i] / 2], 1)
        labels = 1 - correct[i].long()
        halved = resampling.ece(weights, confidence / 2 + 0.5, correct)
        expected = {
            "mean": value[i].mean(),
            "root_mean": value[i].mean().sqrt(),
            "aurc": metrics.aurc(confidence[i], 1 - correct[i]),
        }
        for name, number in expected.items():
            assert float(found[name][r]) == pytest.approx(float(number), abs=1e-10), name
        assert float(halved[r]) == pytest.approx(float(metrics.ece(probabilities, labels)), abs=1e-6)


@pytest.mark.parametrize("name", ["auroc", "aupr", "fpr95"])
def test_resampled_rankings_are_the_rankings_of_the_resamples(name):
    generator = torch.Generator().manual_seed(1)
    inside = torch.randint(30, (70,), generator=generator).double()  # many ties
    outside = torch.randint(10, 40, (50,), generator=generator).double()
    (weights_in, in_indices), (weights_out, out_indices) = drawn(70), drawn(50, seed=1)
    found = getattr(resampling, name)(weights_in, weights_out, inside, outside)
    for r, (i, o) in enumerate(zip(in_indices, out_indices, strict=True)):
        assert float(found[r]) == pytest.approx(float(getattr(metrics, name)(inside[i], outside[o])), abs=1e-12)


def evaluation(nll: torch.Tensor) -> Evaluation:
    return Evaluation("classification", {"nll": float(nll.mean())}, {"test/nll": nll}, "max_probability")


NLL = Measure("nll", "NLL", "test", "low", samples=(("test/nll",),))


def test_with_one_seed_interval_and_test_are_those_of_the_librarys_bootstrap():
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(500, generator=generator, dtype=torch.float64)
    second = first + 0.02 * torch.randn(500, generator=generator, dtype=torch.float64) + 0.002
    a, b = (resampled(NLL, [evaluation(v)], resamples=4000) for v in (first, second))
    mine, theirs = a.interval(), metrics.bootstrap_mean(first, resamples=4000, seed=1)
    assert mine is not None
    assert mine.estimate == theirs.estimate
    # quantiles of 4000 draws: their standard error is about 2.7 deviations / √4000 in the tails
    error = 4 * 2.7 * float(first.std()) / 500**0.5 / 4000**0.5
    assert mine.lower == pytest.approx(theirs.lower, abs=error)
    assert mine.upper == pytest.approx(theirs.upper, abs=error)
    pair, reference = compared(a, b), metrics.paired_test(first, second, resamples=4000, seed=1)
    assert pair is not None
    assert pair.difference == pytest.approx(reference.difference, abs=1e-12)
    assert pair.p_value == pytest.approx(reference.p_value, abs=4 * (0.25 / 4000) ** 0.5)


def test_seeds_are_resampled_too():
    values = torch.full((100,), 1.0, dtype=torch.float64)
    spread = resampled(NLL, [evaluation(values), evaluation(values + 1)], resamples=2000)
    assert spread.estimate == 1.5
    assert spread.draws is not None
    # examples do not vary, so a draw is the mean of two seeds chosen out of {1, 2}: 1, 1.5 or 2 with ¼, ½, ¼
    shares = [float((spread.draws == value).double().mean()) for value in (1.0, 1.5, 2.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=4 * (0.25 / 2000) ** 0.5)


def test_resamples_are_shared_by_methods():
    values = torch.rand(50, dtype=torch.float64)
    same = compared(resampled(NLL, [evaluation(values)]), resampled(NLL, [evaluation(values + 0.3)]))
    assert same is not None
    assert (same.lower, same.upper) == (pytest.approx(-0.3), pytest.approx(-0.3))
    assert same.p_value == pytest.approx(1 / 1001)


def test_what_cannot_be_resampled_has_no_interval():
    bare = Evaluation("classification", {"nll": 1.0}, {}, "max_probability")
    assert resampled(NLL, [bare]) == Resampled(1.0, None)
    assert resampled(NLL, [bare]).interval() is None
    values = torch.rand(50)
    assert resampled(NLL, [evaluation(values), evaluation(values[:20])]).draws is None
    assert compared(resampled(NLL, [bare]), resampled(NLL, [evaluation(values)])) is None
    infinite = resampled(NLL, [evaluation(torch.tensor([1.0, float("inf")]))])
    assert infinite.interval() is None


def test_measures_know_which_way_is_better():
    assert NLL.goodness(0.1) > NLL.goodness(0.2)
    coverage = Measure("coverage90", "Coverage", "test", 0.9, 100, 1, "%")
    assert coverage.goodness(0.91) > coverage.goodness(0.8)
    assert coverage.goodness(0.89) == pytest.approx(coverage.goodness(0.91))
    assert coverage.text(0.913) == "91.3"
    assert Measure("cost/parameters", "Parameters", "cost", digits=0).text(199210.0) == "199,210"
    assert NLL.text(0.001) == "1e-03"  # not 0.00
    assert NLL.text(-0.001) == "-1e-03"
    assert NLL.text(0.0) == "0.00"
    assert [signed(NLL, value) for value in (0.001, -0.001, 1.0)] == ["+1e−03", "−1e−03", "+1.00"]
    assert [m.key for m in measures(evaluation(torch.ones(3)))] == ["nll"]
